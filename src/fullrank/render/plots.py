"""Drawings of the declared plots: which records stand in a plot, and how matplotlib draws them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fullrank.records import Dots, HeatMap, Label, Lines, Plot, Record, is_finite
from fullrank.render.tables import format_label, format_short, format_value, group_records

INK, MUTED, LINE, SURFACE = "#1b1d22", "#5c616b", "#dfe0e3", "#fefefe"
SERIES = (
    "#3f444d",
    "#0072b2",
    "#c04f00",
    "#00825f",
    "#b0508b",
    "#3320e0",
    "#5c2c00",
    "#140a4a",
)
_MOST_LABELLED = 24  # points of a line that show their values
_MOST_TICKS = 40  # names of cells on an axis; of more, every second, third ...
_WIDTH, _HEIGHT = 6.4, 4.0  # inches
_DASHED = (0, (4, 3))
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

Records = Sequence[Record]
Slots = Mapping[str, int]  # colour slots of series by name


class Drawing:
    """A figure that is drawn. titles: texts that its points show on hover; point i has the gid `title-i`."""

    def __init__(self, figure: Figure, slots: Slots | None = None) -> None:
        self.figure = figure
        self.slots = slots or {}
        self.titles: list[str] = []
        self._taken: dict[str, int] = {}

    def color_of(self, name: str) -> str:
        """The colour of a series: its slot, or the next one."""
        slot = self.slots.get(name)
        if slot is None:
            first = len(self.slots) or 1
            slot = self._taken.setdefault(name, first + len(self._taken))
        return SERIES[slot % len(SERIES)]

    def add_title(self, text: str) -> str:
        """Register the text of a point; returns its gid."""
        self.titles.append(text)
        return f"title-{len(self.titles) - 1}"


def draw_plot(
    plot: Plot,
    records: Records,
    slots: Slots | None = None,
) -> Drawing:
    """Draw a plot of the records that stand in it. slots: colours of series by name; others take the next ones."""
    points = find_points(plot, records)
    match plot:
        case Lines():
            drawing = _draw_lines(plot, points, slots)
            _draw_marks(plot, records, drawing.figure.axes[0])
            return drawing
        case HeatMap():
            return _draw_heat_map(plot, points)
        case Dots():
            return _draw_dots(plot, points, slots)


def find_points(plot: Plot, records: Records) -> list[Record]:
    """The records that stand in a plot: of its measure, with its labels and a value that can be drawn."""
    labels, where = _list_labels(plot)
    points = []
    for record in records:
        if not is_finite(record.value) or not record.has(where):
            continue
        if labels <= record.labels.keys() and _is_measured(plot, record.measure):
            points.append(record)
    return points


def _list_labels(plot: Plot) -> tuple[set[str], Mapping[str, Label]]:
    match plot:
        case Lines():
            return {plot.x}, plot.where
        case HeatMap():
            return {plot.x, plot.y}, plot.where
        case Dots():
            return {plot.rows}, plot.where


def _is_measured(plot: Plot, measure: str) -> bool:
    if not isinstance(plot, Lines):
        return measure == plot.measure
    if plot.y != "value":
        return measure == plot.y
    marks = [marked for _, marked in plot.marks]
    return measure not in marks


def clean_text(text: str) -> str:
    """Text that an XML document can hold."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _make_axes(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height))
    return figure, figure.add_subplot()


def _value(record: Record) -> float:
    return float(record.value or 0.0)


def _name(label: Label) -> str:
    return clean_text(format_label(label))


def _name_group(labels: Sequence[str], key: Sequence[Label], separator: str) -> str:
    """The name of records with these labels: text as it is, a number behind the name of its label."""
    parts = []
    for label, value in zip(labels, key, strict=True):
        if isinstance(value, str):
            parts.append(_name(value))
        elif value is not None:
            parts.append(f"{label} {_name(value)}")
    return separator.join(parts)


def _find_differing_labels(records: Records, without: set[str]) -> tuple[str, ...]:
    """Labels by which records differ."""
    differing = []
    names = dict.fromkeys(name for record in records for name in record.labels)
    for name in names:
        values = {record.labels.get(name) for record in records}
        if len(values) > 1 and name not in without:
            differing.append(name)
    return tuple(differing)


