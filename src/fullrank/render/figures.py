"""Figures of records, by matplotlib: PNG and SVG files, and SVG inside a page, where colours follow the reader's theme."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fullrank.core.errors import InputError, RunError
from fullrank.files import write_bytes
from fullrank.records import Bars, Dots, HeatMap, Label, Lines, Plot, Record, is_finite
from fullrank.render.tables import format_label, format_short, format_value, group_records

INK, MUTED, LINE, SURFACE = "#1b1d22", "#5c616b", "#dfe0e3", "#fefefe"
SERIES = ("#3f444d", "#0072b2", "#c04f00", "#00825f", "#b0508b", "#3320e0", "#5c2c00", "#140a4a")
_THEME = {INK: "--ink", MUTED: "--muted", LINE: "--line", SURFACE: "--surface"}
_THEME |= {colour: f"--series-{slot}" for slot, colour in enumerate(SERIES)}
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none", "svg.id": None, "text.parse_math": False, "text.usetex": False,
    "font.family": ["DejaVu Sans"], "font.size": 10.0, "path.simplify_threshold": 0.1,
}  # fmt: skip
_MOST_LABELLED = 24  # points of a line that show their values
_WIDTH, _HEIGHT = 6.4, 4.0  # inches
_MOST_TICKS = 40  # names of cells on an axis; of more, every second, third ...
_UNSIGNED = LinearSegmentedColormap.from_list("unsigned", ["#ffffff", "#9ecae8", "#0072b2", "#00304d"])
_SIGNED = LinearSegmentedColormap.from_list("signed", ["#7a3200", "#e08a4a", "#ffffff", "#6fb1dd", "#00304d"])
_MADE_BY = b"fullrank"  # stands near the beginning of every file
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

Slots = Mapping[str, int]  # colour slots of series by name


# -- files and pages ---------------------------------------------------------------------------------------------------


def save_plot(plot: Plot, records: Sequence[Record], folder: Path, name: str) -> list[Path]:
    """Draw a plot into NAME.png and NAME.svg in `folder`; equal records give equal bytes.

    Raises InputError where a file of that name is no figure of ours, RunError where the folder cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: a file of that name exists; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out {folder}: cannot be made ({error.strerror})") from error
    paths = []
    for kind in ("png", "svg"):
        path = folder / f"{name}.{kind}"
        _check_replaceable(path)
        write_bytes(path, draw_bytes(plot, records, kind))
        paths.append(path)
    return paths


def save_plots(plots: Sequence[Plot], records: Sequence[Record], folder: Path, name: str) -> list[Path]:
    """Draw several plots: NAME, NAME_2, ...; those without records are left out."""
    paths = []
    for number, plot in enumerate(plots, start=1):
        if has_points(plot, records):
            paths += save_plot(plot, records, folder, name if number == 1 else f"{name}_{number}")
    return paths


def has_points(plot: Plot, records: Sequence[Record]) -> bool:
    """True if some record stands in the plot."""
    labels = {name for name in ("x", "rows", "parts") if hasattr(plot, name)}
    needed = {getattr(plot, name) for name in labels}
    where = getattr(plot, "where", {})
    measure = getattr(plot, "measure", None) or getattr(plot, "y", "value")
    return any(
        needed <= record.labels.keys() and record.has(where) and measure in ("value", record.measure)
        for record in records
    )


def _check_replaceable(path: Path) -> None:
    in_run = (path.parent.parent / "run.json").is_file()
    if path.exists() and not in_run and _MADE_BY not in path.read_bytes()[:4096]:
        raise InputError(f"{path}: exists and is not a figure of fullrank, so it is left alone; give another --out")


def draw_bytes(plot: Plot, records: Sequence[Record], kind: str = "svg", slots: Slots | None = None) -> bytes:
    """The file of a plot. kind: `png` or `svg`."""
    with matplotlib.style.context({**_SETTINGS, "svg.hashsalt": "fullrank"}, after_reset=True):
        figure, titles = draw_figure(plot, records, slots or {}, heading=True)
        return _to_bytes(figure, kind, titles)


def write_png(draw: Callable[[], Figure], path: Path) -> None:
    """Write a figure of one's own drawing, in the style of all others."""
    with matplotlib.style.context({**_SETTINGS, "svg.hashsalt": "fullrank"}, after_reset=True):
        write_bytes(path, _to_bytes(draw(), "png", ()))


def draw_svg(plot: Plot, records: Sequence[Record], slots: Slots | None = None) -> str:
    """SVG for a page: without the heading, its colours are the variables of the page's style sheet."""
    salt = f"{plot}{len(records)}"
    with matplotlib.style.context({**_SETTINGS, "svg.hashsalt": salt}, after_reset=True):
        figure, titles = draw_figure(plot, records, slots or {}, heading=False)
        if isinstance(plot, Lines):  # a layout that is not computed halves the time
            figure.set_layout_engine(None)
            figure.subplots_adjust(left=0.12, bottom=0.14, right=0.98, top=0.97)
        svg = _to_bytes(figure, "svg", titles).decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|title)_?[\d-]*"', "", svg)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg class="figure" role="img" viewBox="\1">', svg, count=1)
    for colour, variable in _THEME.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.strip()


def _to_bytes(figure: Figure, kind: str, titles: Sequence[str]) -> bytes:
    canvas = FigureCanvasAgg(figure) if kind == "png" else FigureCanvasSVG(figure)
    buffer = io.BytesIO()
    metadata = {"Software": "fullrank"} if kind == "png" else {"Date": None, "Creator": "fullrank"}
    background = "white" if kind == "png" else "none"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a box stands for it
        canvas.print_figure(buffer, format=kind, dpi=150, facecolor=background, metadata=metadata)
    content = buffer.getvalue()
    if kind == "svg":
        for number, title in enumerate(titles):
            group = f'<g id="title-{number}">'
            content = content.replace(group.encode(), f"{group}<title>{escape(title)}</title>".encode())
    return content


def clean_text(text: str) -> str:
    """Text that an XML document can hold."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw_figure(plot: Plot, records: Sequence[Record], slots: Slots, heading: bool) -> tuple[Figure, list[str]]:
    """The figure of a plot, and the texts that its points show on hover: point i has the gid `title-i`.

    slots: colours of series by name; others take the next ones. heading: whether title and subtitle stand in it.
    """
    draw: dict[type, Callable[..., tuple[Figure, list[str]]]] = {
        Lines: _draw_lines, HeatMap: _draw_heat_map, Bars: _draw_bars, Dots: _draw_dots,
    }  # fmt: skip
    figure, titles = draw[type(plot)](plot, records, slots)
    if heading and plot.title:
        figure.suptitle(clean_text(plot.title), x=0.02, ha="left", color=INK, fontweight="bold", fontsize=12)
        figure.text(0.02, 0.01, clean_text(plot.subtitle), color=MUTED, fontsize=8)
    return figure, titles


def _new_axes(width: float = _WIDTH, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, style_axes(figure.add_subplot())


def style_axes(axes: Axes) -> Axes:
    """Only the lower edge of the frame, and quiet labels."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(which="both", length=0, labelcolor=MUTED)
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    return axes


def _color_of(name: str, slots: Slots, taken: dict[str, int]) -> str:
    slot = slots.get(name)
    if slot is None:
        slot = taken.setdefault(name, len(taken) + 1 if not slots else len(slots) + len(taken))
    return SERIES[slot % len(SERIES)]


