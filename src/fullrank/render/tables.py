"""Grids of records: a declared `Table` and its records become lines and columns of text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from fullrank.records import Column, Interval, Label, Record, Table, is_finite
from fullrank.render.blocks import Cell, Grid, Heading

MINUS = "\N{MINUS SIGN}"


def build_grid(table: Table, records: Sequence[Record], title: str = "") -> Grid:
    """The grid of `table` over `records`; records that fit none of its columns are left out.

    A label by which records of a line differ (the model, the step) becomes a row label in front of the declared ones.
    """
    records = [record for record in records if _stands_in(table, record)]
    row_labels = _row_labels(table, records)
    columns = [_with_format(column, records) for column in _columns(table, records)]
    best = [_best_value(column, records) for column in columns]
    rows = []
    for key, of_line in group_records(records, row_labels).items():
        names = [Cell(format_label(value)) for value in key]
        cells = [_cell(column, of_line, value) for column, value in zip(columns, best, strict=True)]
        rows.append([*names, *cells])
    headings = [Heading(label.replace("_", " "), left=True) for label in row_labels]
    headings += [_heading(column, records, with_unit=not isinstance(table.columns, str)) for column in columns]
    notes = dict.fromkeys(record.note for record in records if record.note)
    return Grid(headings, rows, title or table.title, list(notes))


_ALWAYS_ROWS = ("model", "step", "checkpoint")  # labels that no table has to declare


def _declared_rows(table: Table) -> tuple[str, ...]:
    return (table.rows,) if isinstance(table.rows, str) else table.rows


def _stands_in(table: Table, record: Record) -> bool:
    rows = _declared_rows(table)
    if not record.labels.keys() >= set(rows):
        return False
    if isinstance(table.columns, tuple):
        return any(_fits(column, record, (*rows, *_ALWAYS_ROWS)) for column in table.columns)
    if isinstance(table.columns, str):
        return table.columns in record.labels and record.measure == (table.measure or record.measure)
    return True


def _row_labels(table: Table, records: Sequence[Record]) -> list[str]:
    """The declared labels, and in front of them those by which records of one line and column differ."""
    declared = _declared_rows(table)
    in_columns = {table.columns} if isinstance(table.columns, str) else set()
    if isinstance(table.columns, tuple):
        in_columns = {label for column in table.columns for label in column.where}
    added: dict[str, None] = {}
    for label in dict.fromkeys(label for record in records for label in record.labels):
        values = {record.labels.get(label) for record in records}
        if label not in declared and label not in in_columns and len(values) > 1:
            added[label] = None
    return [*added, *declared]


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


def _with_format(column: Column, records: Sequence[Record]) -> Column:
    """The column with a format for all of its values: whole numbers, or four digits of the largest."""
    values = [record.value for record in records if _fits(column, record) and is_finite(record.value)]
    if column.format or not values:
        return column
    if all(float(value or 0).is_integer() for value in values):
        return dataclasses.replace(column, format=",.0f")
    largest = max(abs(value or 0) for value in values)
    decimals = min(6, max(0, 3 - math.floor(math.log10(largest))))
    return dataclasses.replace(column, format=f",.{decimals}f" if largest >= 1e-3 else ".3e")


def _fits(column: Column, record: Record, rows: Sequence[str] | None = None) -> bool:
    """True for a record of the column. rows: labels that it may have beside those of the column; None: any."""
    if record.measure not in (column.measure, column.deviation) or not record.has(column.where):
        return False
    return rows is None or record.labels.keys() <= {*rows, *column.where}


def _best_value(column: Column, records: Sequence[Record]) -> float | None:
    shown = [record for record in records if record.measure == column.measure and record.has(column.where)]
    values = [record.value for record in shown if record.value is not None]
    if not column.best or len(values) < 2:
        return None
    return min(values) if column.best == "lowest" else max(values)


def _heading(column: Column, records: Sequence[Record], with_unit: bool) -> Heading:
    units = {record.unit for record in records if _fits(column, record) and record.unit and with_unit}
    text = column.heading or column.measure.replace("_", " ")
    unit = units.pop() if len(units) == 1 else ""
    line = "" if unit in ("", "1") or unit in text or column.format.endswith("%") else unit
    return Heading(text, line, group=column.group, page_only=column.page_only)


def _cell(column: Column, records: Sequence[Record], best: float | None) -> Cell:
    """The value of the line's record in this column, its interval below it."""
    of_column = {record.measure: record for record in reversed(records) if record.has(column.where)}
    record = of_column.get(column.measure)
    if record is None:
        return Cell("")
    text = format_value(record.value, column.format)
    deviation = of_column[column.deviation].value if column.deviation in of_column else None
    if deviation is not None:
        text = f"{text} ± {format_value(deviation, column.format.replace('+', ''))}"
    lines = [format_interval(record.interval, column.format)] if record.interval and column.interval else []
    is_best = best is not None and format_value(record.value, column.format) == format_value(best, column.format)
    return Cell(text, tuple(lines), strong=is_best)


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


def format_short(value: float) -> str:
    """A tick of an axis: 1,500 as `1.5k`, 2,000,000 as `2M`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:,.4g}{unit}"
    return f"{value:.6g}"


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
