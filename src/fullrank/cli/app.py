"""The Typer application, in which every module of verbs registers its own."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

Verb = TypeVar("Verb", bound=Callable[..., None])


app = typer.Typer(
    name="fullrank",
    help="Transformer language models without their bottlenecks.",
    epilog="Exit status: 0 done, 1 a run or a check failed, 2 bad input (nothing was run), 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def examples(*commands: str) -> str:
    """The end of a help page: commands, each on a line of its own."""
    return "\n  ".join(["Examples:", *(f"[cyan]{one}[/cyan]" for one in commands)])


def verb(*commands: str, name: str | None = None, group: typer.Typer = app, **options: Any) -> Callable[[Verb], Verb]:
    """Make a function a verb of the command line, with commands as examples for its help page."""

    def register(function: Verb) -> Verb:
        words = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")  # the terminal wraps its paragraphs
        return group.command(name, help=words, epilog=examples(*commands), **options)(function)

    return register


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
    for verbs in ("train", "use", "translate", "analyze", "check", "share", "inspect"):
        importlib.import_module(f"fullrank.cli.{verbs}")
    return app