def _draw_lines(plot: Lines, records: Sequence[Record], slots: Slots) -> tuple[Figure, list[str]]:
    marked = {measure for _, measure in plot.marks}
    chosen = [r for r in records if plot.x in r.labels and is_finite(r.value) and r.has(plot.where)]
    points = [r for r in chosen if r.measure == plot.y or (plot.y == "value" and r.measure not in marked)]
    names = plot.series if plot.series is not None else _telling_labels(points, {plot.x, plot.band})
    names = _separate(plot, points, tuple(names))
    figure, axes = _new_axes()
    titles: list[str] = []
    taken: dict[str, int] = {}
    for key, of_series in group_records(points, names).items():
        name = clean_text(" ".join(map(format_label, key)))
        color = _color_of(name, slots, taken)
        x, mean, deviation = _average(of_series, plot.x, plot.band)
        axes.plot(x, mean, color=color, linewidth=1.8, label=name or None, solid_capstyle="round")
        if deviation.any():
            axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.16, linewidth=0)
        if len(x) <= _MOST_LABELLED:
            for at, value in zip(x, mean, strict=True):
                gid = f"title-{len(titles)}"
                axes.plot([at], [value], "o", color=color, markersize=4, markeredgecolor=SURFACE, gid=gid)
                titles.append(f"{name} {format_value(float(at))}: {format_value(float(value))}".strip())
    for axis, measure in plot.marks:
        draw = axes.axvline if axis == "x" else axes.axhline
        for place in sorted({r.value for r in records if r.measure == measure and r.value is not None}):
            label = f"{measure} {format_value(place)}"
            draw(place, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=clean_text(label))
    axes.grid(True, axis="y", color=LINE, linewidth=0.8)
    axes.set_xscale(plot.x_scale)
    axes.set_yscale(plot.y_scale)
    for ticks, scale in ((axes.xaxis, plot.x_scale), (axes.yaxis, plot.y_scale)):
        if scale == "log":
            ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ticks.set_minor_formatter(NullFormatter())
        ticks.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(clean_text(plot.x_title or plot.x.replace("_", " ")), color=MUTED)
    axes.set_ylabel(clean_text(plot.y_title or _measure_title(points)), color=MUTED)
    labelled = axes.get_legend_handles_labels()[1]
    if labelled and (len(labelled) > 1 or plot.marks) and not slots:  # with slots the page has a legend
        axes.legend(frameon=False, labelcolor=MUTED, fontsize=8.5)
    return figure, titles


def _telling_labels(records: Sequence[Record], without: set[str]) -> tuple[str, ...]:
    """Labels by which records differ, the measure's name aside."""
    names = dict.fromkeys(name for record in records for name in record.labels if name not in without)
    return tuple(name for name in names if len({record.labels.get(name) for record in records}) > 1)


def _separate(plot: Lines, records: Sequence[Record], names: tuple[str, ...]) -> tuple[str, ...]:
    """The labels of lines; also the band where its curves share fewer than two points, which leave nothing to average."""
    for of_series in group_records(records, names).values():
        curves = group_records(of_series, (plot.band,)).values()
        shared = set.intersection(*({record.labels[plot.x] for record in curve} for curve in curves))
        if len(shared) < 2 <= max(map(len, curves)):
            return (*names, plot.band)
    return names


def _measure_title(records: Sequence[Record]) -> str:
    measures = dict.fromkeys(record.measure for record in records)
    units = {record.unit for record in records if record.unit}
    words = ", ".join(measures)
    return f"{words} ({units.pop()})" if len(units) == 1 and not units & {words} else words


