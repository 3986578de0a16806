"""Drawings of the declared plots: which records stand in a plot, and how matplotlib draws them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fullrank.records import HeatMap, Label, Lines, Plot, Record, is_finite
from fullrank.render.tables import format_label, format_short, format_value, group_records

INK, MUTED, LINE, SURFACE = "#1b1d22", "#5c616b", "#dfe0e3", "#fefefe"
SERIES = ("#3f444d", "#0072b2", "#c04f00", "#00825f", "#b0508b", "#3320e0", "#5c2c00", "#140a4a")
HOVER = "hover:"  # begins the gid of a point; what follows is shown on hover
_MOST_LABELLED = 24  # points of a line that show their values
_MOST_TICKS = 40  # names of cells on an axis; of more, every second, third ...
_WIDTH, _HEIGHT = 6.4, 4.0  # inches
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

Records = Sequence[Record]
Slots = Mapping[str, int]  # colour slots of series by name


def draw_plot(plot: Plot, records: Records, slots: Slots | None = None) -> Figure:
    """Draw a plot of the records that stand in it. slots: colours of series by name; others take the next ones."""
    points = find_points(plot, records)
    if isinstance(plot, HeatMap):
        return _draw_heat_map(plot, points)
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    axes = figure.add_subplot()
    _draw_lines(axes, plot, points, records, slots or {})
    return figure


def find_points(plot: Plot, records: Records) -> list[Record]:
    """The records that stand in a plot: of its measure, with its labels and a value that can be drawn."""
    labels = {plot.x}
    if isinstance(plot, HeatMap):
        labels.add(plot.y)
    points = []
    for record in records:
        is_shown = is_finite(record.value) and _is_measured(plot, record.measure)
        has_labels = labels <= record.labels.keys()
        if is_shown and has_labels and record.has(plot.where):
            points.append(record)
    return points


def _is_measured(plot: Plot, measure: str) -> bool:
    if isinstance(plot, HeatMap):
        return measure == plot.measure
    if plot.y != "value":
        return measure == plot.y
    marked = [mark for _, mark in plot.marks]
    return measure not in marked


def clean_text(text: str) -> str:
    """Text that an XML document can hold."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _value(record: Record) -> float:
    return float(record.value or 0.0)


def _name(label: Label) -> str:
    return clean_text(format_label(label))


def _name_group(labels: Sequence[str], key: Sequence[Label], separator: str) -> str:
    """The name of records with these labels: text as it is, a number behind the name of its label."""
    parts = []
    for label, value in zip(labels, key, strict=True):
        if value is None:
            continue
        name = _name(value)
        if not isinstance(value, str):
            name = f"{label} {name}"
        parts.append(name)
    return separator.join(parts)


def _find_differing_labels(records: Records, without: set[str]) -> tuple[str, ...]:
    """Labels by which records differ."""
    names = dict.fromkeys(name for record in records for name in record.labels)
    differing = []
    for name in names:
        if name in without:
            continue
        values = {record.labels.get(name) for record in records}
        if len(values) > 1:
            differing.append(name)
    return tuple(differing)


# -- lines -------------------------------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, plot: Lines, points: Records, records: Records, slots: Slots) -> None:
    labels = plot.series
    if labels is None:
        labels = _find_differing_labels(points, {plot.x, plot.band})
    next_slot = len(slots) or 1
    for key, of_series in group_records(points, labels).items():
        name = _name_group(labels, key, " ")
        slot = slots.get(name, next_slot)
        color = SERIES[slot % len(SERIES)]
        _draw_series(axes, plot, of_series, name, color)
        next_slot += 1
    _set_scales(axes, plot)
    measures = dict.fromkeys(record.measure for record in points)
    x_title = plot.x_title or plot.x.replace("_", " ")
    y_title = plot.y_title or ", ".join(measures).replace("_", " ")
    axes.set_xlabel(clean_text(x_title))
    axes.set_ylabel(clean_text(y_title))
    for axis, measure in plot.marks:
        _draw_marks(axes, axis, measure, records)
    _, names = axes.get_legend_handles_labels()
    if not slots and len(names) > 1:  # with slots the page has a legend
        axes.legend()


def _set_scales(axes: Axes, plot: Lines) -> None:
    axes.grid(True, axis="y", linewidth=0.8)
    axes.set_yscale(plot.y_scale)
    for scale in (axes.xaxis, axes.yaxis):
        formatter = FuncFormatter(lambda value, _: format_short(value))
        scale.set_major_formatter(formatter)
    if plot.y_scale == "log":
        low, high = axes.yaxis.get_view_interval()
        spans_decades = high >= 1e3 * low
        steps = (1,) if spans_decades else (1, 2, 5)
        axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=9))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if plot.from_zero:
        axes.set_ylim(bottom=0)