def _measure_title(records: Records) -> str:
    measures = ", ".join(dict.fromkeys(record.measure for record in records)).replace("_", " ")
    units = {record.unit for record in records if record.unit}
    if len(units) != 1 or measures in units:
        return measures
    return f"{measures} ({units.pop()})"


# -- lines -------------------------------------------------------------------------------------------------------------


def _draw_lines(plot: Lines, points: Records, slots: Slots | None) -> Drawing:
    figure, axes = _make_axes()
    drawing = Drawing(figure, slots)
    labels = plot.series
    if labels is None:
        labels = _find_differing_labels(points, {plot.x, plot.band})
    labels = _separate_short_bands(plot, points, labels)
    for key, of_series in group_records(points, labels).items():
        name = _name_group(labels, key, " ")
        _draw_series(drawing, axes, plot, of_series, name)
    axes.grid(True, axis="y", linewidth=0.8)
    axes.set_xscale(plot.x_scale)
    axes.set_yscale(plot.y_scale)
    _format_ticks(axes.xaxis, plot.x_scale)
    _format_ticks(axes.yaxis, plot.y_scale)
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(clean_text(plot.x_title or plot.x.replace("_", " ")))
    axes.set_ylabel(clean_text(plot.y_title or _measure_title(points)))
    names = axes.get_legend_handles_labels()[1]
    if not slots and (len(names) > 1 or plot.marks):  # with slots the page has a legend
        axes.legend()
    return drawing


def _draw_series(
    drawing: Drawing,
    axes: Axes,
    plot: Lines,
    points: Records,
    name: str,
) -> None:
    """One line: its mean over the band, the band, and points that show their values."""
    color = drawing.color_of(name)
    x, mean, deviation = _average(points, plot.x, plot.band)
    axes.plot(x, mean, color=color, label=name or None)
    if deviation.any():
        axes.fill_between(
            x,
            mean - deviation,
            mean + deviation,
            color=color,
            alpha=0.16,
            linewidth=0,
        )
    if len(x) > _MOST_LABELLED:
        return
    for place, value in zip(x.tolist(), mean.tolist(), strict=True):
        title = f"{name} {format_value(place)}: {format_value(value)}".strip()
        axes.plot(
            [place],
            [value],
            "o",
            color=color,
            markersize=4,
            gid=drawing.add_title(title),
        )


def _draw_marks(plot: Lines, records: Records, axes: Axes) -> None:
    """Dashed lines from edge to edge, at the values of measures."""
    for axis, measure in plot.marks:
        draw = axes.axvline if axis == "x" else axes.axhline
        places = set()
        for record in records:
            if record.measure == measure and is_finite(record.value):
                places.add(_value(record))
        for place in sorted(places):
            text = f"{measure} {format_value(place)}"
            draw(
                place,
                color=MUTED,
                linewidth=1,
                linestyle=_DASHED,
                label=clean_text(text),
            )
    if plot.marks and axes.get_legend() is not None:
        axes.legend()


def _format_ticks(axis: Axis, scale: str) -> None:
    if scale == "log":
        low, high = axis.get_view_interval()
        is_short = high < 1e3 * low
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_short else (1,), numticks=9))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))


def _separate_short_bands(
    plot: Lines,
    points: Records,
    labels: tuple[str, ...],
) -> tuple[str, ...]:
    """The labels of lines; also the band where its curves share fewer than two points, which leave nothing to average."""
    for of_series in group_records(points, labels).values():
        curves = _read_curves(of_series, plot.x, plot.band)
        shared = set.intersection(*map(set, curves))
        if len(shared) < 2 <= max(map(len, curves)):
            return (*labels, plot.band)
    return labels


def _read_curves(points: Records, x: str, band: str) -> list[dict[float, float]]:
    """Values by x, for each value of the label `band`."""
    curves = []
    for of_curve in group_records(points, (band,)).values():
        curves.append({_place(record, x): _value(record) for record in of_curve})
    return curves


def _place(record: Record, x: str) -> float:
    place: Any = record.labels[x]
    return float(place)


