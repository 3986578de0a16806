"""What verbs print: results to stdout, everything else to stderr."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullrank.core.errors import FullRankError, InputError
from fullrank.files import as_json

if TYPE_CHECKING:
    from rich.table import Table


def explain(error: Exception) -> str:
    """An error in a line or two."""
    if isinstance(error, FullRankError):
        return "\n".join(f"fullrank: {line}" for line in str(error).splitlines())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "fullrank: no space left on the disk"
    words = " ".join(str(error).split())
    return f"fullrank: {type(error).__name__}: {words[:300]} (--debug shows where)"


def say(text: str) -> None:
    """A remark for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def silent(text: str) -> None:
    """What `say` is with `--quiet`."""


def print_json(content: Any) -> None:
    """The one JSON document of a verb called with `--json`."""
    print(as_json(content))


def show_report(folders: Sequence[Path], page: Path, *, json: bool = False, title: str | None = None) -> None:
    """Write the report of runs to `page`, then print its table, or its content as JSON, and where it is."""
    from fullrank.reporting import report

    found = report(folders)
    page = found.write(page, title)
    if json:
        print_json({"report": str(page), **found.as_json()})
        return
    found.print()
    print(page)


def exclude(option: str, does: str, others: Mapping[str, object]) -> None:
    """InputError if any of `others` was given: beside `option` it would change nothing."""
    if given := [name for name, value in others.items() if value is not None]:
        raise InputError(f"{option} {does}: leave out {', '.join(given)}, or {option}")


def show(table: Table) -> None:
    """The table at its own width, also where the terminal is narrower: no figure is cut off."""
    from rich.console import Console

    console = Console()
    wide = console.measure(table, options=console.options.update(max_width=1000)).maximum
    (console if wide <= console.width else Console(width=wide)).print(table)