def _draw_marks(axes: Axes, axis: str, measure: str, records: Records) -> None:
    """A dashed line across the axes at each value of a measure."""
    draw = axes.axvline if axis == "x" else axes.axhline
    places = set()
    for record in records:
        if record.measure == measure and is_finite(record.value):
            places.add(_value(record))
    for place in sorted(places):
        shown = format_value(place)
        text = f"{measure} {shown}"
        draw(
            place,
            color=MUTED,
            linewidth=1,
            linestyle="dashed",
            label=clean_text(text),
        )


def _draw_series(axes: Axes, plot: Lines, points: Records, name: str, color: str) -> None:
    """One line: its mean over the band, the band, and points that show their values."""
    x, mean, deviation = _average(points, plot.x, plot.band)
    axes.plot(
        x,
        mean,
        color=color,
        label=name or None,
    )
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
    for place, value in zip(x, mean, strict=True):
        text = f"{name} {format_value(place)}: {format_value(value)}"
        axes.plot(
            [place],
            [value],
            "o",
            color=color,
            markersize=4,
            gid=HOVER + text.strip(),
        )


def _average(points: Records, x: str, band: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, mean and sample deviation over the curves of a band, at the places of the first curve that all of them span."""
    curves = []
    for of_curve in group_records(points, (band,)).values():
        values = {}
        for record in of_curve:
            place = cast(float, record.labels[x])
            values[float(place)] = _value(record)
        curves.append(np.array(sorted(values.items())).T)
    first = max(xs[0] for xs, _ in curves)
    last = min(xs[-1] for xs, _ in curves)
    shared, _ = curves[0]
    shared = shared[(shared >= first) & (shared <= last)]
    spanned = np.stack([np.interp(shared, xs, ys) for xs, ys in curves])
    mean = spanned.mean(0)
    if len(curves) == 1:
        return shared, mean, np.zeros(len(shared))
    return shared, mean, spanned.std(0, ddof=1)


# -- heat maps ---------------------------------------------------------------------------------------------------------


def _draw_heat_map(plot: HeatMap, points: Records) -> Figure:
    labels = plot.panels
    if labels is None:
        labels = _find_differing_labels(points, {plot.x, plot.y})
    panels = group_records(points, labels)
    columns = list(dict.fromkeys(record.labels[plot.x] for record in points))
    rows = list(dict.fromkeys(record.labels[plot.y] for record in points))
    figure, panel_axes = _make_panels(len(panels), len(rows), len(columns))
    values = [_value(record) for record in points]
    largest = max(abs(value) for value in values)
    limit = largest or 1.0
    is_signed = min(values) < 0
    color_map = "RdBu" if is_signed else "Blues"
    lowest = -limit if is_signed else 0.0
    for axes, (key, of_panel) in zip(panel_axes, panels.items(), strict=False):
        cells = np.full((len(rows), len(columns)), np.nan)
        for record in of_panel:
            row = rows.index(record.labels[plot.y])
            column = columns.index(record.labels[plot.x])
            cells[row, column] = _value(record)
        image = axes.imshow(
            cells,
            cmap=color_map,
            vmin=lowest,
            vmax=limit,
        )
        title = _name_group(labels, key, ", ")
        axes.set_title(title)
        _name_cells(axes.xaxis, plot.x, columns)
        _name_cells(axes.yaxis, plot.y, rows)
        longest = max(len(_name(column)) for column in columns)
        rotation = 90 if longest > 2 else 0
        axes.tick_params(labelsize=8)
        axes.tick_params(axis="x", rotation=rotation)
    bar = figure.colorbar(
        image,
        ax=panel_axes,
        fraction=0.03,
    )
    bar.ax.tick_params(labelsize=8)
    return figure


def _name_cells(axis: Axis, title: str, labels: Sequence[Label]) -> None:
    step = math.ceil(len(labels) / _MOST_TICKS)
    places = range(0, len(labels), step)
    names = [_name(labels[place]) for place in places]
    axis.set_ticks(places, names)
    axis.set_label_text(title)


def _make_panels(count: int, rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each map of so many rows and columns."""
    most = max(1, 48 // max(columns, 6))
    beside = min(count, most)
    down = math.ceil(count / beside)
    widest = 13 / (beside * columns)
    cell = max(0.09, min(0.42, widest))  # inches
    width = 1.6 + beside * (cell * columns + 0.4)
    height = 1.1 + down * (cell * rows + 0.6)
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(down, beside, squeeze=False)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels
