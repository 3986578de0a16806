"""Figures of a page: curves read from the lines of runs, and the geometry that `templates/macros.html` draws as SVG."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fullrank.reporting.figures import short_count, tick_words
from fullrank.reporting.runs import RunRecord, number

POINTS = 260  # more cannot be told apart at the width of a figure
POINTED = 24  # of them show their values
SMOOTH_FROM = 100  # curves with fewer lines are drawn as they are
COLOURS = 8  # of the palette; more rows take them again
WIDTH, NARROW, HEIGHT = 430, 370, 280  # user units; the page scales a drawing to its column
_LEFT, _TOP, _BOTTOM = 50, 28, 40
_NAMES = 108  # space at the right of curves for the names of the rows
Reader = Callable[[Mapping[str, Any]], float | None]  # a value of a line of metrics.jsonl


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of one run."""

    x: np.ndarray
    y: np.ndarray

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.x.tolist(), self.y.tolist(), strict=True))

    def thinned(self, most: int) -> Curve:
        """At most so many points, evenly chosen."""
        kept = np.unique(np.linspace(0, len(self.x) - 1, most).round().astype(int))
        return Curve(self.x[kept], self.y[kept])


@dataclass(frozen=True)
class Series:
    """Curves of the seeds of one row. `slot` is its colour, `finished` False draws it dashed."""

    name: str
    slot: int
    curves: tuple[Curve, ...]
    finished: bool = True

    @functools.cached_property
    def mean(self) -> Curve | None:
        """Mean over the seeds where all of them have a point; None if they share fewer than two."""
        return self._over_seeds(np.mean)

    @functools.cached_property
    def band(self) -> tuple[Curve, Curve] | None:
        """Mean - and + sample standard deviation over the seeds; None for a single seed, or without a mean."""
        deviation = self._over_seeds(functools.partial(np.std, ddof=1)) if len(self.curves) > 1 else None
        if self.mean is None or deviation is None:
            return None
        return Curve(self.mean.x, self.mean.y - deviation.y), Curve(self.mean.x, self.mean.y + deviation.y)

    def _over_seeds(self, of: Callable[..., Any]) -> Curve | None:
        shared = functools.reduce(np.intersect1d, (curve.x for curve in self.curves))
        if len(shared) < 2:
            return None
        return Curve(shared, of([curve.y[np.isin(curve.x, shared)] for curve in self.curves], axis=0))

    @property
    def lines(self) -> Sequence[Curve]:
        """The curves to draw: the mean over seeds, or every seed where they share no points."""
        return self.curves if self.mean is None else (self.mean,)

    @property
    def last(self) -> float:
        """Mean of the curves' last values."""
        return float(np.mean([curve.y[-1] for curve in self.lines]))


# -- curves from the lines of a run ----------------------------------------------------------------------------------


def validation(record: RunRecord, read: Reader, steps_per_epoch: float | None = None) -> Curve | None:
    """Values of the validation lines over training tokens; over epochs where their length is given."""

    def epochs(line: Mapping[str, Any]) -> float | None:
        step = number(line.get("step"))
        return None if step is None or steps_per_epoch is None else step / steps_per_epoch

    x = _tokens_by_step(record) if steps_per_epoch is None else epochs
    return _curve((x(line), read(line)) for line in record.metrics if line.get("split") == "valid")


def steps_per_epoch(record: RunRecord) -> float | None:
    """Steps in an epoch of a finished run; None if it does not say."""
    steps, epochs = number(record.get("steps")), number(record.get("epochs"))
    return steps / epochs if steps and epochs and epochs > 0 else None


def training(record: RunRecord, key: str, *, smooth: bool = False) -> Curve | None:
    """A value of the training lines over training tokens, with no more points than can be told apart."""
    tokens = _tokens_by_step(record)
    lines = [*record.timing, *(line for line in record.metrics if line.get("split") == "train")]
    curve = _curve((tokens(line), number(line.get(key))) for line in lines if key in line)
    return curve and (_smoothed(curve) if smooth else curve).thinned(POINTS)


