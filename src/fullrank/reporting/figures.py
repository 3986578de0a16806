"""The figures of a report: curves with direct labels, and final figures as dots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fullrank.reporting import format
from fullrank.reporting.curves import Curve, Series
from fullrank.reporting.measure import Measure
from fullrank.reporting.svg import LINE, MUTED, SLOTS, SURFACE, clean, series_colour, settings, to_svg
from fullrank.reporting.table import Row

WIDTH, NARROW, HEIGHT = 430, 370, 280  # user units; the page scales a drawing to its column
_LABEL_SPACE = 108  # at the right of curves, for the names of the rows
_NAME_LENGTH = 14


def line_figure(
    series: Sequence[Series],
    *,
    y_label: str,
    x_label: str,
    alt: str,
    log: bool = False,
    from_zero: bool = False,
    width: int = WIDTH,
    show_value: Callable[[float], str] = format.short_count,
) -> str:
    """Curves of several rows as SVG: thin lines for single seeds, a thick one for their mean, names at the ends."""
    with matplotlib.rc_context(settings()):  # type: ignore[arg-type]
        figure = Figure(figsize=(width / 72, HEIGHT / 72))
        axes = figure.add_axes(
            (50 / width, 40 / HEIGHT, (width - 50 - _LABEL_SPACE) / width, (HEIGHT - 40 - 28) / HEIGHT)
        )
        furnish(axes, x_label, y_label)
        for one in series:
            _draw(axes, one)
        if log:
            _log_axis(axes, series, show_value)
        else:
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, min_n_ticks=3))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_value(value)))
            if from_zero:
                axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format.short_count(value)))
        _label_ends(axes, series, width)
        return to_svg(figure, alt)


def dot_figure(rows: Sequence[Row], slots: Sequence[int], split: str, measure: Measure, alt: str) -> str:
    """Final figures: a dot for each seed, a bar for the mean, a line for mean ± standard deviation."""
    height = 46 + 30 * len(rows)
    with matplotlib.rc_context(settings()):  # type: ignore[arg-type]
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        axes = figure.add_axes((112 / WIDTH, 36 / height, (WIDTH - 112 - 18) / WIDTH, (height - 36 - 8) / height))
        furnish(
            axes, f"{'test' if split == 'test' else 'validation'} {measure.words} ({measure.comparative} is better)", ""
        )
        axes.grid(True, axis="x", color=LINE, linewidth=0.8)
        axes.grid(False, axis="y")
        for place, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            _dots(axes, row, slot, -place, split, measure)
        axes.set_ylim(-len(rows) + 0.4, 0.6)
        axes.set_yticks([-place for place in range(len(rows))], [row.shown(short(row.name)) for row in rows])
        for text, slot in zip(axes.get_yticklabels(), slots, strict=True):
            text.set_color(series_colour(slot))
        axes.margins(x=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        return to_svg(figure, alt)


def _dots(axes: Axes, row: Row, slot: int, place: float, split: str, measure: Measure) -> None:
    colour = series_colour(slot)
    stat = row.figures.get(split)
    if stat is None:
        axes.text(
            0.01, place, "not measured", transform=axes.get_yaxis_transform(), color=MUTED, fontsize=11, va="center"
        )
        return
    seeds = [value for run in row.runs if (value := measure.final(run, split)) is not None]
    disc(axes, seeds, [place] * len(seeds), colour, slot)
    if stat.deviation is not None:
        spread = [stat.mean - stat.deviation, stat.mean + stat.deviation]
        axes.plot(
            spread, [place, place], color=colour, linewidth=2, alpha=0.55, gid=f"slot-{slot}:spread", clip_on=False
        )
        axes.plot(
            [stat.mean] * 2,
            [place - 0.3, place + 0.3],
            color=colour,
            linewidth=3,
            gid=f"slot-{slot}:mean",
            clip_on=False,
        )


def disc(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, slot: int, size: float = 8.5) -> None:
    """Discs as dots of no length with round caps: markers would need links inside the drawing."""
    for one, other in zip(x, y, strict=True):
        axes.plot(
            [one, one], [other, other], color=SURFACE, linewidth=size + 2.5, solid_capstyle="round", clip_on=False
        )
        axes.plot(
            [one, one],
            [other, other],
            color=colour,
            linewidth=size,
            solid_capstyle="round",
            gid=f"slot-{slot}:dot",
            clip_on=False,
        )


def furnish(axes: Axes, x_label: str, y_label: str) -> None:
    """Light furniture: horizontal grid, a base line, no ticks, the unit above the axis."""
    axes.patch.set_visible(False)
    axes.figure.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.grid(True, axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, bottom=False, left=False, labelcolor=MUTED, labelsize=11.5, pad=6)
    axes.set_xlabel(x_label, color=MUTED, fontsize=11.5, labelpad=5)
    if y_label:
        axes.text(0, 1.04, y_label, transform=axes.transAxes, color=MUTED, fontsize=11.5, va="bottom", ha="left")


def _draw(axes: Axes, series: Series) -> None:
    colour = series_colour(series.slot)
    dashes = (0, (4, 2)) if not series.finished else (0, (6, 1.5)) if series.slot >= SLOTS else "solid"
    mean = series.mean
    thin = len(series.curves) > 1
    for curve in series.curves:
        _line(axes, curve, colour, 1.1 if thin else 2.0, 0.45 if thin and mean else 1.0, dashes, series.slot)
    if thin and mean is not None:
        _line(axes, mean, colour, 2.2, 1.0, dashes, series.slot)


def _line(axes: Axes, curve: Curve, colour: str, width: float, alpha: float, dashes: object, slot: int) -> None:
    axes.plot(
        curve.x, curve.y, color=colour, linewidth=width, alpha=alpha, linestyle=dashes, gid=f"slot-{slot}:line",
        clip_on=False, solid_capstyle="round", solid_joinstyle="round",
    )  # fmt: skip


def _log_axis(axes: Axes, series: Sequence[Series], show_value: Callable[[float], str]) -> None:
    values = np.concatenate([curve.y for one in series for curve in one.curves])
    axes.set_yscale("log")
    decades = np.log10(values.max() / values.min())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_value(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_ends(axes: Axes, series: Sequence[Series], width: int) -> None:
    """Names at the right edge at the height of each curve's end, pushed apart where they would overlap."""
    if not 1 <= len(series) <= SLOTS:
        return
    right = axes.get_xlim()[1]
    heights = [
        float(axes.transAxes.inverted().transform(axes.transData.transform((right, one.last)))[1]) for one in series
    ]
    placed = _apart(heights, 15 / (HEIGHT - 68))
    unit = 1 / (width - 50 - _LABEL_SPACE)
    for one, end, height in zip(series, heights, placed, strict=True):
        colour = series_colour(one.slot)
        x, y = _end_of(axes, one)
        if abs(y - end) < 0.02 and x > 0.85:
            axes.plot(
                [x + unit, 1 + 8 * unit, 1 + 14 * unit], [y, height, height], transform=axes.transAxes, color=colour,
                linewidth=0.9, alpha=0.6, clip_on=False, gid=f"slot-{one.slot}:leader",
            )  # fmt: skip
        axes.text(1 + 18 * unit, height, short(one.name), transform=axes.transAxes, color=colour, fontsize=12, va="center",
                  gid=f"slot-{one.slot}:name")  # fmt: skip


