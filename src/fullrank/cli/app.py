"""The Typer application, in which every module of verbs registers its own: output, and the options that verbs share.

Options stand alone, in bundles, or are made from keys of `eval`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import gc
import importlib
import inspect
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer
from typer import Argument, Option

from fullrank.config.run import EvalConfig
from fullrank.core.errors import FullRankError, InputError, Interrupted, one_line
from fullrank.core.section import hints_of
from fullrank.files import as_json, is_main_process, no_room, out_of_memory
from fullrank.plugins import import_plugin, imported_plugins

if TYPE_CHECKING:
    from fullrank.config.finetune import FinetuneConfig
    from fullrank.config.load import Resolved
    from fullrank.config.run import RunConfig
    from fullrank.experiments.analyze import Reading
    from fullrank.render.blocks import Grid

# -- output: results to stdout, everything else to stderr --------------------------------------------------------------

_LONGEST = 2000  # characters of a line
_SHORT = {"beams": "beam", "no_repeat_ngram_size": "no_repeat_ngram"}  # keys whose options have other names
UsageError: Any = typer.BadParameter.__bases__[0]  # a wrong word on the command line: Typer gives its class no name


def name_option(key: str) -> str:
    """Name the option of a key."""
    return f"--{_SHORT.get(key, key)}".replace("_", "-")


def explain(error: Exception) -> str:
    """Explain an error in a line or two."""
    if isinstance(error, FullRankError):
        return "\n".join(f"fullrank: {line[:_LONGEST]}" for line in str(error).splitlines())
    if isinstance(error, UsageError):
        command = error.ctx.command_path if error.ctx else "fullrank"
        return f"{command}: {error.format_message() or 'a verb is missing'} ({command} --help)"
    if no_room(error):
        return "fullrank: no space left on the disk"
    words = one_line(error, 300)
    if out_of_memory(error):
        return (
            "fullrank: out of memory: lower --batch-size (eval.batch_size, train.batch_size), the length of what is read at "
            f"once (--context, eval.segment_length, train.segment_length), or the size of the model; {words}"
        )
    return f"fullrank: {type(error).__name__}: {words} (--debug shows where)"


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Run the block with the log of fullrank on stderr; of several processes the first alone logs more than errors."""
    logger = logging.getLogger("fullrank")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def lower_verbosity(quiet: bool) -> bool:
    """Log warnings and errors alone where `quiet` is set, and return `quiet`."""
    if quiet:
        logging.getLogger("fullrank").setLevel(logging.WARNING)
    return quiet


def print_json(content: Any) -> None:
    """Print the one JSON document of a verb called with `--json`."""
    print(as_json(content))


_WIDTH = 100  # characters; what is longer has a line for each part


def describe(content: Mapping[str, Any]) -> list[str]:
    """List values by name as lines for people.

    A mapping that is long has a line for each of its names; what is empty has none.
    """
    from fullrank.render.blocks import format_setting

    lines = []
    texts = {name: text for name, value in content.items() if (text := format_setting(value))}
    width = max(map(len, texts), default=0)
    for name, text in texts.items():
        if isinstance(content[name], Mapping) and len(text) >= _WIDTH:
            lines += [name, *(f"  {line}" for line in describe(content[name]))]
        else:
            lines.append(f"{name:<{width}}  {text}")
    return lines


def tell(content: Any, lines: Iterable[str | Path | Grid], *, json: bool) -> None:
    """Print the result of a verb.

    Args:
        content: the JSON document.
        lines: lines and tables for people.
        json: print the JSON document in their place.
    """
    from fullrank.render.blocks import Grid
    from fullrank.render.terminal import print_grid

    if json:
        print_json(content)
        return
    for line in lines:
        if isinstance(line, Grid):
            print_grid(line)
        else:
            print(line)


def show_report(
    folders: Sequence[Path], page: Path, *, json: bool = False, title: str | None = None, table: str | None = None
) -> None:
    """Write the report of runs, then print its table and where it is.

    Args:
        folders: the runs.
        page: where the report is written.
        json: print its content as JSON instead.
        title: title of the page; None for the number of runs and their text.
        table: the table of several recipes that the runs belong to; None without.

    Raises:
        InputError: a folder is no run, or `page` is another file.
        RunError: the page cannot be written.
    """
    from fullrank.comparison.page import write_report
    from fullrank.render.terminal import print_page

    built, content = write_report(folders, page, title, table)
    if json:
        print_json(content)
        return
    print_page(built)
    print(content["report"])


