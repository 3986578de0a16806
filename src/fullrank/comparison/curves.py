"""Curves of a run as records: label `x`, and the row and seed that they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fullrank.comparison.rows import Row
from fullrank.comparison.runs import Run, number
from fullrank.records import Record

_POINTS = 200  # more cannot be told apart at the width of a figure
Reader = Callable[[Mapping[str, Any]], float | None]  # a value of a line of metrics.jsonl


def read_validation(rows: Sequence[Row], read: Reader, measure: str, steps_per_epoch: float | None) -> list[Record]:
    """Values of the validation lines over training tokens; over epochs where their length is given."""
    records = []
    for row, run in _iterate_runs(rows):
        lines = [line for line in run.metrics if line.get("split") == "valid"]
        records += _to_records(row, run, _read_points(run, lines, read, steps_per_epoch), measure)
    return records


def read_training(rows: Sequence[Row], key: str, smooth: bool) -> list[Record]:
    """A value of the training lines over training tokens, with no more points than can be told apart."""
    records = []
    for row, run in _iterate_runs(rows):
        lines = [line for line in (*run.timing, *run.metrics) if key in line and line.get("split") != "valid"]
        points = _read_points(run, lines, lambda line: number(line.get(key)), None)
        y = np.array([value for _, value in points])
        if smooth:
            y = _smooth(y)
        chosen = {round(place) for place in np.linspace(0, len(points) - 1, _POINTS)} if points else set()
        records += _to_records(row, run, [(points[index][0], float(y[index])) for index in sorted(chosen)], key)
    return records


def _iterate_runs(rows: Sequence[Row]) -> Iterator[tuple[Row, Run]]:
    for row in rows:
        for run in row.runs:
            yield row, run


def _read_points(
    run: Run, lines: Sequence[Mapping[str, Any]], read: Reader, steps_per_epoch: float | None
) -> list[tuple[float, float]]:
    """Points whose both values exist, in rising x, one for each x: the last counts."""
    steps, tokens = _count_tokens(run)
    points = {}
    for line in lines:
        step, value = number(line.get("step")), read(line)
        if step is not None and value is not None:
            x = step / steps_per_epoch if steps_per_epoch else _interpolate(step, steps, tokens)
            points[x] = value
    return sorted(points.items())


def _count_tokens(run: Run) -> tuple[list[float], list[float]]:
    """Steps and training tokens at them, as training lines say; without any, steps."""
    counted = {}
    for line in run.metrics:
        step, tokens = number(line.get("step")), number(line.get("tokens"))
        if line.get("split") == "train" and step and tokens is not None:
            counted[step] = tokens
    pairs = sorted(counted.items()) or [(1.0, 1.0)]
    return [0.0, *(step for step, _ in pairs)], [0.0, *(tokens for _, tokens in pairs)]


def _interpolate(step: float, steps: Sequence[float], tokens: Sequence[float]) -> float:
    if step > steps[-1]:
        return tokens[-1] * step / steps[-1]
    return float(np.interp(step, steps, tokens))


def _smooth(y: np.ndarray) -> np.ndarray:
    """Centred moving average over about one line in a hundred; narrower at both ends."""
    half = len(y) // 200
    return np.array([y[max(0, i - half) : i + half + 1].mean() for i in range(len(y))])


def _to_records(row: Row, run: Run, points: Sequence[tuple[float, float]], measure: str) -> list[Record]:
    if len(points) < 2:
        return []
    labels = {"row": row.curve_name, "seed": str(run.folder) if run.seed is None else run.seed}
    return [Record({**labels, "x": x}, measure, value) for x, value in points]


def count_steps_per_epoch(runs: Sequence[Run]) -> float | None:
    """Steps in an epoch of the first run that says it; runs of the same text have as many."""
    for run in runs:
        steps, epochs = number(run.get("steps")), number(run.get("epochs"))
        if steps and epochs and epochs > 0:
            return steps / epochs
    return None


def select_second_half(records: Sequence[Record]) -> list[Record]:
    """The points from half of the longest x on; none where that is all there is."""
    start = 0.5 * max((record.labels["x"] for record in records), default=0.0)  # type: ignore[type-var, operator]
    later = [record for record in records if record.labels["x"] >= start]  # type: ignore[operator]
    return later if len(later) < len(records) else []
