"""All verbs in one Typer application."""

from __future__ import annotations

from typing import Annotated

import typer

from fullrank.cli import (
    analysis,
    average,
    bench,
    check,
    export,
    finetune,
    inspection,
    lm_eval,
    training,
    translate,
    use,
)

app = typer.Typer(
    name="fullrank",
    help="Transformer language models without their bottlenecks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        import fullrank

        print(f"fullrank {fullrank.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


training.add_to(app)
finetune.add_to(app)
use.add_to(app)
average.add_to(app)
translate.add_to(app)
analysis.add_to(app)
check.add_to(app)
export.add_to(app)
bench.add_to(app)
lm_eval.add_to(app)
inspection.add_to(app)
