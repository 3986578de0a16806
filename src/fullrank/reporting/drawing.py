"""Geometry of the figures of a page: curves over training, and the scores of single seeds. `templates/macros.html` draws it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fullrank.reporting import format
from fullrank.reporting.curves import Curve, Series
from fullrank.reporting.format import Stat

COLOURS = 8  # of the palette; more rows take them again
WIDTH, NARROW, HEIGHT = 430, 370, 280  # user units; the page scales a drawing to its column
_LEFT, _TOP, _BOTTOM = 50, 28, 40
_NAMES = 108  # space at the right of curves for the names of the rows
_NAME_LENGTH = 14


class Tick(NamedTuple):
    """A place on an axis with its label; `grid`: with a thin line."""

    at: float
    text: str


@dataclass(frozen=True)
class Stroke:
    """A line through points (x, y) in the colour of a row; `dashes` as in SVG."""

    slot: int
    points: Sequence[tuple[float, float]]
    width: float
    opacity: float = 1.0
    dashes: str = ""

    @property
    def path(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


class Label(NamedTuple):
    """A text in the colour of a row."""

    slot: int
    x: float
    y: float
    text: str


@dataclass
class Drawing:
    """A figure in user units: plot area, axes and everything in it. `alt` says the same in words."""

    heading: str
    notes: list[str]
    alt: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_label: str
    y_label: str = ""
    x_ticks: list[Tick] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    upright_grid: bool = False
    strokes: list[Stroke] = field(default_factory=list)
    dots: list[Label] = field(default_factory=list)
    dot_size: float = 8.5
    labels: list[Label] = field(default_factory=list)
    names: list[Label] = field(default_factory=list)


def curves(
    heading: str,
    note: str,
    series: Sequence[Series],
    y_label: str,
    x_label: str,
    *,
    log: bool = False,
    from_zero: bool = False,
    width: int = WIDTH,
    show: Callable[[float], str] = format.short_count,
) -> Drawing | None:
    """Curves of several rows: thin lines for single seeds, a thick one for their mean, names at the ends."""
    if not series:
        return None
    ends = ", ".join(f"{one.name} {one.last:.4g}" for one in series)
    alt = f"{heading} over {x_label}. Last values: {ends}."
    drawing = Drawing(
        heading, [note], alt, width, HEIGHT, _LEFT, width - _NAMES, _TOP, HEIGHT - _BOTTOM, x_label, y_label
    )
    drawn = [curve for one in series for curve in one.curves]
    x_low, x_high = min(c.x[0] for c in drawn), max(c.x[-1] for c in drawn)
    y_low, y_high = min(c.y.min() for c in drawn), max(c.y.max() for c in drawn)
    y_low = 0.0 if from_zero else y_low
    if log:
        y_low, y_high = math.log10(y_low), math.log10(y_high)
    margin = 0.04 * (y_high - y_low) or 0.05 * abs(y_high) or 1.0
    y_low, y_high = y_low - (0 if from_zero else margin), y_high + margin

    def x_at(x: float) -> float:
        return _LEFT + 4 + (drawing.right - _LEFT - 4) * (x - x_low) / (x_high - x_low or 1.0)

    def y_at(y: float) -> float:
        value = math.log10(y) if log else y
        return drawing.bottom - (drawing.bottom - _TOP) * (value - y_low) / (y_high - y_low)

    drawing.x_ticks = [Tick(x_at(x), format.short_count(x)) for x in ticks(x_low, x_high, 6)]
    y_values = log_ticks(10**y_low, 10**y_high) if log else ticks(y_low, y_high, 6)
    drawing.y_ticks = [Tick(y_at(y), show(y)) for y in y_values]
    for one in series:
        drawing.strokes += _strokes(one, x_at, y_at)
    if len(series) <= COLOURS:
        heights = _spread_apart([y_at(one.last) for one in series], 15, drawing.bottom)
        for one, height in zip(series, heights, strict=True):
            x, y = x_at(float(np.mean([c.x[-1] for c in one.curves]))), y_at(one.last)
            if x > drawing.left + 0.85 * (drawing.right - drawing.left):
                leader = [(x + 2, y), (drawing.right + 8, height), (drawing.right + 14, height)]
                drawing.strokes.append(Stroke(one.slot, leader, 0.9, 0.6))
            drawing.names.append(Label(one.slot, drawing.right + 18, height, _short(one.name)))
    return drawing


def _strokes(series: Series, x_at: Callable[[float], float], y_at: Callable[[float], float]) -> list[Stroke]:
    dashes = "5 3" if not series.finished else "12 3" if series.slot >= COLOURS else ""
    several, mean = len(series.curves) > 1, series.mean

    def stroke(curve: Curve, width: float, opacity: float) -> Stroke:
        points = [(x_at(x), y_at(y)) for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True)]
        return Stroke(series.slot, points, width, opacity, dashes)

    strokes = [stroke(c, 1.1 if several else 2.0, 0.45 if several and mean else 1.0) for c in series.curves]
    return [*strokes, stroke(mean, 2.2, 1.0)] if several and mean is not None else strokes


@dataclass(frozen=True)
class Strip:
    """The figures of one row for `strips`: a value for each seed and their statistic (None: not measured)."""

    name: str
    slot: int
    values: Sequence[float]
    stat: Stat | None


def strips(heading: str, note: str, rows: Sequence[Strip], x_label: str, alt: str) -> Drawing:
    """Figures of every row: each seed a dot; beneath them a bar for the mean and a line for mean ± deviation."""
    left, right = 132.0, WIDTH - 18.0
    spreads = [_spread(row.stat) for row in rows if row.stat is not None]
    ends = [
        end for row, spread in zip([r for r in rows if r.stat], spreads, strict=True) for end in (*row.values, *spread)
    ]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = low - margin, high + margin
    several = max((len(row.values) for row in rows), default=1) > 1

    def x_at(x: float) -> float:
        return left + (right - left) * (x - low) / (high - low)

    size = 8.5 if max((len(row.values) for row in rows), default=1) <= 10 else 6.0
    lanes = [swarm([x_at(value) for value in row.values], size) for row in rows]
    deepest = max((abs(lane) for row in lanes for lane in row), default=0)
    dots = (2 * deepest + 1) * (size + 1.5)
    step = dots + (26 if several else 14)
    height = 44 + step * len(rows)
    drawing = Drawing(heading, [note], alt, WIDTH, height, left, right, 8, height - 36, x_label, upright_grid=True)
    drawing.dot_size = size
    drawing.x_ticks = [Tick(x_at(x), f"{x:,.6g}") for x in ticks(low, high, 6)]
    for index, (row, lane) in enumerate(zip(rows, lanes, strict=True)):
        middle = 8 + step * index + 4 + dots / 2
        for line, part in enumerate(lines := [_short(part, 20) for part in row.name.split(" · ")]):
            drawing.names.append(Label(row.slot, left - 8, middle + 14 * (line - (len(lines) - 1) / 2), part))
        if row.stat is None:
            drawing.labels.append(Label(row.slot, left + 4, middle, "not measured"))
            continue
        drawing.dots += [
            Label(row.slot, x_at(value), middle - (size + 1.5) * place, "")
            for value, place in zip(row.values, lane, strict=True)
        ]
        if row.stat.deviation is not None:
            under = middle + dots / 2 + 9
            start, end = map(x_at, _spread(row.stat))
            mean = x_at(row.stat.mean)
            drawing.strokes.append(Stroke(row.slot, [(start, under), (end, under)], 2, 0.6))
            drawing.strokes.append(Stroke(row.slot, [(mean, under - 6), (mean, under + 6)], 3))
    return drawing


def _spread(stat: Stat) -> tuple[float, float]:
    reach = stat.deviation or 0.0
    return stat.mean - reach, stat.mean + reach


def swarm(places: Sequence[float], size: float) -> list[int]:
    """A lane for each dot, 0 in the middle, then above and below: dots of one lane are at least `size` apart."""
    ends: dict[int, float] = {}
    lanes = [0] * len(places)
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        lane = 0
        while places[index] - ends.get(lane, float("-inf")) < size:
            lane = -lane if lane > 0 else 1 - lane
        ends[lane], lanes[index] = places[index], lane
    return lanes


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values from low to high: 1, 2, 2.5 or 5 times a power of ten apart, `most` intervals at most."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [
        round(index * step, 12) for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high; powers of ten alone where they span 2.5 decades."""
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def _spread_apart(heights: Sequence[float], gap: float, lowest: float) -> list[float]:
    """The heights moved as little as needed to be `gap` apart, kept in order: blocks that overlap are joined."""
    blocks: list[tuple[float, list[int]]] = []  # middle and members

    def top(block: tuple[float, list[int]]) -> float:
        return block[0] - gap * (len(block[1]) - 1) / 2

    for index in sorted(range(len(heights)), key=lambda index: heights[index]):
        blocks.append((heights[index], [index]))
        while len(blocks) > 1 and top(blocks[-2]) + gap * len(blocks[-2][1]) > top(blocks[-1]):
            (one, first), (other, second) = blocks[-2:]
            middle = (one * len(first) + other * len(second)) / (len(first) + len(second))
            blocks[-2:] = [(middle, first + second)]
    moved = list(heights)
    for block in blocks:
        start = min(top(block), lowest - gap * (len(block[1]) - 1))
        for place, index in enumerate(block[1]):
            moved[index] = start + place * gap
    return moved


def _short(name: str, length: int = _NAME_LENGTH) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
