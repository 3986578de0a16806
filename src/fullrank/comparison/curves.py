"""Curves of runs: what they learned, how fast, and the plots that show them, in bands over seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fullrank.comparison.compare import Comparison
from fullrank.comparison.measures import BLEU
from fullrank.comparison.rows import Row
from fullrank.comparison.runs import MASKED_MODELING, TRANSLATION, Run, number
from fullrank.records import Lines, Record

_POINTS = 200  # more cannot be told apart at the width of a figure
Reader = Callable[[Mapping[str, Any]], float | None]  # a value of a line of metrics.jsonl
Drawn = Iterator[tuple[Lines, list[Record]]]
_CURVE = Lines("x", series=("row",), band="seed", x_title="training tokens")


def find_curves(compared: Comparison) -> Drawn:
    """Plots with their records: validation figure (of translations BLEU and loss), training loss, learning rate, speed."""
    rows = [*compared.rows, *compared.unfinished]
    measure = compared.measure
    if compared.task == TRANSLATION:
        yield from _draw_twice("BLEU", "BLEU", read_validation(rows, BLEU.logged_value))
        yield from _draw_twice("loss", "nats per target token", read_validation(rows, lambda line: line.get("nll")))
    else:
        yield from _draw_twice(measure.logged_unit, measure.logged_unit, read_validation(rows, measure.logged_value))
    unit = "nats per masked token" if compared.task == MASKED_MODELING else "nats per token"
    for key, title, y_title in (
        ("nll", "Training loss", unit),
        ("lr", "Learning rate", "learning rate"),
        ("tokens_per_second", "Speed", "tokens per second"),
    ):
        records = read_training(rows, key)
        if records:
            plot = dataclasses.replace(_CURVE, title=title, y_title=y_title, from_zero=key != "nll")
            yield plot, records


def _draw_twice(name: str, unit: str, records: list[Record]) -> Drawn:
    """The whole training, on a logarithmic axis where it falls far, and its second half alone."""
    if not records:
        return
    values = [record.value or 0.0 for record in records]
    is_wide = "perplexity" in unit and max(values) > 4 * min(values) > 0
    note = "Over several seeds the mean, in a band of ± one standard deviation."
    title = f"Validation {name}"
    plot = dataclasses.replace(_CURVE, title=title, subtitle=note, y_title=unit)
    yield dataclasses.replace(plot, y_scale="log" if is_wide else "linear"), records
    places = [float(str(record.labels["x"])) for record in records]
    later = [record for record, x in zip(records, places, strict=True) if x >= max(places) / 2]
    if len(later) < len(records):
        yield dataclasses.replace(plot, title=f"{title}, second half"), later


def read_validation(rows: Sequence[Row], read: Reader) -> list[Record]:
    """Values of the validation lines over training tokens."""
    records = []
    for row in rows:
        for run in row.runs:
            lines = [line for line in run.metrics if line.get("split") == "valid"]
            records += _make_records(row, run, _read_points(run, lines, read))
    return records


def read_training(rows: Sequence[Row], key: str) -> list[Record]:
    """A value of the training lines over training tokens; of many lines the means of neighbours."""
    records = []
    for row in rows:
        for run in row.runs:
            lines = [line for line in (*run.timing, *run.metrics) if line.get("split") != "valid"]
            points = np.array(_read_points(run, lines, lambda line: number(line.get(key))))
            blocks = np.array_split(points, min(len(points), _POINTS) or 1)
            means = [block.mean(axis=0).tolist() for block in blocks if len(block)]
            records += _make_records(row, run, means)
    return records


def _read_points(run: Run, lines: Sequence[Mapping[str, Any]], read: Reader) -> list[tuple[float, float]]:
    """Training tokens and values, in rising order, one value for each place: the last."""
    points = {}
    tokens_per_step = _count_tokens_per_step(run)
    for line in lines:
        step, value = number(line.get("step")), read(line)
        if step is not None and value is not None:
            points[step * tokens_per_step] = value
    return sorted(points.items())


def _count_tokens_per_step(run: Run) -> float:
    """Mean over the training lines so far; 1 without any."""
    trained = [line for line in run.metrics if line.get("split") == "train"]
    counts = [(number(line.get("step")), number(line.get("tokens"))) for line in trained]
    steps, tokens = max(((step, tokens) for step, tokens in counts if step and tokens), default=(1.0, 1.0))
    return tokens / steps


def _make_records(row: Row, run: Run, points: Sequence[Sequence[float]]) -> list[Record]:
    if len(points) < 2:
        return []
    labels = {"row": row.curve_name, "seed": str(run.folder) if run.seed is None else run.seed}
    return [Record({**labels, "x": x}, "value", y) for x, y in points]
