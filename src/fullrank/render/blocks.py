"""Blocks of a page, which terminal and HTML page render alike, and the grids that tables of records become."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from fullrank.records import Column, Label, Record, Table, is_finite

MINUS = "\N{MINUS SIGN}"
_ALWAYS_ROWS = {"model", "step", "checkpoint"}  # labels that no table has to declare


@dataclass(frozen=True)
class Cell:
    """A cell of a grid: its text, lines below it, a badge behind it, a colour slot in front of it."""

    text: str
    lines: tuple[str, ...] = ()
    strong: bool = False
    badge: str = ""
    slot: int | None = None


@dataclass(frozen=True)
class Heading:
    """The heading of a column. `left`: it holds text, not numbers. `page_only`: the terminal leaves it out."""

    text: str
    line: str = ""
    left: bool = False
    group: str = ""
    page_only: bool = False


@dataclass(frozen=True)
class Grid:
    """Table of cells under headings; notes stand below it."""

    headings: Sequence[Heading]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings above columns, empty or not, with the number of neighbouring columns that share each."""
        spans = []
        for name, shared in groupby(self.headings, key=lambda heading: heading.group):
            spans.append((name, len(list(shared))))
        return spans


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text. kind: `lead` (large), `note` (small), `warning`. short: what the terminal prints in its place."""

    text: str
    kind: str = "lead"
    short: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing: SVG text with a title and a description. The terminal leaves it out."""

    svg: str
    title: str
    subtitle: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Code:
    """Lines of commands or configuration, with a caption."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Facts:
    """Pairs of a term and its description. kind: `rows`, `tiles` (large numbers)."""

    items: Sequence[tuple[str, str]]
    kind: str = "rows"


@dataclass(frozen=True)
class Legend:
    """Names of series by their colour slot."""

    names: Sequence[tuple[int, str]]


@dataclass(frozen=True)
class Group:
    """Blocks that stand beside each other where there is room."""

    blocks: Sequence[Block]


@dataclass(frozen=True)
class Details:
    """Blocks that a reader has to open. The terminal leaves them out."""

    title: str
    blocks: Sequence[Block]


Block = Paragraph | Grid | Figure | Code | Facts | Legend | Group | Details


@dataclass(frozen=True)
class Section:
    """A section of a page. name: its address. page_only: the terminal leaves it out."""

    title: str
    blocks: Sequence[Block]
    name: str = ""
    badge: str = ""
    badge_kind: str = ""
    page_only: bool = False


@dataclass(frozen=True)
class Page:
    """A page: its headline says the result in one sentence."""

    title: str
    subtitle: str
    headline: str
    summary: Sequence[Block] = ()
    sections: Sequence[Section] = ()


# -- grids of records --------------------------------------------------------------------------------------------------


def build_grid(table: Table, records: Sequence[Record]) -> Grid:
    """Build the grid of `table` over `records`; records that fit none of its columns are left out.

    A label by which records of a line differ (the model, the step) becomes a row label in front of the declared ones.
    """
    declared = (table.rows,) if isinstance(table.rows, str) else table.rows
    records = [record for record in records if _is_shown(table, declared, record)]
    columns = _find_columns(table, records)
    placed = {*declared, *(label for column in columns for label in column.where)}
    row_labels = (*find_differing_labels(records, placed), *declared)
    lines = group_records(records, row_labels)
    headings = [Heading(label.replace("_", " "), left=True) for label in row_labels]
    rows = []
    for key in lines:
        rows.append([Cell(format_label(value)) for value in key])
    for column in columns:
        column_records = [record for record in records if _fits(column, record)]
        measured = [record.value for record in column_records if record.measure == column.measure]
        values = list(filter(is_finite, measured))
        form = column.format or _choose_format(values)
        best = None  # as text: values that look equal are emphasised alike
        if column.best and len(values) > 1:
            best = format_value(min(values) if column.best == "lowest" else max(values), form)
        headings.append(_build_heading(column, column_records, not isinstance(table.columns, str)))
        for cells, line_records in zip(rows, lines.values(), strict=True):
            cells.append(_build_cell(column, form, best, line_records))
    notes = dict.fromkeys(record.note for record in records if record.note)
    return Grid(headings, rows, table.title, list(notes))


def _is_shown(table: Table, rows: tuple[str, ...], record: Record) -> bool:
    if not set(rows) <= record.labels.keys():
        return False
    if table.columns is None:
        return True
    if isinstance(table.columns, str):
        return table.measure in ("", record.measure) and table.columns in record.labels
    for column in table.columns:
        allowed = {*rows, *_ALWAYS_ROWS, *column.where}
        if _fits(column, record) and record.labels.keys() <= allowed:
            return True
    return False


def _fits(column: Column, record: Record) -> bool:
    return record.measure in (column.measure, column.deviation) and record.has(column.where)


def _find_columns(table: Table, records: Sequence[Record]) -> list[Column]:
    """Find the declared columns with at least one record; or make one for each measure, or for each value of a label."""
    if table.columns is None:
        measures = dict.fromkeys(record.measure for record in records)
        return [Column(measure, format=table.format) for measure in measures]
    if not isinstance(table.columns, str):
        return [column for column in table.columns if any(map(partial(_fits, column), records))]
    label = table.columns
    columns = {}
    for record in records:
        value = record.labels[label]
        measure = table.measure or record.measure
        heading = f"{label} {format_label(value)}"
        columns[value] = Column(
            measure,
            heading,
            {label: value},
            table.format,
            interval=False,
        )
    return list(columns.values())


def _choose_format(values: Sequence[float]) -> str:
    """Choose the format: whole numbers, or four digits of the largest."""
    if all(float(value).is_integer() for value in values):
        return ",.0f"
    largest = max(map(abs, values))
    if largest < 1e-3:
        return ".3e"
    decimals = 3 - math.floor(math.log10(largest))
    return f",.{min(6, max(0, decimals))}f"


def _build_heading(column: Column, records: Sequence[Record], with_unit: bool) -> Heading:
    text = column.heading or column.measure.replace("_", " ")
    units = {record.unit for record in records if record.unit}
    unit = units.pop() if with_unit and len(units) == 1 else ""
    if unit in f"{column.group} {text}".replace("/", " per ") or column.format.endswith("%"):
        unit = ""
    return Heading(text, unit, group=column.group, page_only=column.page_only)


def _build_cell(column: Column, form: str, best: str | None, records: Sequence[Record]) -> Cell:
    by_measure = {record.measure: record for record in reversed(records) if record.has(column.where)}
    measured = by_measure.get(column.measure)
    if measured is None:
        return Cell("")
    text = shown = format_value(measured.value, form)
    if column.deviation in by_measure:
        shown += f" ± {format_value(by_measure[column.deviation].value, form.replace('+', ''))}"
    lines: tuple[str, ...] = ()
    if measured.interval is not None and column.interval:
        low, high = (format_value(bound, form) for bound in measured.interval)
        lines = (f"[{low}, {high}]",)
    return Cell(shown, lines, strong=text == best)


def group_records(records: Iterable[Record], labels: Sequence[str]) -> Mapping[tuple[Label, ...], list[Record]]:
    """Group records by the values of some of their labels, in the order in which they come."""
    groups: dict[tuple[Label, ...], list[Record]] = {}
    for record in records:
        key = tuple(record.labels.get(label) for label in labels)
        groups.setdefault(key, []).append(record)
    return groups


def find_differing_labels(records: Sequence[Record], without: set[str]) -> tuple[str, ...]:
    """Find the labels, beside those of `without`, that have several values or that some records lack."""
    names = dict.fromkeys(name for record in records for name in record.labels if name not in without)
    differing = []
    for name in names:
        values = {record.labels.get(name) for record in records}
        if len(values) > 1:
            differing.append(name)
    return tuple(differing)


# -- values as text ----------------------------------------------------------------------------------------------------


def format_value(value: float | None, spec: str = "") -> str:
    """Format a number by a format specification; without one, whole numbers have commas and others four digits.

    None and NaN are `-`.
    """
    if value is None or math.isnan(value):
        return "-"
    if not spec:
        spec = ",d" if float(value).is_integer() or abs(value) >= 1e4 else ".4g"
    spec = spec.replace("d", ".0f")  # of a float, or infinity
    text = f"{value:{spec}}"
    return MINUS + text[1:] if text.startswith("-") else text  # an exponent has a hyphen


def format_short(value: float) -> str:
    """Format a tick of an axis: 1,500 as `1.5k`, 2,000,000 as `2M`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:,.4g}{unit}"
    return f"{value:.6g}"


def format_label(value: Label) -> str:
    """Format a label as text: floats without trailing zeros."""
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def format_setting(value: Any) -> str:
    """Format a value of a configuration or a document: `train 700,000, valid 40,000` of a mapping; nothing for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_setting(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(format_setting, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) else str("" if value is None else value)


def join_words(words: Iterable[str]) -> str:
    """Join words as in `a, b and c`."""
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last
