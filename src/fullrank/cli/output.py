"""Output of the verbs: results to stdout, everything else to stderr."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fullrank.core.errors import FullRankError, InputError
from fullrank.files import as_json, no_room, out_of_memory, visible

if TYPE_CHECKING:
    from fullrank.render.blocks import Grid, Page

_LONGEST = 2000  # characters of a line
_SHORT = {"beams": "beam", "no_repeat_ngram_size": "no_repeat_ngram"}  # keys whose options have other names
UsageError: Any = typer.BadParameter.__bases__[0]  # a wrong word on the command line: Typer gives its class no name


def name_option(key: str) -> str:
    """The option of a key."""
    return f"--{_SHORT.get(key, key)}".replace("_", "-")


def explain(error: Exception) -> str:
    """An error in a line or two."""
    if isinstance(error, FullRankError):
        return "\n".join(f"fullrank: {visible(line[:_LONGEST])}" for line in str(error).splitlines())
    if isinstance(error, UsageError):
        command = error.ctx.command_path if error.ctx else "fullrank"
        return f"{command}: {visible(error.format_message()) or 'a verb is missing'} ({command} --help)"
    if no_room(error):
        return "fullrank: no space left on the disk"
    words = visible(" ".join(str(error).split())[:300])
    if out_of_memory(error):
        return (
            "fullrank: out of memory: lower --batch-size (eval.batch_size, train.batch_size), the length of what is read at "
            f"once (--context, eval.segment_length, train.segment_length), or the size of the model; {words}"
        )
    return f"fullrank: {type(error).__name__}: {words} (--debug shows where)"


def say(text: str) -> None:
    """A remark for the person at the terminal."""
    clear_progress()
    print(visible(text), file=sys.stderr, flush=True)


_ERASE_LINE = "\r\x1b[2K"
_open_lines: list[str] = []  # the line of progress that stands on the terminal, without its end


def show_progress(text: str) -> None:
    """A remark that takes the place of the one before it on a terminal; elsewhere it is a line like any other."""
    if not sys.stderr.isatty():
        say(text)
        return
    _open_lines[:] = [visible(" ".join(text.split()))[: shutil.get_terminal_size().columns - 1]]
    print(f"{_ERASE_LINE}{_open_lines[0]}", end="", file=sys.stderr, flush=True)


def clear_progress() -> None:
    """Take the line of progress off the terminal."""
    if _open_lines:
        _open_lines.clear()
        print(_ERASE_LINE, end="", file=sys.stderr, flush=True)


def print_json(content: Any) -> None:
    """The one JSON document of a verb called with `--json`."""
    print(as_json(content))


_WIDTH = 100  # characters; what is longer has a line for each part


def describe(content: Mapping[str, Any]) -> list[str]:
    """Values by name as lines for people: a mapping that is long has a line for each of its names, what is empty has none."""
    lines = []
    shown = {name: value for name, value in content.items() if value is not None and value not in ({}, (), [], "")}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        text = _shorten(value)
        if not isinstance(value, Mapping) or len(text) < _WIDTH:
            lines.append(f"{name:<{width}}  {text}")
        else:
            lines += [name, *(f"  {line}" for line in describe(value))]
    return lines


def _shorten(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shorten(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_shorten, value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def tell(content: Any, lines: Iterable[str | Path | Grid], *, json: bool) -> None:
    """The result of a verb: as one JSON document, or as lines and tables for people."""
    from fullrank.render.blocks import Grid
    from fullrank.render.terminal import print_grid

    clear_progress()
    if json:
        print_json(content)
        return
    for line in lines:
        if isinstance(line, Grid):
            print_grid(line)
        else:
            print(visible(str(line)))


def write_report(
    folders: Sequence[Path], page: Path, title: str | None = None, table: str | None = None
) -> tuple[Page, dict[str, Any]]:
    """Write the report of runs to `page`; the page and its content as JSON.

    table: the table of several recipes that the runs belong to.
    """
    from fullrank.comparison.compare import build_report
    from fullrank.comparison.page import build_page, report_to_dict
    from fullrank.render.page import write_page

    content = build_report(folders, table)
    built = build_page(content, title)
    return built, {"report": str(write_page(built, page)), **report_to_dict(content)}


def show_report(
    folders: Sequence[Path], page: Path, *, json: bool = False, title: str | None = None, table: str | None = None
) -> None:
    """Write the report of runs to `page`, then print its table, or its content as JSON, and where it is."""
    from fullrank.render.terminal import print_page

    clear_progress()
    built, content = write_report(folders, page, title, table)
    if json:
        print_json(content)
        return
    print_page(built)
    print(content["report"])


def exclude(option: str, does: str, others: Iterable[str]) -> None:
    """InputError if there are `others`: beside `option` they would change nothing."""
    if names := ", ".join(map(name_option, others)):
        raise InputError(f"{option} {does}: leave out {names}, or {option}")


def drop_missing(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}