def _end_of(axes: Axes, series: Series) -> tuple[float, float]:
    ends = np.array([[curve.x[-1], curve.y[-1]] for curve in series.curves]).mean(axis=0)
    x, y = axes.transAxes.inverted().transform(axes.transData.transform(ends))
    return float(x), float(y)


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights moved as little as needed to be `gap` apart, kept in order: blocks that overlap are joined."""
    blocks: list[tuple[float, list[int]]] = []
    for index in sorted(range(len(heights)), key=lambda i: (heights[i], -i)):
        blocks.append((heights[index], [index]))
        while len(blocks) > 1 and _top(blocks[-2], gap) + gap > _bottom(blocks[-1], gap):
            (low, lower), (high, higher) = blocks[-2:]
            middle = (low * len(lower) + high * len(higher)) / (len(lower) + len(higher))
            blocks[-2:] = [(middle, lower + higher)]
    placed = list(heights)
    for block in blocks:
        bottom = max(_bottom(block, gap), 0.0)
        for place, index in enumerate(block[1]):
            placed[index] = bottom + place * gap
    return placed


def _bottom(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] - gap * (len(block[1]) - 1) / 2


def _top(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] + gap * (len(block[1]) - 1) / 2


def short(name: str) -> str:
    """A name that fits beside a figure."""
    name = clean(name)
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"
