"""Figures of records, by matplotlib: PNG and SVG files, and SVG inside a page, where colours follow the reader's theme."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fullrank.core.errors import InputError
from fullrank.files import write_bytes
from fullrank.records import HeatMap, Label, Lines, Plot, Record, is_finite
from fullrank.render.blocks import find_differing_labels, format_label, format_short, format_value, group_records

INK = "#1b1d22"
MUTED = "#5c616b"
LINE = "#dfe0e3"
SURFACE = "#fefefe"
SERIES = ("#3f444d", "#0072b2", "#c04f00", "#00825f", "#b0508b", "#3320e0", "#5c2c00", "#140a4a")
_MOST_MARKED = 24  # points of a line that are drawn as dots, too
_MOST_TICKS = 40  # names of cells on an axis; of more, every second, third ...
_MOST_BESIDE = 4  # heat maps
_WIDTH = 6.4  # inches
_HEIGHT = 4.0
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

Records = Sequence[Record]
Slots = Mapping[str, int]  # colour slots of series by name

_STYLE = f"{__package__}.figure"  # figure.mplstyle
_THEME = {INK: "--ink", MUTED: "--muted", LINE: "--line", SURFACE: "--surface"}
_THEME |= {color: f"--series-{slot}" for slot, color in enumerate(SERIES)}
_UNUSED_IDS = re.compile(r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|title)_?[\d-]*"')


def save_plots(plots: Sequence[Plot], records: Sequence[Record], folder: Path, name: str) -> list[Path]:
    """Draw plots into NAME, NAME_2, ..., PNG and SVG; those without records are left out.

    Args:
        plots: what is drawn.
        records: measured values.
        folder: where the files are written.
        name: NAME of the files.

    Returns:
        The files.

    Raises:
        InputError: the folder is a file.
        RunError: the folder cannot be written to.
    """
    if folder.is_file():
        raise InputError(f"--out {folder}: a file of that name exists; give a folder")
    paths = []
    for number, plot in enumerate(plots, start=1):
        stem = name if number == 1 else f"{name}_{number}"
        for kind in ("png", "svg") if find_points(plot, records) else ():
            paths.append(folder / f"{stem}.{kind}")
            write_bytes(paths[-1], draw_bytes(plot, records, kind))
    return paths


def draw_bytes(plot: Plot, records: Sequence[Record], kind: str = "svg") -> bytes:
    """Draw a plot with its title as a file.

    Args:
        plot: what is drawn.
        records: measured values.
        kind: `png` or `svg`.

    Returns:
        The content of the file.
    """
    with _style():
        figure = draw_plot(plot, records)
        figure.suptitle(clean_text(plot.title), x=0.02, ha="left")
        if plot.subtitle:
            figure.supxlabel(clean_text(plot.subtitle), x=0.02, ha="left", color=MUTED)
        return _to_bytes(figure, kind)


def draw_svg(plot: Plot, records: Sequence[Record], slots: Slots | None = None) -> str:
    """Draw a plot for a page: without the title, its colours are the variables of the page's style sheet.

    Args:
        plot: what is drawn.
        records: measured values.
        slots: colours of series by name; others take the next ones.

    Returns:
        The `<svg>` element.
    """
    with _style(salt=f"{plot}{len(records)}"):
        svg = _to_bytes(draw_plot(plot, records, slots), "svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _UNUSED_IDS.sub("", svg)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg class="figure" role="img" viewBox="\1">', svg, count=1)
    for color, variable in _THEME.items():
        svg = svg.replace(color, f"var({variable})")
    return svg.strip()


def _style(salt: str = "fullrank") -> AbstractContextManager[None]:
    return matplotlib.style.context([_STYLE, {"svg.hashsalt": salt}], after_reset=True)


def _to_bytes(figure: Figure, kind: str) -> bytes:
    background = "none" if kind == "svg" else "white"
    metadata = {"Date": None, "Creator": "fullrank"}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a box stands for it
        figure.savefig(
            buffer,
            format=kind,
            dpi=150,
            facecolor=background,
            metadata=metadata,
        )
    return buffer.getvalue()


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw_plot(plot: Plot, records: Records, slots: Slots | None = None) -> Figure:
    """Draw a plot of the records that stand in it.

    Args:
        plot: what is drawn.
        records: measured values.
        slots: colours of series by name; others take the next ones.

    Returns:
        The figure, without the title.

    Raises:
        InputError: the label x of Lines is not a number.
    """
    points = find_points(plot, records)
    if isinstance(plot, HeatMap):
        return _draw_heat_map(plot, points)
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    axes = figure.add_subplot()
    _draw_lines(axes, plot, points, records, slots or {})
    return figure


def find_points(plot: Plot, records: Records) -> list[Record]:
    """Find the records that stand in a plot: of its measure, with its labels and a value that can be drawn."""
    points = []
    for record in records:
        if is_finite(record.value) and record.has(plot.where) and _is_placed(plot, record):
            points.append(record)
    return points


def _is_placed(plot: Plot, record: Record) -> bool:
    if isinstance(plot, HeatMap):
        return record.measure == plot.measure and {plot.x, plot.y} <= record.labels.keys()
    marks = [mark for _, mark in plot.marks]
    is_measured = record.measure not in marks if plot.y == "value" else record.measure == plot.y
    return is_measured and plot.x in record.labels


def clean_text(text: str) -> str:
    """Replace characters that XML does not allow by U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _value(record: Record) -> float:
    return record.value or 0.0


def _name(label: Label) -> str:
    return clean_text(format_label(label))