def exclude(option: str, does: str, others: Iterable[str]) -> None:
    """Refuse options that would change nothing beside another one.

    Args:
        option: the option.
        does: what it does, in words.
        others: keys of the options that are refused.

    Raises:
        InputError: there are such options.
    """
    if names := ", ".join(map(name_option, others)):
        raise InputError(f"{option} {does}: leave out {names}, or {option}")


def drop_missing(options: Any) -> dict[str, Any]:
    """Return the options of a bundle that have a value."""
    return {name: value for name, value in vars(options).items() if value is not None}


# -- verbs -------------------------------------------------------------------------------------------------------------

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
    """Format the end of a help page: commands, each on a line of its own."""
    return "\n  ".join(["Examples:", *(f"[cyan]{command}[/cyan]" for command in commands)])


def verb(*commands: str, name: str | None = None, group: typer.Typer = app, passes_options: bool = False) -> Any:
    """Make a function a verb of the command line.

    A parameter that is a bundle of options stands for them.

    Args:
        *commands: examples for the help page.
        name: that of the verb; None for that of the function.
        group: the verbs among which it stands.
        passes_options: leave options to another command line.

    Returns:
        A decorator, which leaves the function as it is.
    """
    context = {"ignore_unknown_options": True, "allow_extra_args": True} if passes_options else None

    def register(function: Any) -> Any:
        words = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")  # the terminal wraps its paragraphs
        group.command(
            name, help=words, epilog=examples(*commands), context_settings=context, add_help_option=not passes_options
        )(expand(function))
        return function

    return register


def _version(value: bool) -> None:
    if value:
        import fullrank

        print(f"fullrank {fullrank.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error; anywhere on the line.")] = False,
    modules: Annotated[
        list[str] | None,
        Option(
            "--import",
            metavar="MODULE",
            help="Import a module of yours first, with its stages, measurements or corpora; anywhere on the line. Repeatable.",
        ),
    ] = None,
) -> None:
    """Declare the options of every verb; `main` takes --debug and --import off the line, wherever they stand."""


def load() -> typer.Typer:
    """Load the application with all verbs, in the order of the help."""
    for verbs in ("train", "use", "analyze", "inspect"):
        importlib.import_module(f"fullrank.cli.{verbs}")
    return app


# -- options -----------------------------------------------------------------------------------------------------------

Number = partial(Option, metavar="N", min=1)  # a whole number; `min=0` is given where it may be nothing


def suggest_recipes(incomplete: str) -> list[str]:
    """List shipped recipes that begin so. Where none does, the shell goes on with names of files."""
    from fullrank.config.load import list_shipped

    return [name for name in list_shipped() if name.startswith(incomplete)]


# -- alone -----------------------------------------------------------------------------------------------------------

Config = Annotated[
    str,
    Argument(
        metavar="CONFIG",
        help="A recipe (`fullrank recipes list`), a YAML file or a run folder.",
        autocompletion=suggest_recipes,
    ),
]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="Settings laid on the configuration: train.steps=1000")
]
Row = Annotated[str | None, Option(help="The row of the recipe's table; the first one if not given.")]
Scale = Annotated[str | None, Option(help="paper, small or tiny; the recipe's largest if not given.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document and nothing else on stdout.")]
Kernel = Annotated[
    str,
    Option(
        help="The attention kernel: auto, reference (for the vocabulary layer, too), sdpa, blocks, native, triton or "
        "multilinear."
    ),
]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:0.")]
Checkpoint = Annotated[str, Option(help="Of a run: best, last, or average, as `fullrank average` makes it.")]
Checkpoints = Annotated[str, Option(metavar="A,B", help="The same; of several the mean of their probabilities.")]
Runs = Annotated[list[Path], Argument(metavar="DIR", help="A run folder; of several the mean of their probabilities.")]
Source = Annotated[str | None, Option("--from", metavar="DIR", help="A local folder that holds the corpus (data.dir).")]
Quiet = Annotated[bool, Option("--quiet", help="No progress.", callback=lower_verbosity)]
Run = Annotated[Path, Argument(metavar="DIR", help="A run folder.")]
Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A run folder, a folder of a saved model, or a Hugging Face model (folder or hub name).",
    ),
]
Models = Annotated[
    list[str],
    Argument(
        metavar="MODEL",
        help="Run folders, folders of saved models, or Hugging Face models (folder or hub name).",
    ),
]
TextFile = Annotated[
    Path | None, Option("--text", metavar="FILE", help="Text to read; a run's own valid split if not given.")
]
Split = Annotated[str, Option(help="train, valid, test or another one of the corpus.")]


