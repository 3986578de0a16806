"""The report of runs: one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullrank.reporting import details, format, overview, troubles
from fullrank.reporting.curve_section import curves_section
from fullrank.reporting.grouping import row_names, seeds_of_rows
from fullrank.reporting.shell import document, write
from fullrank.reporting.summary import summarise
from fullrank.reporting.table import Comparison, comparison

_NAVIGATION = {
    "comparison": "Comparison",
    "curves": "Curves",
    "parameters": "Parameters",
    "configuration": "Configuration",
    "environment": "Environment",
    "reproduce": "Reproduce",
    "unfinished": "Unfinished",
}


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Writes the page that compares run folders and returns its path.

    The first folder's row is the one the others are compared with. `out` is a file, or a folder that gets a
    `report.html`. Equal inputs give equal bytes. InputError for a folder that is no run, RunError if the page
    cannot be written; an unfinished or damaged run is listed on the page. An older report is replaced, any other file
    of that name is an InputError.
    """
    compared = comparison([Path(folder) for folder in folders])
    return write(Path(out), render(compared, title))


def render(compared: Comparison, title: str | None = None) -> str:
    """The page as text."""
    named = _named(compared)
    body = [
        overview.summary_block(compared, summarise(compared)),
        overview.comparison_section(compared),
        curves_section(compared, named),
        details.parameters_section(compared.rows),
        details.configuration_section(named),
        details.environment_section(compared),
        details.reproduce_section(named),
        troubles.troubles_section(compared),
    ]
    return document(title or _title(compared), _subtitle(compared), _NAVIGATION, body)


def _title(compared: Comparison) -> str:
    runs = sum(len(row.runs) for row in compared.rows) + len(compared.unfinished)
    labels = list(dict.fromkeys(row.label for row in compared.rows if row.label))
    return f"{runs} run{'s' if runs > 1 else ''}" + (f" on {format.listed(labels)}" if 0 < len(labels) < 3 else "")


def _subtitle(compared: Comparison) -> str:
    rows = len(compared.rows)
    words = [f"{rows} row{'' if rows == 1 else 's'}", f"{sum(len(row.runs) for row in compared.rows)} finished"]
    if compared.unfinished:
        words.append(f"{len(compared.unfinished)} not finished")
    return "fullrank report · " + ", ".join(words)


def _named(compared: Comparison) -> list[details.Named]:
    """Every row with its colour, finished rows first in table order, then the rows of unfinished runs."""
    named: list[details.Named] = [(row.name, slot, row.runs) for slot, row in enumerate(compared.rows)]
    groups = seeds_of_rows(compared.unfinished)
    taken = {name for name, _, _ in named}
    for name, runs in zip(row_names(groups), groups, strict=True):
        named.append((f"{name} (unfinished)" if name in taken else name, len(named), runs))
    return named
