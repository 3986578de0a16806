"""Grids of records: a declared `Table` and its records become lines and columns of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fullrank.records import Column, Interval, Label, Record, Table
from fullrank.render.blocks import Cell, Grid, Heading

MINUS = "\N{MINUS SIGN}"


def build_grid(table: Table, records: Sequence[Record], title: str = "") -> Grid:
    """The grid of `table` over `records`; records that fit none of its columns are left out.

    A label `model` or `step` that tells records apart stands in front of the declared rows.
    """
    records = [record for record in records if _stands_in(table, record)]
    row_labels = _row_labels(table, records)
    columns = _columns(table, records)
    lines: dict[tuple[Label, ...], list[Record]] = {}
    for record in records:
        key = tuple(record.labels.get(label) for label in row_labels)
        lines.setdefault(key, []).append(record)
    best = [_best_value(column, records) for column in columns]
    rows = []
    for key, of_line in lines.items():
        names = [Cell(format_label(value)) for value in key]
        cells = [_cell(column, of_line, value) for column, value in zip(columns, best, strict=True)]
        rows.append([*names, *cells])
    headings = [Heading(label.replace("_", " "), left=True) for label in row_labels]
    headings += [_heading(column, records) for column in columns]
    notes = dict.fromkeys(record.note for record in records if record.note)
    return Grid(headings, rows, title or table.title, list(notes))


def _stands_in(table: Table, record: Record) -> bool:
    rows = (table.rows,) if isinstance(table.rows, str) else table.rows
    if not all(label in record.labels for label in rows):
        return False
    if isinstance(table.columns, tuple):
        measures = {name for column in table.columns for name in (column.measure, column.deviation)}
        return record.measure in measures
    if isinstance(table.columns, str):
        return table.columns in record.labels and record.measure == (table.measure or record.measure)
    return True


def _row_labels(table: Table, records: Sequence[Record]) -> list[str]:
    declared = [table.rows] if isinstance(table.rows, str) else list(table.rows)
    added = []
    for label in ("model", "step"):
        values = {record.labels[label] for record in records if label in record.labels}
        if len(values) > 1 and label not in declared:
            added.append(label)
    return added + declared


def _columns(table: Table, records: Sequence[Record]) -> list[Column]:
    """The declared columns, each with at least one record; or one for each measure, or for each value of a label."""
    if isinstance(table.columns, tuple):
        return [column for column in table.columns if any(_fits(column, record) for record in records)]
    if isinstance(table.columns, str):
        label = table.columns
        values = dict.fromkeys(record.labels[label] for record in records)
        measure = table.measure or (records[0].measure if records else "")
        return [
            Column(measure, f"{label} {format_label(value)}", {label: value}, table.format, interval=False)
            for value in values
        ]
    return [Column(measure, format=table.format) for measure in dict.fromkeys(record.measure for record in records)]


def _fits(column: Column, record: Record) -> bool:
    return record.measure == column.measure and record.has(column.where)


def _best_value(column: Column, records: Sequence[Record]) -> float | None:
    values = [record.value for record in records if _fits(column, record) and record.value is not None]
    if not column.best or len(values) < 2:
        return None
    return min(values) if column.best == "lowest" else max(values)


def _heading(column: Column, records: Sequence[Record]) -> Heading:
    units = {record.unit for record in records if _fits(column, record) and record.unit}
    text = column.heading or column.measure.replace("_", " ")
    unit = units.pop() if len(units) == 1 else ""
    return Heading(text, "" if unit in ("", "1") or unit in text else unit)


def _cell(column: Column, records: Sequence[Record], best: float | None) -> Cell:
    """The value of the line's record in this column; several are averaged over."""
    record = next((record for record in records if _fits(column, record)), None)
    if record is None:
        return Cell("")
    text = format_value(record.value, column.format)
    deviation = next((r.value for r in records if r.measure == column.deviation and r.has(column.where)), None)
    if column.deviation and deviation is not None:
        text = f"{text} ± {format_value(deviation, column.format.replace('+', ''))}"
    lines = [format_interval(record.interval, column.format)] if record.interval and column.interval else []
    return Cell(text, tuple(lines), strong=best is not None and record.value == best)


# -- values as text ----------------------------------------------------------------------------------------------------


def format_value(value: float | None, spec: str = "") -> str:
    """A number by a format specification; without one, whole numbers with commas and others with four digits."""
    if value is None or value != value:
        return "-"
    if spec.endswith("d"):
        value = round(value)
    elif not spec:
        whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e15)
        spec = ",.0f" if whole or abs(value) >= 1e4 else ".4g"
    return f"{value:{spec}}".replace("-", MINUS) if spec[-1] not in "eg" else f"{value:{spec}}"


def format_interval(interval: Interval, spec: str = "") -> str:
    """`[-0.31, +1.20]`."""
    low, high = (format_value(end, spec) for end in interval)
    return f"[{low}, {high}]"


def format_label(value: Label) -> str:
    """A label as text: floats without trailing zeros."""
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def join_words(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def group_records(records: Iterable[Record], labels: Sequence[str]) -> Mapping[tuple[Label, ...], list[Record]]:
    """Records by the values of some of their labels, in the order in which they come."""
    groups: dict[tuple[Label, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record.labels.get(label) for label in labels), []).append(record)
    return groups