def spectrum(record: RunRecord) -> Curve | None:
    """Share of all singular values of attention weights in the k largest, after mixing; mean over heads and layers.

    As `fullrank analyze spectrum` has left it in the run's folder; None if it has not.
    """
    if record.spectrum is None:
        return None
    try:
        layers = record.spectrum["layers"]
        shares = np.mean([np.mean(layer["after"]["curves"], axis=0) for layer in layers], axis=0)
        return Curve(np.arange(1, len(shares) + 1) / len(shares), shares)
    except (ValueError, TypeError, KeyError):  # layers of other sizes, or without curves
        return None


def window(lines: int) -> int:
    """Lines in the centred moving average of a curve: about one in a hundred, always odd, 1 for short curves."""
    return 1 if lines < SMOOTH_FROM else 2 * (lines // 200) + 1


def _curve(points: Iterable[tuple[float | None, float | None]]) -> Curve | None:
    """Points whose both values exist, one for each x (the last counts), in rising x; None below two points."""
    known = {x: y for x, y in points if x is not None and y is not None}
    if len(known) < 2:
        return None
    x = sorted(known)
    return Curve(np.array(x), np.array([known[value] for value in x]))


def _tokens_by_step(record: RunRecord) -> Reader:
    """Training tokens at a line: read from training lines, in proportion to the step in between and beyond."""
    known: dict[float, float] = {}
    for line in record.metrics:
        step, tokens = number(line.get("step")), number(line.get("tokens"))
        if line.get("split") == "train" and step and tokens is not None:
            known[step] = tokens
    counted = [known[step] for step in sorted(known)]
    if not counted or min(np.diff(counted), default=1) <= 0:
        steps, seen = number(record.get("steps")), number(record.get("tokens_seen"))
        known = {steps: seen} if steps and seen else {1.0: 1.0}
    at_steps, at_tokens = np.array([(0.0, 0.0), *sorted(known.items())]).T

    def tokens_at(line: Mapping[str, Any]) -> float | None:
        step = number(line.get("step"))
        if step is not None and step > at_steps[-1]:
            return float(at_tokens[-1] * step / at_steps[-1])
        return None if step is None else float(np.interp(step, at_steps, at_tokens))

    return tokens_at


def _smoothed(curve: Curve) -> Curve:
    if (width := window(len(curve.y))) == 1:
        return curve
    total = np.concatenate([[0.0], np.cumsum(curve.y)])
    index = np.arange(len(curve.y))
    before = np.minimum(index, width // 2)  # narrower at the start, where a curve is steep, so still centred there
    after = np.minimum(before, len(curve.y) - 1 - index)  # one-sided at the end, where it is flat
    return Curve(curve.x, (total[index + after + 1] - total[index - before]) / (before + after + 1))


def merged(series: Sequence[Series]) -> list[Series]:
    """One series for all where every curve is the same, as learning rates often are."""
    drawn = [curve for one in series for curve in one.curves]
    same = len(series) > 1 and all(
        np.array_equal(c.x, drawn[0].x) and np.array_equal(c.y, drawn[0].y) for c in drawn[1:]
    )
    return [Series("all rows", 0, (drawn[0],))] if same else list(series)


def second_half(series: Sequence[Series]) -> list[Series]:
    """The series from half of the longest x on, without those of fewer than two points there; none if that is all there is."""
    drawn = [curve for one in series for curve in one.curves]
    start = 0.5 * max((float(curve.x[-1]) for curve in drawn), default=0.0)
    if all(curve.x[0] >= start for curve in drawn):
        return []
    halves = []
    for one in series:
        cut = [Curve(c.x[c.x >= start], c.y[c.x >= start]) for c in one.curves]
        if long := tuple(curve for curve in cut if len(curve.x) > 1):
            halves.append(Series(one.name, one.slot, long, one.finished))
    return halves


# -- geometry ---------------------------------------------------------------------------------------------------------


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
    """A text in the colour of a row, or a dot whose text is shown where the pointer is on it."""

    slot: int
    x: float
    y: float
    text: str


@dataclass
class Drawing:
    """A figure in user units: plot area, axes and everything in it. `alt` says the same in words.

    `points` are unseen dots along the curves, for their text.
    """

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
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    upright_grid: bool = False
    strokes: list[Stroke] = field(default_factory=list)
    bands: list[Stroke] = field(default_factory=list)
    dots: list[Label] = field(default_factory=list)
    points: list[Label] = field(default_factory=list)
    dot_size: float = 8.5
    labels: list[Label] = field(default_factory=list)
    names: list[Label] = field(default_factory=list)


def draw_curves(
    heading: str,
    note: str,
    series: Sequence[Series],
    y_label: str,
    x_label: str,
    *,
    log: bool = False,
    from_zero: bool = False,
    width: int = WIDTH,
) -> list[Drawing]:
    """Curves of several rows: their means over seeds in bands of mean ± standard deviation, names at the ends.

    Seeds without common points are drawn singly. Empty without any curve.
    """
    if not series:
        return []
    ends = ", ".join(f"{one.name} {one.last:.4g}" for one in series)
    alt = f"{heading} over {x_label}. Last values: {ends}."
    right, bottom = width - _NAMES, HEIGHT - _BOTTOM
    drawing = Drawing(heading, [note], alt, width, HEIGHT, _LEFT, right, _TOP, bottom, x_label, y_label)
    drawn = [curve for one in series for curve in one.lines]
    bands = [curve for one in series for curve in one.band or ()]
    x_low, x_high = min(c.x[0] for c in drawn), max(c.x[-1] for c in drawn)
    y_low, y_high = min(c.y.min() for c in (*drawn, *bands)), max(c.y.max() for c in (*drawn, *bands))
    if log and y_low <= 0:  # a band wider than its mean
        y_low = min(c.y.min() for c in drawn)
    y_low = lowest = 0.0 if from_zero else float(y_low)
    if log:
        y_low, y_high = math.log10(y_low), math.log10(y_high)
    margin = 0.04 * (y_high - y_low) or 0.05 * abs(y_high) or 1.0
    y_low, y_high = y_low - (0 if from_zero else margin), y_high + margin

    def x_at(x: float) -> float:
        return _LEFT + 4 + (right - _LEFT - 4) * (x - x_low) / (x_high - x_low or 1.0)

    def y_at(y: float) -> float:
        return bottom - (bottom - _TOP) * ((math.log10(y) if log else y) - y_low) / (y_high - y_low)

    def stroke(one: Series, curve: Curve, width: float) -> Stroke:
        dashes = "5 3" if not one.finished else "12 3" if one.slot >= COLOURS else ""
        points = [(x_at(x), y_at(max(y, lowest))) for x, y in curve.points]
        return Stroke(one.slot, points, width, dashes=dashes)

    y_values = log_ticks(10**y_low, 10**y_high) if log else ticks(y_low, y_high, 6)
    drawing.x_ticks = _ticks(ticks(x_low, x_high, 6), x_at)
    drawing.y_ticks = _ticks(y_values, y_at)
    for one in series:
        drawing.strokes += [stroke(one, curve, 1.1 if len(one.lines) > 1 else 2.2) for curve in one.lines]
        if one.band is not None:
            low, high = (stroke(one, curve, 0).points for curve in one.band)
            drawing.bands.append(Stroke(one.slot, [*low, *reversed(high)], 0))
        for x, y in one.lines[0].thinned(POINTED).points:
            text = f"{one.name}: {y_label} {y:,.5g} at {short_count(x)} {x_label}"
            drawing.points.append(Label(one.slot, x_at(x), y_at(y), text))
    if len(series) <= COLOURS:
        heights = spread_apart([y_at(one.last) for one in series], 15, bottom)
        for one, height in zip(series, heights, strict=True):
            x, y = x_at(float(np.mean([c.x[-1] for c in one.lines]))), y_at(one.last)
            if x > _LEFT + 0.85 * (right - _LEFT):
                leader = [(x + 2, y), (right + 8, height), (right + 14, height)]
                drawing.strokes.append(Stroke(one.slot, leader, 0.9, 0.6))
            drawing.names.append(Label(one.slot, right + 18, height, _short(one.name, 14)))
    return [drawing]


def draw_strips(heading: str, rows: Sequence[tuple[str, int, Sequence[float]]], x_label: str, alt: str) -> Drawing:
    """Figures of every row: each seed a dot; beneath them a bar for the mean and a line for mean ± deviation.

    rows: name, number of the colour, and a value for each seed (none: not measured).
    """
    left, right, top = 132.0, WIDTH - 18.0, 8
    ends = [end for _, _, values in rows for end in (*values, *_reach(values))]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = low - margin, high + margin

    def x_at(x: float) -> float:
        return left + (right - left) * (x - low) / (high - low)

    most = max((len(values) for _, _, values in rows), default=1)
    size = 8.5 if most <= 10 else 6.0
    lanes = [swarm([x_at(value) for value in values], size) for _, _, values in rows]
    deepest = max((abs(lane) for row in lanes for lane in row), default=0)
    dots = (2 * deepest + 1) * (size + 1.5)
    step = dots + (26 if most > 1 else 14)
    height = 44 + step * len(rows)
    deviations = "; beneath, the bar is the mean, the line mean ± standard deviation" if most > 1 else ""
    note = f"A dot is one run{deviations}. The axis does not start at zero."
    drawing = Drawing(heading, [note], alt, WIDTH, height, left, right, top, height - 36, x_label, upright_grid=True)
    drawing.dot_size = size
    drawing.x_ticks = _ticks(ticks(low, high, 6), x_at)
    for index, ((name, slot, values), lane) in enumerate(zip(rows, lanes, strict=True)):
        middle = top + step * index + 4 + dots / 2
        for line, part in enumerate(lines := name.split(" · ")):
            y = middle + 14 * (line - (len(lines) - 1) / 2)
            drawing.names.append(Label(slot, left - 8, y, _short(part, 20)))
        if not values:
            drawing.labels.append(Label(slot, left + 4, middle, "not measured"))
        drawing.dots += [
            Label(slot, x_at(value), middle - (size + 1.5) * place, f"{name}: {value:,.6g}")
            for value, place in zip(values, lane, strict=True)
        ]
        if len(values) > 1:
            under, mean = middle + dots / 2 + 9, x_at(statistics.fmean(values))
            drawing.strokes += [
                Stroke(slot, [(x_at(end), under) for end in _reach(values)], 2, 0.6),
                Stroke(slot, [(mean, under - 6), (mean, under + 6)], 3),
            ]
    return drawing


def _reach(values: Sequence[float]) -> tuple[float, ...]:
    """Mean ± standard deviation; empty for a single value."""
    if len(values) < 2:
        return ()
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return mean - deviation, mean + deviation


def swarm(positions: Sequence[float], size: float) -> list[int]:
    """A lane for each dot, 0 in the middle, then above and below: dots of one lane are at least `size` apart."""
    ends: dict[int, float] = {}
    lanes = [0] * len(positions)
    for index in sorted(range(len(positions)), key=lambda index: positions[index]):
        lane = 0
        while positions[index] - ends.get(lane, float("-inf")) < size:
            lane = -lane if lane > 0 else 1 - lane
        ends[lane], lanes[index] = positions[index], lane
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


def _ticks(values: Sequence[float], place: Callable[[float], float]) -> list[tuple[float, str]]:
    return [*zip(map(place, values), tick_words(values), strict=True)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high; powers of ten alone where they span 2.5 decades."""
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def spread_apart(heights: Sequence[float], gap: float, lowest: float) -> list[float]:
    """The heights moved to be `gap` apart, kept in order: down where they crowd, and up again from the lowest."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    moved = [heights[index] for index in order]
    for index in range(1, len(moved)):
        moved[index] = max(moved[index], moved[index - 1] + gap)
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], moved[index + 1] - gap if index + 1 < len(moved) else lowest)
    return [moved[order.index(index)] for index in range(len(heights))]


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
