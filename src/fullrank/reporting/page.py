"""The report: one HTML page that needs nothing but itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fullrank.errors import InputError, RunError
from fullrank.reporting import details, format, overview, troubles
from fullrank.reporting.curve_section import curves_section
from fullrank.reporting.grouping import row_names, seeds_of_rows
from fullrank.reporting.markup import Html, el
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
_HEAD = (
    '<meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
)
_BEGINNING = f'<!DOCTYPE html>\n<html lang="en"><head>{_HEAD}<title>'  # of every report, and how one is known


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Writes the page that compares run folders and returns its path.

    The first folder's row is the one the others are compared with. `out` is a file, or a folder that gets a
    `report.html`. Equal inputs give equal bytes. InputError for a folder that is no run, RunError if the page
    cannot be written; an unfinished or damaged run is listed on the page. An older report is replaced, any other file
    of that name is an InputError.
    """
    compared = comparison([Path(folder) for folder in folders])
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    _refuse_foreign(out)
    _write(out, render(compared, title))
    return out


def render(compared: Comparison, title: str | None = None) -> str:
    """The page as text."""
    title = title or _title(compared)
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
    present = [key for key in _NAVIGATION if any(f'<section id="{key}"' in part for part in body)]
    links = [el("li", el("a", _NAVIGATION[key], attrs={"href": f"#{key}"})) for key in present]
    header = el("header", el("div", el("h1", title), el("p", _subtitle(compared), cls="subtitle")), _theme())
    navigation = el("nav", el("ul", *links), attrs={"aria-label": "Sections"})
    head = el(
        "head",
        Html(_HEAD),
        el("title", title),
        el("style", Html((resources.files("fullrank.reporting") / "style.css").read_text(encoding="utf-8"))),
    )
    page = el("html", head, el("body", header, navigation, el("main", *body)), attrs={"lang": "en"})
    return f"<!DOCTYPE html>\n{page}\n"


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


def _theme() -> Html:
    """Automatic, light or dark: three radio buttons and CSS, no script."""
    choices: list[Html] = []
    for value in ("auto", "light", "dark"):
        checked = {"checked": ""} if value == "auto" else {}
        choices.append(el("input", attrs={"type": "radio", "name": "theme", "id": f"theme-{value}"} | checked))
        choices.append(el("label", value.capitalize(), attrs={"for": f"theme-{value}"}))
    return el("fieldset", el("legend", "Theme"), *choices, cls="theme")


def _named(compared: Comparison) -> list[details.Named]:
    """Every row with its colour, finished rows first in table order, then the rows of unfinished runs."""
    named: list[details.Named] = [(row.name, slot, row.runs) for slot, row in enumerate(compared.rows)]
    groups = seeds_of_rows(compared.unfinished)
    taken = {name for name, _, _ in named}
    for name, runs in zip(row_names(groups), groups, strict=True):
        named.append((f"{name} (unfinished)" if name in taken else name, len(named), runs))
    return named


def _refuse_foreign(path: Path) -> None:
    """InputError if `path` is there and is not a report of ours (nor empty): it is nothing that we may replace."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            beginning = file.read(len(_BEGINNING.encode())) if path.is_file() else None
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); choose another place for the report") from error
    if beginning not in (b"", _BEGINNING.encode()):
        raise InputError(f"{path}: exists and is not a report of fullrank, so it is left alone; give another --out")


def _write(path: Path, text: str) -> None:
    """All or nothing: a page that was there stays until the new one is complete."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise RunError(f"{path}: the report cannot be written ({error.strerror}); choose another place") from error
