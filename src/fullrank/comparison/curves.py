"""Curves of runs: what they learned, how fast, and the plots that show them, in bands over seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fullrank.comparison.compare import Comparison
from fullrank.comparison.measures import BLEU
from fullrank.comparison.rows import Row
from fullrank.comparison.runs import TRANSLATION, Run, number
from fullrank.records import Lines, Record

_POINTS = 200  # more cannot be told apart at the width of a figure
Reader = Callable[[Mapping[str, Any]], float | None]  # a value of a line of metrics.jsonl
_TRAINING = (
    ("nll", "Training loss", "nats per token"),
    ("lr", "Learning rate", "learning rate"),
    ("tokens_per_second", "Speed", "tokens per second"),
)
_CURVE = Lines(
    "x",
    series=("row",),
    band="seed",
    subtitle="Over several seeds the mean, in a band of ± one standard deviation.",
    x_title="training tokens",
)


def find_curves(compared: Comparison) -> Iterator[tuple[Lines, list[Record]]]:
    """Plots with their records: validation figure (of translations BLEU and loss), training loss, learning rate, speed."""
    rows = compared.all_rows
    measure = compared.measure
    unit = measure.logged_unit
    validation: dict[str, tuple[str, Reader]] = {unit: (unit, measure.read_logged)}
    if rows[0].first.task == TRANSLATION:
        validation = {"BLEU": ("BLEU", BLEU.read_logged), "loss": ("nats per target token", _select("nll"))}
    for name, (unit, read) in validation.items():
        records = _read_curves(rows, "valid", read)
        values = [record.value or 0.0 for record in records]
        largest = max(values, default=0.0)
        smallest = min(values, default=0.0)
        is_wide = "perplexity" in unit and largest > 4 * smallest > 0
        scale: Literal["linear", "log"] = "log" if is_wide else "linear"
        if records:
            plot = dataclasses.replace(_CURVE, title=f"Validation {name}", y_title=unit, y_scale=scale)
            yield plot, records
    for key, title, unit in _TRAINING:
        records = _read_curves(rows, "train", _select(key))
        if records:
            plot = dataclasses.replace(_CURVE, title=title, y_title=unit, from_zero=key != "nll")
            yield plot, records


def _select(key: str) -> Reader:
    return lambda line: number(line.get(key))


def _read_curves(rows: Sequence[Row], split: str, read: Reader) -> list[Record]:
    """Values of the lines of a split over training tokens; of many lines the means of neighbours."""
    records = []
    for row in rows:
        for run in row.runs:
            seed = str(run.folder) if run.seed is None else run.seed
            labels = {"row": row.curve_name, "seed": seed}
            points = np.array(_read_points(run, split, read))
            if len(points) > 1:
                blocks = np.array_split(points, min(len(points), _POINTS))
                for block in blocks:
                    x, y = block.mean(axis=0)
                    records.append(Record({**labels, "x": x}, "value", y))
    return records


def _read_points(run: Run, split: str, read: Reader) -> list[tuple[float, float]]:
    """Training tokens and values, in rising order, one value for each place: the last."""
    points = {}
    tokens_per_step = _count_tokens_per_step(run)
    for line in (*run.timing, *run.metrics):
        step = number(line.get("step"))
        value = read(line)
        if line.get("split", "train") != split:
            continue
        if step is not None and value is not None:
            points[step * tokens_per_step] = value
    return sorted(points.items())


def _count_tokens_per_step(run: Run) -> float:
    """Mean over the training lines so far; 1 without any."""
    counts = []
    for line in run.metrics:
        if line.get("split") == "train":
            step = number(line.get("step"))
            tokens = number(line.get("tokens"))
            if step and tokens:
                counts.append((step, tokens))
    last_step, all_tokens = max(counts, default=(1.0, 1.0))
    return all_tokens / last_step
