"""All verbs in one Typer application."""

from __future__ import annotations

from typing import Annotated

import typer

from fullrank.cli import analyze, inspect, share, train, translate, use

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


for verbs in (train, use, translate, analyze, share, inspect):
    verbs.add_to(app)
