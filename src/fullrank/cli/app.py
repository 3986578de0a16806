"""The Typer application, in which every module of verbs registers its own."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from typer.models import ArgumentInfo

from fullrank.cli.options import expand, make_parameter, set_parameters
from fullrank.core.errors import FullRankError, InputError, one_line
from fullrank.plugins import import_plugin, imported_plugins

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


_MODELS = {"CONFIG", "MODEL", "DIR", "TABLE", "CORPUS"}  # names of arguments that may need a plug-in


def verb(*commands: str, name: str | None = None, group: typer.Typer = app, **options: Any) -> Callable[[Verb], Verb]:
    """Make a function a verb of the command line, with commands as examples for its help page.

    A parameter that is a bundle of options stands for them. A verb that takes a configuration, a model or a run also takes
    `--import MODULE`.
    """

    def register(function: Verb) -> Verb:
        words = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")  # the terminal wraps its paragraphs
        command = expand(function)
        parameters = [*inspect.signature(command).parameters.values()]
        notes = [note for parameter in parameters for note in getattr(parameter.annotation, "__metadata__", ())]
        if any(isinstance(note, ArgumentInfo) and note.metavar in _MODELS for note in notes):
            set_parameters(command, [*parameters, make_parameter("imports", Imports, None)])
        group.command(name, help=words, epilog=examples(*commands), **options)(command)
        return function

    return register


def load_modules(names: list[str] | None) -> list[str] | None:
    """Import modules, from the working directory first: their stages, measurements and corpora are known then."""
    for name in names or []:
        try:
            import_plugin(name)
        except FullRankError:
            raise
        except Exception as error:
            raise InputError(
                f"--import {name}: cannot be imported ({type(error).__name__}: {one_line(error)}); name a module that is "
                "installed or in the working directory, as my_module for my_module.py"
            ) from error
    return names


def import_options() -> list[str]:
    """The words `--import MODULE` of this command line, for commands that go on from it."""
    return [word for name in imported_plugins for word in ("--import", name)]


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE", callback=load_modules, is_eager=True,
        help="Import a module of yours first, with its stages, measurements or corpora. Repeatable.",
    ),
]  # fmt: skip


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
