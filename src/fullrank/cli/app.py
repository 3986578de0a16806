"""The Typer application, in which every module of verbs registers its own."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

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


def load() -> typer.Typer:
    """The application with all verbs, in the order of the help."""
    for verbs in ("train", "results", "use", "translate", "analyze", "check", "share", "inspect"):
        importlib.import_module(f"fullrank.cli.{verbs}")
    return app