def _average(records: Sequence[Record], x: str, band: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, mean and sample deviation over the values of the label `band`, where all of them have a point."""
    curves: dict[Label, dict[float, float]] = {}
    for record in records:
        curves.setdefault(record.labels.get(band), {})[float(record.labels[x])] = float(record.value)  # type: ignore[arg-type]
    shared = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    values = np.array([[curve[at] for at in shared] for curve in curves.values()])
    deviation = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(shared))
    return np.array(shared), values.mean(0), deviation


def _draw_heat_map(plot: HeatMap, records: Sequence[Record], slots: Slots) -> tuple[Figure, list[str]]:
    shown = [record for record in records if record.measure == plot.measure and record.has(plot.where)]
    cells = [record for record in shown if {plot.x, plot.y} <= record.labels.keys()]
    names = plot.panels if plot.panels is not None else _telling_labels(cells, {plot.x, plot.y})
    panels = group_records(cells, names)
    columns = list(dict.fromkeys(record.labels[plot.x] for record in cells))
    rows = list(dict.fromkeys(record.labels[plot.y] for record in cells))
    limit = max((abs(r.value) for r in cells if r.value is not None and math.isfinite(r.value)), default=1.0) or 1.0
    signed = any(record.value is not None and record.value < 0 for record in cells)
    beside = min(len(panels), max(1, 48 // max(len(columns), 6)))
    down = math.ceil(len(panels) / beside)
    cell = max(0.09, min(0.42, 13 / (beside * len(columns))))
    size = (1.6 + beside * (cell * len(columns) + 0.4), 1.1 + down * (cell * len(rows) + 0.6))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, beside, squeeze=False)
    image = None
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (key, of_panel) in zip(grid.flat, panels.items(), strict=False):
        values = np.full((len(rows), len(columns)), np.nan)
        for record in of_panel:
            values[rows.index(record.labels[plot.y]), columns.index(record.labels[plot.x])] = record.value
        colors = _SIGNED if signed else _UNSIGNED
        image = axes.imshow(values, cmap=colors, vmin=-limit if signed else 0.0, vmax=limit, interpolation="nearest")
        for axis, labels, name in ((axes.xaxis, columns, plot.x), (axes.yaxis, rows, plot.y)):
            step = math.ceil(len(labels) / _MOST_TICKS)
            axis.set_ticks(range(0, len(labels), step), [clean_text(format_label(one)) for one in labels[::step]])
            axis.set_label_text(name.replace("_", " "), color=MUTED)
        axes.tick_params(length=0, labelcolor=MUTED, labelsize=8)
        axes.tick_params(axis="x", rotation=90 if max(len(str(one)) for one in columns) > 2 else 0)
        axes.set_title(clean_text(_panel_title(names, key)), color=INK, fontsize=9)
        for spine in axes.spines.values():
            spine.set_color(LINE)
    if image is not None:
        bar = figure.colorbar(image, ax=list(grid.flat), fraction=0.03, pad=0.02)
        bar.ax.tick_params(length=0, labelsize=8, labelcolor=MUTED)
        bar.outline.set_edgecolor(LINE)
    return figure, []


def _panel_title(names: Sequence[str], key: Sequence[Label]) -> str:
    parts = [
        format_label(value) if name == "model" else f"{name} {format_label(value)}"
        for name, value in zip(names, key, strict=True)
    ]
    return ", ".join(parts)


def _draw_bars(plot: Bars, records: Sequence[Record], slots: Slots) -> tuple[Figure, list[str]]:
    parts = [r for r in records if r.measure == plot.measure and {plot.rows, plot.parts} <= r.labels.keys()]
    rows = list(dict.fromkeys(clean_text(format_label(record.labels[plot.rows])) for record in parts))
    figure, axes = _new_axes(height=0.9 + 0.32 * len(rows))
    left = dict.fromkeys(rows, 0.0)
    titles: list[str] = []
    taken: dict[str, int] = {}
    for (part,), of_part in group_records(parts, (plot.parts,)).items():
        name = clean_text(format_label(part)).replace("_", " ")
        color = _color_of(name, {}, taken)
        for number, record in enumerate(of_part):
            row = clean_text(format_label(record.labels[plot.rows]))
            gid = f"title-{len(titles)}"
            label = name if number == 0 else None
            bar = axes.barh(row, record.value or 0.0, left=left[row], height=0.7, color=color, label=label)
            bar.patches[0].set_gid(gid)
            left[row] += record.value or 0.0
            titles.append(f"{row}, {name}: {format_value(record.value)}")
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))
    figure.legend(loc="outside lower left", ncols=4, frameon=False, labelcolor=MUTED, fontsize=8.5)
    return figure, titles


def _draw_dots(plot: Dots, records: Sequence[Record], slots: Slots) -> tuple[Figure, list[str]]:
    points = [r for r in records if r.measure == plot.measure and r.has(plot.where) and is_finite(r.value)]
    groups = group_records(points, (plot.rows,))
    names = [clean_text(format_label(row)) for (row,) in groups]
    figure, axes = _new_axes(height=0.9 + 0.34 * len(groups))
    titles: list[str] = []
    taken: dict[str, int] = {}
    for at, (name, of_row) in enumerate(zip(names, groups.values(), strict=True)):
        color = _color_of(name, slots, taken)
        values = [float(record.value) for record in of_row if record.value is not None]
        axes.plot([min(values), max(values)], [at, at], color=color, linewidth=1.2, alpha=0.5)
        axes.plot([float(np.mean(values))] * 2, [at - 0.28, at + 0.28], color=color, linewidth=2)
        for record, value in zip(of_row, values, strict=True):
            axes.plot(
                [value], [at], "o", color=color, markersize=6, markeredgecolor=SURFACE, gid=f"title-{len(titles)}"
            )
            seed = record.labels.get("seed")
            titles.append(f"{name}{'' if seed is None else f', seed {seed}'}: {format_value(value)}")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(True, axis="x", color=LINE, linewidth=0.8)
    axes.set_xlabel(_measure_title(points), color=MUTED)
    return figure, titles
