"""Drawings of the declared plots: which records stand in a plot, and how matplotlib draws them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
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
    _draw_lines(figure.add_subplot(), plot, points, records, slots or {})
    return figure


def find_points(plot: Plot, records: Records) -> list[Record]:
    """The records that stand in a plot: of its measure, with its labels and a value that can be drawn."""
    labels = {plot.x} if isinstance(plot, Lines) else {plot.x, plot.y}
    points = []
    for record in records:
        is_shown = is_finite(record.value) and _is_measured(plot, record.measure)
        if is_shown and record.has(plot.where) and labels <= record.labels.keys():
            points.append(record)
    return points


def _is_measured(plot: Plot, measure: str) -> bool:
    if isinstance(plot, HeatMap):
        return measure == plot.measure
    if plot.y != "value":
        return measure == plot.y
    return measure not in [marked for _, marked in plot.marks]


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
        if value is not None:
            parts.append(_name(value) if isinstance(value, str) else f"{label} {_name(value)}")
    return separator.join(parts)


def _find_differing_labels(records: Records, without: set[str]) -> tuple[str, ...]:
    """Labels by which records differ."""
    differing = []
    for name in dict.fromkeys(name for record in records for name in record.labels):
        values = {record.labels.get(name) for record in records}
        if len(values) > 1 and name not in without:
            differing.append(name)
    return tuple(differing)


# -- lines -------------------------------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, plot: Lines, points: Records, records: Records, slots: Slots) -> None:
    labels = plot.series
    if labels is None:
        labels = _find_differing_labels(points, {plot.x, plot.band})
    for number, (key, of_series) in enumerate(group_records(points, labels).items()):
        name = _name_group(labels, key, " ")
        slot = slots.get(name, (len(slots) or 1) + number)
        _draw_series(axes, plot, of_series, name, SERIES[slot % len(SERIES)])
    axes.grid(True, axis="y", linewidth=0.8)
    axes.set_yscale(plot.y_scale)
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))
    if plot.y_scale == "log":
        low, high = axes.yaxis.get_view_interval()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,), numticks=9))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    measures = ", ".join(dict.fromkeys(record.measure for record in points))
    axes.set_xlabel(clean_text(plot.x_title or plot.x.replace("_", " ")))
    axes.set_ylabel(clean_text(plot.y_title or measures.replace("_", " ")))
    for axis, measure in plot.marks:
        draw = axes.axvline if axis == "x" else axes.axhline
        for place in sorted({_value(one) for one in records if one.measure == measure and is_finite(one.value)}):
            text = clean_text(f"{measure} {format_value(place)}")
            draw(place, color=MUTED, linewidth=1, linestyle="dashed", label=text)
    if not slots and len(axes.get_legend_handles_labels()[1]) > 1:  # with slots the page has a legend
        axes.legend()


def _draw_series(axes: Axes, plot: Lines, points: Records, name: str, color: str) -> None:
    """One line: its mean over the band, the band, and points that show their values."""
    x, mean, deviation = _average(points, plot.x, plot.band)
    axes.plot(x, mean, color=color, label=name or None)
    if deviation.any():
        axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.16, linewidth=0)
    for place, value in zip(x, mean, strict=True) if len(x) <= _MOST_LABELLED else ():
        text = f"{name} {format_value(place)}: {format_value(value)}".strip()
        axes.plot([place], [value], "o", color=color, markersize=4, gid=HOVER + text)


def _average(points: Records, x: str, band: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, mean and sample deviation over the curves of a band, at the places of the first curve that all of them span."""
    curves = []
    for of_curve in group_records(points, (band,)).values():
        places = {float(cast(float, record.labels[x])): _value(record) for record in of_curve}
        curves.append(np.array(sorted(places.items())).T)
    first, last = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    shared = curves[0][0][(curves[0][0] >= first) & (curves[0][0] <= last)]
    values = np.stack([np.interp(shared, xs, ys) for xs, ys in curves])
    return shared, values.mean(0), values.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(shared))


# -- heat maps ---------------------------------------------------------------------------------------------------------


def _draw_heat_map(plot: HeatMap, points: Records) -> Figure:
    labels = plot.panels
    if labels is None:
        labels = _find_differing_labels(points, {plot.x, plot.y})
    panels = group_records(points, labels)
    columns, rows = (list(dict.fromkeys(record.labels[label] for record in points)) for label in (plot.x, plot.y))
    figure, panel_axes = _make_panels(len(panels), len(rows), len(columns))
    values = [_value(record) for record in points]
    limit = max(map(abs, values)) or 1.0
    color_map, lowest = ("RdBu", -limit) if min(values) < 0 else ("Blues", 0.0)
    for axes, (key, of_panel) in zip(panel_axes, panels.items(), strict=False):
        cells = np.full((len(rows), len(columns)), np.nan)
        for record in of_panel:
            cells[rows.index(record.labels[plot.y]), columns.index(record.labels[plot.x])] = _value(record)
        image = axes.imshow(cells, cmap=color_map, vmin=lowest, vmax=limit)
        axes.set_title(_name_group(labels, key, ", "))
        for axis, title, names in ((axes.xaxis, plot.x, columns), (axes.yaxis, plot.y, rows)):
            places = range(0, len(names), math.ceil(len(names) / _MOST_TICKS))
            axis.set_ticks(places, [_name(names[place]) for place in places])
            axis.set_label_text(title)
        longest = max(len(_name(column)) for column in columns)
        axes.tick_params(labelsize=8)
        axes.tick_params(axis="x", rotation=90 if longest > 2 else 0)
    bar = figure.colorbar(image, ax=panel_axes, fraction=0.03)
    bar.ax.tick_params(labelsize=8)
    return figure


def _make_panels(count: int, rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each map of so many rows and columns."""
    beside = min(count, max(1, 48 // max(columns, 6)))
    down = math.ceil(count / beside)
    cell = max(0.09, min(0.42, 13 / (beside * columns)))  # inches
    figure = Figure(figsize=(1.6 + beside * (cell * columns + 0.4), 1.1 + down * (cell * rows + 0.6)))
    panels = list(figure.subplots(down, beside, squeeze=False).flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels
