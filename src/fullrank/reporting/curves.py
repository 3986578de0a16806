"""Curves from the lines of a run: one value over another, smoothed and thinned for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fullrank.reporting.runs import RunRecord, number

POINTS = 260  # more cannot be told apart at the width of a figure
SMOOTH_FROM = 100  # curves with fewer lines are drawn as they are
Reader = Callable[[Mapping[str, Any]], float | None]  # a value of a line of metrics.jsonl


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of one run."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Series:
    """Curves of the seeds of one row. `slot` is its colour, `finished` False draws it dashed."""

    name: str
    slot: int
    curves: tuple[Curve, ...]
    finished: bool = True

    @property
    def mean(self) -> Curve | None:
        """Mean over the seeds where all of them have a point; None if they share fewer than two."""
        first, *others = self.curves
        shared = first.x
        for curve in others:
            shared = np.intersect1d(shared, curve.x)
        if len(shared) < 2:
            return None
        return Curve(shared, np.mean([curve.y[np.isin(curve.x, shared)] for curve in self.curves], axis=0))

    @property
    def last(self) -> float:
        """Mean of the curves' last values."""
        return float(np.mean([curve.y[-1] for curve in self.curves]))


def validation(record: RunRecord, read: Reader, steps_per_epoch: float | None = None) -> Curve | None:
    """Values of the validation lines over training tokens; over epochs where their length is given."""
    lines = [line for line in record.metrics if line.get("split") == "valid"]
    if steps_per_epoch is None:
        tokens = _tokens_by_step(record)
        return _curve((tokens(line), read(line)) for line in lines)
    steps = (number(line.get("step")) for line in lines)
    return _curve(
        (None if step is None else step / steps_per_epoch, read(line)) for step, line in zip(steps, lines, strict=True)
    )


def steps_per_epoch(record: RunRecord) -> float | None:
    """Steps in an epoch of a finished run; None if it does not say."""
    steps, epochs = number(record.of("steps")), number(record.of("epochs"))
    return steps / epochs if steps and epochs and epochs > 0 else None


def training_loss(record: RunRecord) -> Curve | None:
    """Training loss in nats per token over training tokens, smoothed."""
    tokens = _tokens_by_step(record)
    lines = (line for line in record.metrics if line.get("split") == "train")
    return _thinned(_smoothed(_curve((tokens(line), number(line.get("nll"))) for line in lines)))


def learning_rate(record: RunRecord) -> Curve | None:
    """Learning rate over training tokens."""
    tokens = _tokens_by_step(record)
    return _thinned(_curve((tokens(line), number(line.get("lr"))) for line in record.metrics if "lr" in line))


def speed(record: RunRecord) -> Curve | None:
    """Tokens per second over minutes trained, smoothed. A clock that starts anew after a resume is carried on."""
    points = []
    before = last = 0.0
    for line in record.timing:
        if (seconds := number(line.get("seconds"))) is not None:
            before += last if seconds < last else 0.0
            last = seconds
            points.append(((before + seconds) / 60, number(line.get("tokens_per_second"))))
    return _thinned(_smoothed(_curve(points)))


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
    if not counted or any(later <= earlier for earlier, later in pairwise(counted)):
        steps, seen = number(record.of("steps")), number(record.of("tokens_seen"))
        known = {steps: seen} if steps and seen else {1.0: 1.0}
    at_steps = np.array([0.0, *sorted(known)])
    at_tokens = np.array([0.0, *(known[step] for step in sorted(known))])

    def tokens_at(line: Mapping[str, Any]) -> float | None:
        step = number(line.get("step"))
        if step is not None and step > at_steps[-1]:
            return float(at_tokens[-1] * step / at_steps[-1])
        return None if step is None else float(np.interp(step, at_steps, at_tokens))

    return tokens_at


def _smoothed(curve: Curve | None) -> Curve | None:
    if curve is None or (width := window(len(curve.y))) == 1:
        return curve
    total = np.concatenate([[0.0], np.cumsum(curve.y)])
    index = np.arange(len(curve.y))
    before = np.minimum(index, width // 2)  # narrower at the start, where a curve is steep, so still centred there
    after = np.minimum(before, len(curve.y) - 1 - index)  # one-sided at the end, where it is flat
    return Curve(curve.x, (total[index + after + 1] - total[index - before]) / (before + after + 1))


def _thinned(curve: Curve | None) -> Curve | None:
    if curve is None or len(curve.x) <= POINTS:
        return curve
    kept = np.unique(np.linspace(0, len(curve.x) - 1, POINTS).round().astype(int))
    return Curve(curve.x[kept], curve.y[kept])


def merged(series: Sequence[Series]) -> list[Series]:
    """One series for all where every curve is the same, as learning rates often are."""
    drawn = [curve for one in series for curve in one.curves]
    same = len(series) > 1 and all(
        np.array_equal(c.x, drawn[0].x) and np.array_equal(c.y, drawn[0].y) for c in drawn[1:]
    )
    return [Series("all rows", 0, (drawn[0],))] if same else list(series)


def second_half(series: Sequence[Series]) -> list[Series]:
    """The series from half of the longest x on; those without two points there are left out."""
    start = 0.5 * max((float(curve.x[-1]) for one in series for curve in one.curves), default=0.0)
    halves = []
    for one in series:
        cut = [Curve(c.x[c.x >= start], c.y[c.x >= start]) for c in one.curves]
        if long := tuple(curve for curve in cut if len(curve.x) > 1):
            halves.append(Series(one.name, one.slot, long, one.finished))
    return halves