def _name_group(labels: Sequence[str], key: Sequence[Label], separator: str) -> str:
    """Name records with these labels: text as it is, a number behind the name of its label."""
    words = []
    for label, value in zip(labels, key, strict=True):
        if isinstance(value, str):
            words.append(_name(value))
        elif value is not None:
            words.append(f"{label} {_name(value)}")
    return separator.join(words)


def _draw_lines(axes: Axes, plot: Lines, points: Records, records: Records, slots: Slots) -> None:
    labels = plot.series
    if labels is None:
        labels = find_differing_labels(points, {plot.x, plot.band})
    series = group_records(points, labels)
    first_free = len(slots) or 1
    for number, (key, of_series) in enumerate(series.items(), start=first_free):
        name = _name_group(labels, key, " ")
        slot = slots.get(name, number)
        color = SERIES[slot % len(SERIES)]
        x, mean, deviation = _average(of_series, plot.x, plot.band)
        marker = "o" if len(x) <= _MOST_MARKED else ""
        axes.plot(
            x,
            mean,
            color=color,
            marker=marker,
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
    _set_scales(axes, plot)
    measures = dict.fromkeys(record.measure for record in points)
    x_title = plot.x_title or plot.x.replace("_", " ")
    y_title = plot.y_title or ", ".join(measures).replace("_", " ")
    axes.set_xlabel(clean_text(x_title))
    axes.set_ylabel(clean_text(y_title))
    for axis, measure in plot.marks:
        draw = axes.axvline if axis == "x" else axes.axhline
        marked = [record for record in records if record.measure == measure and is_finite(record.value)]
        for place in sorted(set(map(_value, marked))):
            label = clean_text(f"{measure} {format_value(place)}")
            draw(
                place,
                color=MUTED,
                linewidth=1,
                linestyle="dashed",
                label=label,
            )
    _, names = axes.get_legend_handles_labels()
    if len(names) > 1 and not slots.keys() >= set(names):  # the page has a legend of the slots
        axes.legend()


def _set_scales(axes: Axes, plot: Lines) -> None:
    axes.grid(axis="y")
    is_log = plot.y_scale == "log" and axes.dataLim.y1 > 0  # without a positive value nothing could be drawn
    axes.set_yscale("log" if is_log else "linear")
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))
    if is_log:
        low, high = axes.yaxis.get_view_interval()
        steps = (1,) if high >= 1e3 * low else (1, 2, 5)
        axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=9))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if plot.from_zero:
        axes.set_ylim(bottom=0)


def _average(points: Records, x: str, band: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average the curves of a band: x, mean and sample deviation, at the places of the first curve that all of them span."""
    curves = []
    for of_curve in group_records(points, (band,)).values():
        values = {_read_place(record, x): _value(record) for record in of_curve}
        curves.append(np.array(sorted(values.items())).T)
    first = max(xs[0] for xs, _ in curves)
    last = min(xs[-1] for xs, _ in curves)
    shared, _ = curves[0]
    shared = shared[(shared >= first) & (shared <= last)]
    spanned = np.stack([np.interp(shared, xs, ys) for xs, ys in curves])
    deviation = spanned.std(0, ddof=min(1, len(curves) - 1))
    return shared, spanned.mean(0), deviation


def _read_place(record: Record, x: str) -> float:
    place = record.labels[x]
    if not isinstance(place, int | float):
        raise InputError(
            f"Lines: x is a label of numbers, but '{x}' of a record is {place!r}; give another, or a HeatMap"
        )
    return place


def _draw_heat_map(plot: HeatMap, points: Records) -> Figure:
    labels = plot.panels
    if labels is None:
        labels = find_differing_labels(points, {plot.x, plot.y})
    panels = group_records(points, labels)
    columns = list(dict.fromkeys(record.labels[plot.x] for record in points))
    rows = list(dict.fromkeys(record.labels[plot.y] for record in points))
    figure, panel_axes = _make_panels(len(panels))
    values = [_value(record) for record in points]
    limit = max(map(abs, values)) or 1.0
    is_signed = min(values) < 0
    colors = "RdBu" if is_signed else "Blues"
    lowest = -limit if is_signed else 0.0
    for axes, (key, of_panel) in zip(panel_axes, panels.items(), strict=False):
        cells = np.full((len(rows), len(columns)), np.nan)
        for record in of_panel:
            row = rows.index(record.labels[plot.y])
            column = columns.index(record.labels[plot.x])
            cells[row, column] = _value(record)
        image = axes.imshow(cells, colors, vmin=lowest, vmax=limit)
        axes.set_title(_name_group(labels, key, ", "))
        _name_cells(axes.xaxis, plot.x, columns)
        _name_cells(axes.yaxis, plot.y, rows)
        longest = max(len(_name(column)) for column in columns)
        axes.tick_params(labelsize=8)
        axes.tick_params(axis="x", rotation=90 if longest > 2 else 0)
    bar = figure.colorbar(image, ax=panel_axes, fraction=0.03)
    bar.ax.tick_params(labelsize=8)
    return figure


def _name_cells(axis: Axis, title: str, labels: Sequence[Label]) -> None:
    step = math.ceil(len(labels) / _MOST_TICKS)
    places = range(0, len(labels), step)
    names = [_name(labels[place]) for place in places]
    axis.set_ticks(places, names)
    axis.set_label_text(title)


def _make_panels(count: int) -> tuple[Figure, list[Axes]]:
    beside = min(count, _MOST_BESIDE)
    down = math.ceil(count / beside)
    side = max(2.4, _WIDTH / beside)  # inches
    figure = Figure(figsize=(1 + side * beside, side * down))
    panels = list(figure.subplots(down, beside, squeeze=False).flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels
