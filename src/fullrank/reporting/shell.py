"""What every report is made of: a page that needs nothing but itself, its style and theme; and how it is written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from fullrank.core.errors import InputError, RunError
from fullrank.reporting.markup import Html, el

_HEAD = (
    '<meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
)
_BEGINNING = f'<!DOCTYPE html>\n<html lang="en"><head>{_HEAD}<title>'  # of every report, and how one is known


def write(out: Path, page: str) -> Path:
    """Writes a page and returns its path: `out`, or `report.html` in the folder `out`.

    An older report is replaced, any other file of that name is an InputError; RunError if the page cannot be written.
    """
    out = out / "report.html" if out.is_dir() else out
    _refuse_foreign(out)
    _write(out, page)
    return out


def document(title: str, subtitle: str, navigation: Mapping[str, str], body: Sequence[Html]) -> str:
    """The page as text; `navigation` has the words for each section that may be in `body`."""
    present = [key for key in navigation if any(f'<section id="{key}"' in part for part in body)]
    links = [el("li", el("a", navigation[key], attrs={"href": f"#{key}"})) for key in present]
    header = el("header", el("div", el("h1", title), el("p", subtitle, cls="subtitle")), _theme())
    head = el(
        "head",
        Html(_HEAD),
        el("title", title),
        el("style", Html((resources.files("fullrank.reporting") / "style.css").read_text(encoding="utf-8"))),
    )
    sections = el("nav", el("ul", *links), attrs={"aria-label": "Sections"})
    page = el("html", head, el("body", header, sections, el("main", *body)), attrs={"lang": "en"})
    return f"<!DOCTYPE html>\n{page}\n"


def _theme() -> Html:
    """Automatic, light or dark: three radio buttons and CSS, no script."""
    choices: list[Html] = []
    for value in ("auto", "light", "dark"):
        checked = {"checked": ""} if value == "auto" else {}
        choices.append(el("input", attrs={"type": "radio", "name": "theme", "id": f"theme-{value}"} | checked))
        choices.append(el("label", value.capitalize(), attrs={"for": f"theme-{value}"}))
    return el("fieldset", el("legend", "Theme"), *choices, cls="theme")


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
