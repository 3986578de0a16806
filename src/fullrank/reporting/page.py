"""The report: one HTML page that needs nothing but itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from fullrank.config.schema import NOT_NEXT_TOKEN
from fullrank.errors import InputError, RunError
from fullrank.reporting import curves, details, format, overview
from fullrank.reporting.curves import Curve, Series
from fullrank.reporting.figures import NARROW, WIDTH, line_figure
from fullrank.reporting.grouping import row_names, seeds_of_rows
from fullrank.reporting.markup import Html, el, section
from fullrank.reporting.results import RunRecord
from fullrank.reporting.summary import summarise
from fullrank.reporting.table import MARK, Comparison, comparison

_NAVIGATION = {
    "comparison": "Comparison",
    "curves": "Curves",
    "parameters": "Parameters",
    "configuration": "Configuration",
    "environment": "Environment",
    "reproduce": "Reproduce",
    "unfinished": "Unfinished",
}
_TOKENS = "training tokens"
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
        _curves_section(compared, named),
        details.parameters_section(compared.rows),
        details.configuration_section(named),
        details.environment_section(compared),
        details.reproduce_section(named),
        overview.troubles_section(compared),
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


def _curves_section(compared: Comparison, named: Sequence[details.Named]) -> Html:
    finished = len(compared.rows)
    # a model may be judged by next tokens at its end and not while it trains
    marked = {name for name, _, runs in named if any(run.sees_future for run in runs)}
    named = [(f"{name} {MARK}" if name in marked else name, slot, runs) for name, slot, runs in named]

    def series(read: Callable[[RunRecord], Curve | None]) -> list[Series]:
        found = [(name, slot, tuple(c for run in runs if (c := read(run)) is not None)) for name, slot, runs in named]
        return [Series(name, slot, drawn, slot < finished) for name, slot, drawn in found if drawn]

    unit = compared.measure.unit
    validation = series(lambda run: curves.validation(run, compared.measure))
    loss = series(curves.training_loss)
    rate, speed = curves.merged(series(curves.learning_rate)), series(curves.speed)
    late = curves.latter(validation)
    ends = [value for one in validation for c in one.curves for value in (c.y.min(), c.y.max())]
    wide = bool(ends) and not compared.measure.in_bits and max(ends) > 4 * min(ends)  # bits are logarithms already
    seeds = (
        " Thin lines are single seeds, the thick one is their mean."
        if any(len(s.curves) > 1 for s in validation)
        else ""
    )
    smooth = _smoothing(named)
    judged = [
        _figure(
            f"Validation {unit}",
            f"Whole training{', logarithmic axis' if wide else ''}.{seeds}",
            validation,
            unit,
            _TOKENS,
            log=wide,
            show_value=compared.measure.tick,
        ),
        _figure(
            f"Validation {unit}, second half",
            "The same curves from half of the longest training on; the axis does not start at zero.",
            late,
            unit,
            _TOKENS,
            show_value=compared.measure.tick,
        ),
    ]
    others = [
        _figure("Training loss", f"Nats per token. {smooth}", loss, "nats per token", _TOKENS, width=NARROW),
        _figure(
            "Learning rate", "As set at each logged step.", rate, "learning rate", _TOKENS, from_zero=True, width=NARROW
        ),
        _figure(
            "Speed",
            f"Training tokens per second. {smooth}",
            speed,
            "tokens per second",
            "minutes of training",
            from_zero=True,
            width=NARROW,
        ),
    ]
    if not any(judged + others):
        return Html("")
    grids = [
        el("div", *figures, cls=cls)
        for figures, cls in ((judged, "figures"), (others, "figures small"))
        if any(figures)
    ]
    key = overview.legend([(name, slot, slot < finished) for name, slot, _ in named])
    hints = [] if compared.comparable else ["Curves measured on different texts do not compare."]
    if marked:
        hints.append(f"{MARK} {NOT_NEXT_TOKEN}; such a curve compares with no other.")
    return section("curves", "Curves", *(el("p", hint, cls="warning") for hint in hints), key, *grids)


def _smoothing(named: Sequence[details.Named]) -> str:
    widths = {
        curves.window(lines)
        for _, _, runs in named
        for run in runs
        if (lines := sum(line.get("split") == "train" for line in run.metrics))
    }
    widest = max(widths, default=1)
    return (
        "Not smoothed."
        if widest == 1
        else f"Smoothed lightly: centred moving average over up to {widest} logged values."
    )


def _figure(
    heading: str,
    note: str,
    series: Sequence[Series],
    y_label: str,
    x_label: str,
    *,
    log: bool = False,
    from_zero: bool = False,
    width: int = WIDTH,
    show_value: Callable[[float], str] = format.short_count,
) -> Html:
    if not series:
        return Html("")
    ends = ", ".join(f"{one.name} {one.last:.4g}" for one in series)
    alt = f"{heading} over {x_label}. Last values: {ends}."
    drawing = Html(
        line_figure(
            series,
            y_label=y_label,
            x_label=x_label,
            alt=alt,
            log=log,
            from_zero=from_zero,
            width=width,
            show_value=show_value,
        )
    )
    return el("figure", el("figcaption", el("b", heading), el("span", note)), drawing)


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