def _average(points: Records, x: str, band: str) -> tuple[np.ndarray, ...]:
    """x, mean and sample deviation over the curves of a band, where all of them have a point."""
    curves = _read_curves(points, x, band)
    shared = sorted(set.intersection(*map(set, curves)))
    values = np.empty((len(curves), len(shared)))
    for row, curve in enumerate(curves):
        values[row] = [curve[place] for place in shared]
    deviation = np.zeros(len(shared))
    if len(curves) > 1:
        deviation = values.std(0, ddof=1)
    return np.array(shared), values.mean(0), deviation


# -- heat maps ---------------------------------------------------------------------------------------------------------


def _draw_heat_map(plot: HeatMap, points: Records) -> Drawing:
    labels = plot.panels
    if labels is None:
        labels = _find_differing_labels(points, {plot.x, plot.y})
    panels = group_records(points, labels)
    columns = _unique_labels(points, plot.x)
    rows = _unique_labels(points, plot.y)
    figure, panel_axes = _make_panels(len(panels), len(rows), len(columns))
    values = [_value(record) for record in points]
    limit = max(map(abs, values)) or 1.0
    scale: dict[str, Any] = {"cmap": "Blues", "vmin": 0.0, "vmax": limit}
    if min(values) < 0:
        scale = {"cmap": "RdBu", "vmin": -limit, "vmax": limit}
    for axes, (key, of_panel) in zip(panel_axes, panels.items(), strict=False):
        cells = np.full((len(rows), len(columns)), np.nan)
        for record in of_panel:
            row = rows.index(record.labels[plot.y])
            column = columns.index(record.labels[plot.x])
            cells[row, column] = _value(record)
        image = axes.imshow(cells, **scale)
        axes.set_title(_name_group(labels, key, ", "))
        _name_cells(axes, columns, rows)
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.y)
    bar = figure.colorbar(image, ax=panel_axes, fraction=0.03)
    bar.ax.tick_params(labelsize=8)
    return Drawing(figure)


def _unique_labels(points: Records, label: str) -> list[Label]:
    values = dict.fromkeys(record.labels[label] for record in points)
    return list(values)


def _make_panels(
    count: int,
    rows: int,
    columns: int,
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each map of so many rows and columns."""
    beside = min(count, max(1, 48 // max(columns, 6)))
    down = math.ceil(count / beside)
    cell = max(0.09, min(0.42, 13 / (beside * columns)))  # inches
    width = 1.6 + beside * (cell * columns + 0.4)
    height = 1.1 + down * (cell * rows + 0.6)
    figure = Figure(figsize=(width, height))
    panels = list(figure.subplots(down, beside, squeeze=False).flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels


def _name_cells(axes: Axes, columns: list[Label], rows: list[Label]) -> None:
    """Names of columns and rows; of many, every second, third ... is named."""
    for axis, labels in ((axes.xaxis, columns), (axes.yaxis, rows)):
        step = math.ceil(len(labels) / _MOST_TICKS)
        places = range(0, len(labels), step)
        axis.set_ticks(places, [_name(labels[place]) for place in places])
    longest = max(len(_name(column)) for column in columns)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="x", rotation=90 if longest > 2 else 0)


# -- dots -----------------------------------------------------------------------------------------------------------


def _draw_dots(plot: Dots, points: Records, slots: Slots | None) -> Drawing:
    groups = group_records(points, (plot.rows,))
    figure, axes = _make_axes(height=0.9 + 0.34 * len(groups))
    drawing = Drawing(figure, slots)
    names = []
    for place, ((row,), of_row) in enumerate(groups.items()):
        name = _name(row)
        names.append(name)
        color = drawing.color_of(name)
        values = [_value(record) for record in of_row]
        mean = float(np.mean(values))
        axes.hlines(
            place,
            min(values),
            max(values),
            color=color,
            linewidth=1.2,
            alpha=0.5,
        )
        axes.vlines(mean, place - 0.28, place + 0.28, color=color)
        for record in of_row:
            title = f"{name}: {format_value(record.value)}"
            if "seed" in record.labels:
                title = f"{name}, seed {record.labels['seed']}: {format_value(record.value)}"
            axes.plot(
                [_value(record)],
                [place],
                "o",
                color=color,
                markersize=6,
                gid=drawing.add_title(title),
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(True, axis="x", linewidth=0.8)
    axes.set_xlabel(_measure_title(points))
    return drawing