# -- bundles: a parameter of a verb that is one of these stands for its options ---------------------------------------


@dataclass(frozen=True)
class Choice:
    """A configuration, and the settings that are laid on it."""

    config: Config
    overrides: Overrides = None
    row: Row = None
    scale: Scale = None
    source: Source = None

    @property
    def settings(self) -> list[str]:
        """The settings, `--from DIR` among them."""
        return [*(self.overrides or []), *([f"data.dir={self.source}"] if self.source else [])]

    def resolve(self) -> Resolved[RunConfig | FinetuneConfig]:
        from fullrank.config.load import resolve_any

        return resolve_any(self.config, self.row, self.scale, self.settings)


@dataclass(frozen=True)
class RunOptions:
    """A run that is trained: its folder, its kernel, and what is told of it."""

    out: Annotated[Path | None, Option(help="The run folder; runs/... if not given.")] = None
    kernel: Kernel = "auto"
    quiet: Quiet = False
    json: Json = False


@dataclass(frozen=True)
class TextOptions:
    """The text that a model reads, and how."""

    text: TextFile = None
    texts: Annotated[int | None, Number(help="Segments of the text that are read.")] = None
    segment_length: Annotated[int | None, Number(min=2, help="Tokens read at a time; as evaluated, or 128.")] = None
    checkpoint: Checkpoint = "best"
    device: Device = "auto"

    def to_reading(self) -> Reading:
        from fullrank.experiments.analyze import Reading

        return Reading(**vars(self))


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn."""

    temperature: Annotated[
        float | None,
        Option(min=0.0, help="Divides the logits: below 1 less random, above 1 more; 1 if not given."),
    ] = None
    top_k: Annotated[int | None, Number(help="Only the k likeliest tokens.")] = None
    top_p: Annotated[float | None, Option(help="Only the likeliest tokens that make up p.")] = None
    min_p: Annotated[float | None, Option(help="Only tokens with this share of the likeliest one's probability.")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, Option(help="Above 1: tokens of prompt and text are less likely to come again.")
    ] = None
    seed: Annotated[int | None, Option(min=0, max=2**63 - 1, help="Makes samples repeatable.")] = None


def make_options(*keys: str) -> Any:
    """Make a bundle of options from keys of `eval`, of their types and with their descriptions.

    A verb has it as `Annotated[Any, make_options("context", "stride")]`.
    """
    fields = {field.name: field for field in dataclasses.fields(EvalConfig)}
    options = []
    for key in keys:
        kind, least = _read_type(hints_of(EvalConfig)[key])
        word = name_option(key)
        option = Option(
            f"{word}/--no-{word[2:]}" if kind is bool else word,
            metavar="N" if kind is int else None,
            min=least,
            help=f"{fields[key].metadata['description'].capitalize()}.",
        )
        options.append((key, Annotated[kind | None, option], None))
    return dataclasses.make_dataclass("Options", options)


def _read_type(hint: Any) -> tuple[Any, int | None]:
    """Return the type of an option, and the least whole number that its key allows."""
    while (parts := get_args(hint)) and NoneType in parts:
        hint = parts[0]
    if not parts:
        return hint, None
    kind, allowed = parts
    if kind is not int:
        return kind, None
    return int, 0 if allowed.test(0) else 1


def expand(function: Any) -> Any:
    """Expand a function: the options of its bundles become parameters of their own, which typer reads."""
    bundles: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        bundle = getattr(parameter.annotation, "__metadata__", [parameter.annotation])[0]
        if dataclasses.is_dataclass(bundle):
            bundles[parameter.name] = bundle
            parameters += inspect.signature(bundle, eval_str=True).parameters.values()  # type: ignore[arg-type]
        else:
            parameters.append(parameter)

    def command(**values: Any) -> None:
        for name, bundle in bundles.items():
            values[name] = bundle(**{field.name: values.pop(field.name) for field in dataclasses.fields(bundle)})
        function(**values)

    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    set_parameters(command, [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters])
    return command


def set_parameters(command: Any, parameters: list[inspect.Parameter]) -> None:
    """Set the parameters of a verb."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def read_seeds(text: str | None) -> list[int] | None:
    """Read seeds: `3` is 1 to 3; `4,7` and `26,` are a list. None stays None; InputError for any other text."""
    if text is None:
        return None
    if not re.fullmatch(r"0*[1-9]\d*|\d+\s*,(\s*\d+\s*,)*(\s*\d+)?", text.strip()):
        raise InputError(f"--seeds: a number of seeds (3), or the seeds (1,5 or 26,), given {text!r}")
    numbers = [int(word) for word in text.split(",") if word.strip()]
    return list(dict.fromkeys(numbers)) if "," in text else list(range(1, numbers[0] + 1))


