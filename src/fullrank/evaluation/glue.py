"""The metrics of GLUE, as fractions in double precision.

Each takes predictions and labels (n,): class ids, or real numbers for the two correlations of STS-B.
Raises InputError for shapes that differ, no examples, class ids that are not integers and numbers that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from fullrank.config.glue import GlueTask, glue_task
from fullrank.core.errors import InputError, suggest

__all__ = ["METRICS", "accuracy", "f1", "glue_scores", "matthews_correlation", "pearson", "spearman"]


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """The share of predictions that are right."""
    guessed, right = _classes(predictions, labels)
    return float(np.mean(guessed == right))


def f1(predictions: ArrayLike, labels: ArrayLike, positive: int = 1) -> float:
    """Harmonic mean of precision and recall of one class, here that of paraphrases and duplicates.

        F1 = 2 TP / (2 TP + FP + FN)

    0 where the class is neither among the labels nor predicted.
    """
    guessed, right = _classes(predictions, labels)
    both = int(np.sum((guessed == positive) & (right == positive)))
    either = int(np.sum(guessed == positive)) + int(np.sum(right == positive))  # 2 TP + FP + FN
    return 2 * both / either if either else 0.0


def matthews_correlation(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Correlation of predicted and true classes; of two classes,

        MCC = (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)),

    and of more, Gorodkin's R_K, which is the same for two. 0 where either side holds one class only.
    """
    guessed, right = _classes(predictions, labels)
    classes = np.unique(np.concatenate([guessed, right]))
    # integers of any length, so nothing is rounded before the last division
    of_guesses = [int(np.sum(guessed == one)) for one in classes]
    of_labels = [int(np.sum(right == one)) for one in classes]
    total, correct = len(right), int(np.sum(guessed == right))
    covariance = correct * total - sum(p * t for p, t in zip(of_guesses, of_labels, strict=True))
    spread = (total**2 - sum(p * p for p in of_guesses)) * (total**2 - sum(t * t for t in of_labels))
    return covariance / math.sqrt(spread) if spread else 0.0


def pearson(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Linear correlation; 0 where either side is constant, which has none (scipy returns nan there)."""
    return _correlation(*_numbers(predictions, labels))


def spearman(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Linear correlation of the ranks, where equal numbers share the mean of their ranks; 0 where either side is constant."""
    guessed, right = _numbers(predictions, labels)
    return _correlation(_ranks(guessed), _ranks(right))


METRICS: Mapping[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews_correlation": matthews_correlation,
    "pearson": pearson,
    "spearman": spearman,
}


def glue_scores(
    task_name_or_metrics: str | GlueTask | Sequence[str], predictions: ArrayLike, labels: ArrayLike
) -> dict[str, float]:
    """Every metric of a task, its headline first; or the metrics that are named. Fractions, not percent.

    predictions: class ids (n,), not logits; real numbers for STS-B.
    """
    if isinstance(task_name_or_metrics, str | GlueTask):
        names: Sequence[str] = glue_task(task_name_or_metrics).metrics
    else:
        names = task_name_or_metrics
    for name in names:
        if name not in METRICS:
            raise InputError(f"unknown metric '{name}' of GLUE; {suggest(name, METRICS)}")
    return {name: METRICS[name](predictions, labels) for name in names}


def _pair(predictions: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    guessed, right = np.asarray(predictions), np.asarray(labels)
    if guessed.ndim == 2:
        raise InputError(f"predictions of shape {guessed.shape}: one number an example is wanted, as logits.argmax(-1)")
    if guessed.shape != right.shape or guessed.ndim != 1:
        raise InputError(f"predictions {guessed.shape} and labels {right.shape}: one of each an example is wanted")
    if len(right) == 0:
        raise InputError("no predictions: a metric needs at least one example")
    return guessed, right


def _classes(predictions: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Class ids as integers."""
    pair = _pair(predictions, labels)
    for values, what in zip(pair, ("predictions", "labels"), strict=True):
        if values.dtype.kind not in "iub":
            raise InputError(f"{what} of type {values.dtype}: class ids are integers")
    return pair[0].astype(np.int64), pair[1].astype(np.int64)


def _numbers(predictions: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Finite numbers in double precision."""
    found = []
    for values, what in zip(_pair(predictions, labels), ("predictions", "labels"), strict=True):
        if values.dtype.kind not in "iubf":
            raise InputError(f"{what} of type {values.dtype}: numbers are wanted")
        exact = values.astype(np.float64)
        if not np.isfinite(exact).all():
            bad = int(np.flatnonzero(~np.isfinite(exact))[0])
            raise InputError(f"{what}: number {bad} is {exact[bad]}; a correlation needs finite numbers")
        found.append(exact)
    return found[0], found[1]


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's r of two series of the same length."""
    if (x == x[0]).all() or (y == y[0]).all():  # a rounded mean would leave something to divide by
        return 0.0
    x, y = _centred(x), _centred(y)
    return float(np.clip(np.dot(x, y), -1.0, 1.0))


def _centred(values: np.ndarray) -> np.ndarray:
    """Values minus their mean, of length 1; scaled by powers of two, so that squares neither overflow nor vanish."""
    spread = _near_one(values)
    spread = _near_one(spread - spread[0])
    centred = spread - spread.mean()
    return centred / np.linalg.norm(centred)


def _near_one(values: np.ndarray) -> np.ndarray:
    """The same numbers, times a power of two: no rounding."""
    return np.ldexp(values, -math.frexp(np.abs(values).max())[1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]
