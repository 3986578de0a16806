"""Grids of records: a declared `Table` and its records become lines and columns of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fullrank.records import Column, Interval, Label, Record, Table, is_finite
from fullrank.render.blocks import Cell, Grid, Heading

MINUS = "\N{MINUS SIGN}"
_ALWAYS_ROWS = {"model", "step", "checkpoint"}  # labels that no table has to declare


def build_grid(table: Table, records: Sequence[Record], title: str = "") -> Grid:
    """The grid of `table` over `records`; records that fit none of its columns are left out.

    A label by which records of a line differ (the model, the step) becomes a row label in front of the declared ones.
    """
    records = [record for record in records if _is_shown(table, record)]
    row_labels = _find_row_labels(table, records)
    columns = []
    for column in _find_columns(table, records):
        columns.append(_ColumnOfRecords(column, records))
    rows = []
    for key, of_line in group_records(records, row_labels).items():
        cells = [Cell(format_label(value)) for value in key]
        for column_of_records in columns:
            cells.append(column_of_records.build_cell(of_line))
        rows.append(cells)
    headings = []
    for label in row_labels:
        headings.append(Heading(label.replace("_", " "), left=True))
    with_units = not isinstance(table.columns, str)
    for column_of_records in columns:
        headings.append(column_of_records.build_heading(with_units))
    notes = dict.fromkeys(record.note for record in records)
    notes.pop("", None)
    return Grid(headings, rows, title or table.title, list(notes))


def _list_rows(table: Table) -> tuple[str, ...]:
    if isinstance(table.rows, str):
        return (table.rows,)
    return table.rows


def _is_shown(table: Table, record: Record) -> bool:
    """True if the record has the labels of the rows and stands in a column."""
    rows = set(_list_rows(table))
    if not rows <= record.labels.keys():
        return False
    if table.columns is None:
        return True
    if isinstance(table.columns, str):
        is_measure = table.measure in ("", record.measure)
        return is_measure and table.columns in record.labels
    for column in table.columns:
        allowed = rows | _ALWAYS_ROWS | column.where.keys()
        if _fits(column, record) and record.labels.keys() <= allowed:
            return True
    return False


def _fits(column: Column, record: Record) -> bool:
    is_measure = record.measure in (column.measure, column.deviation)
    return is_measure and record.has(column.where)


def _find_row_labels(table: Table, records: Sequence[Record]) -> list[str]:
    """The declared labels, and in front of them those by which records of one line and column differ."""
    in_columns: set[str] = set()
    if isinstance(table.columns, str):
        in_columns = {table.columns}
    elif table.columns is not None:
        for column in table.columns:
            in_columns |= column.where.keys()
    declared = _list_rows(table)
    added = []
    labels = dict.fromkeys(label for record in records for label in record.labels)
    for label in labels:
        values = {record.labels.get(label) for record in records}
        if len(values) > 1 and label not in in_columns and label not in declared:
            added.append(label)
    return [*added, *declared]


def _find_columns(table: Table, records: Sequence[Record]) -> list[Column]:
    """The declared columns, each with at least one record; or one for each measure, or for each value of a label."""
    if table.columns is None:
        measures = dict.fromkeys(record.measure for record in records)
        return [Column(measure, format=table.format) for measure in measures]
    if not isinstance(table.columns, str):
        return [column for column in table.columns if any(_fits(column, record) for record in records)]
    label = table.columns
    columns = {}
    for record in records:
        value = record.labels[label]
        columns[value] = Column(
            table.measure or record.measure,
            heading=f"{label} {format_label(value)}",
            where={label: value},
            format=table.format,
            interval=False,
        )
    return list(columns.values())


class _ColumnOfRecords:
    """A column with its records: it knows the format, the unit and the best of all its values."""

    def __init__(self, column: Column, records: Sequence[Record]) -> None:
        self.column = column
        self.records = [record for record in records if _fits(column, record)]
        self.format = column.format or self._choose_format()
        self.best = self._find_best()

    def _values(self) -> list[float]:
        values = []
        for record in self.records:
            if record.measure == self.column.measure and is_finite(record.value):
                values.append(float(record.value or 0.0))
        return values

    def _choose_format(self) -> str:
        """Whole numbers, or four digits of the largest."""
        values = self._values()
        if not values:
            return ""
        if all(value.is_integer() for value in values):
            return ",.0f"
        largest = max(map(abs, values))
        if largest < 1e-3:
            return ".3e"
        decimals = 3 - math.floor(math.log10(largest))
        return f",.{min(6, max(0, decimals))}f"

    def _find_best(self) -> str | None:
        """The best value as text, so that values that look equal are emphasised alike."""
        values = self._values()
        if not self.column.best or len(values) < 2:
            return None
        best = min(values) if self.column.best == "lowest" else max(values)
        return format_value(best, self.format)

    def build_heading(self, with_unit: bool) -> Heading:
        text = self.column.heading or self.column.measure.replace("_", " ")
        units = {record.unit for record in self.records if record.unit}
        line = ""
        if with_unit and len(units) == 1:
            line = units.pop()
        if line == "1" or line in text or self.format.endswith("%"):
            line = ""
        return Heading(
            text,
            line,
            group=self.column.group,
            page_only=self.column.page_only,
        )

    def build_cell(self, of_line: Sequence[Record]) -> Cell:
        """The value of the line's record, its deviation behind it and its interval below it."""
        by_measure: dict[str, Record] = {}
        for candidate in of_line:
            if candidate.has(self.column.where):
                by_measure.setdefault(candidate.measure, candidate)
        record = by_measure.get(self.column.measure)
        if record is None:
            return Cell("")
        text = format_value(record.value, self.format)
        lines: tuple[str, ...] = ()
        if record.interval is not None and self.column.interval:
            lines = (format_interval(record.interval, self.format),)
        is_best = text == self.best
        deviation = by_measure.get(self.column.deviation)
        if deviation is not None:
            unsigned = self.format.replace("+", "")
            text = f"{text} ± {format_value(deviation.value, unsigned)}"
        return Cell(text, lines, strong=is_best)


# -- values as text ----------------------------------------------------------------------------------------------------


def format_value(value: float | None, spec: str = "") -> str:
    """A number by a format specification; without one, whole numbers with commas and others with four digits."""
    if value is None or math.isnan(value):
        return "-"
    if spec.endswith("d"):
        value = round(value)
    if not spec:
        is_whole = float(value).is_integer() and abs(value) < 1e15
        spec = ",.0f" if is_whole or abs(value) >= 1e4 else ".4g"
    text = f"{value:{spec}}"
    has_exponent = spec[-1] in "eg"
    return text if has_exponent else text.replace("-", MINUS)


def format_short(value: float) -> str:
    """A tick of an axis: 1,500 as `1.5k`, 2,000,000 as `2M`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:,.4g}{unit}"
    return f"{value:.6g}"


def format_interval(interval: Interval, spec: str = "") -> str:
    """`[-0.31, +1.20]`."""
    low, high = interval
    return f"[{format_value(low, spec)}, {format_value(high, spec)}]"


def format_label(value: Label) -> str:
    """A label as text: floats without trailing zeros."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def join_words(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = list(words) or [""]
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def group_records(records: Iterable[Record], labels: Sequence[str]) -> Mapping[tuple[Label, ...], list[Record]]:
    """Records by the values of some of their labels, in the order in which they come."""
    groups: dict[tuple[Label, ...], list[Record]] = {}
    for record in records:
        key = tuple(record.labels.get(label) for label in labels)
        groups.setdefault(key, []).append(record)
    return groups