# -- the command ---------------------------------------------------------------------------------------------------------

_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 2 for bad input, 1 for a failed run, 130 when interrupted.

    Anywhere on the line, `--debug` shows the traceback of an error, and `--import MODULE` imports a module before all else.
    """
    words = sys.argv[1:] if argv is None else argv
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        other_words = import_modules([word for word in words if word != "--debug"])
        with log_to_stderr():
            status = load()(other_words, prog_name="fullrank", standalone_mode=False, obj=other_words)
        sys.stdout.flush()  # while an error can still be told
        if "triton" not in sys.modules:  # which tells of all that no collection has freed
            gc.freeze()  # the end of the process frees everything: looking for cycles first takes 0.2 s
        sys.exit(status)
    except KeyboardInterrupt:
        _interrupt()
    except SystemExit as stopped:
        if isinstance(stopped.__context__, BrokenPipeError):  # told by Rich or Typer, with status 1
            _end_unread()
        if stopped.code == _INTERRUPTED:  # Typer returns it for a verb that Ctrl-C stopped, and says nothing
            _interrupt()
        raise
    except BrokenPipeError:
        _end_unread()
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        sys.exit(_tell(error, words))


def import_modules(words: Sequence[str]) -> list[str]:
    """Import the modules of `--import MODULE` and `--import=MODULE`, and return the other words of the command line."""
    parser = argparse.ArgumentParser("fullrank", "fullrank ... --import MODULE", add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    imports, other_words = parser.parse_known_args(words)
    for name in imports.modules:
        try:
            import_plugin(name)
        except FullRankError:
            raise
        except Exception as error:
            raise InputError(
                f"--import {name}: cannot be imported ({type(error).__name__}: {one_line(error)}); name a module that is "
                "installed or in the working directory, as my_module for my_module.py"
            ) from error
    return other_words


def import_options() -> list[str]:
    """List the words `--import MODULE` of this command line, for commands that go on from it."""
    words = []
    for name in imported_plugins:
        words += ["--import", name]
    return words


def _tell(error: Exception, words: list[str]) -> int:
    """Print an error and return its exit status."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = InputError(f"{error.filename}: too long a name, a file system takes 255 bytes; give a shorter one")
    lines = [explain(error)]
    if isinstance(error, Interrupted) and "TORCHELASTIC_RUN_ID" not in os.environ:  # else who started it says so
        lines.append(f"fullrank: to go on: {shlex.join(['fullrank', *words])}")
    with contextlib.suppress(OSError):  # where nobody reads them the exit status says it
        print("\n".join(lines), file=sys.stderr, flush=True)
    if isinstance(error, OSError):  # a full disk: Python would try to print what is left
        _discard_output()
    return 2 if isinstance(error, UsageError) else getattr(error, "status", 1)


def _discard_output() -> None:
    """Let what is left of the output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end_unread() -> NoReturn:
    """End where nobody reads the output any more (`| head`)."""
    _discard_output()
    sys.exit(0)


def _interrupt() -> NoReturn:
    print("fullrank: interrupted", file=sys.stderr)
    sys.exit(_INTERRUPTED)
