"""An evaluation while training: how the model is handed over, and which evaluation is the best one.

By the loss the lowest is the best, by a score (`eval.metric: bleu`) the highest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fullrank.config.run import TrainConfig
from fullrank.core.errors import InputError
from fullrank.training.device import autocast, judging
from fullrank.training.randomness import undisturbed
from fullrank.training.state import Counters, Training
from fullrank.training.values import Evaluate


@dataclass(frozen=True)
class Verdict:
    """What an evaluation says: nats per token, and its scores by name."""

    nll: float
    scores: dict[str, float]

    @property
    def finite(self) -> bool:
        return all(math.isfinite(value) for value in (self.nll, *self.scores.values()))

    def value(self, metric: str) -> float:
        """The figure that `eval.metric` names; InputError if this evaluation has none."""
        if metric == "loss":
            return self.nll
        if metric not in self.scores:
            raise InputError(
                f"eval.metric: the evaluation of this task gives no '{metric}' (it gives {', '.join(['loss', *self.scores])}); "
                "set eval.metric: loss"
            )
        return self.scores[metric]


def look_at(training: Training, evaluate: Evaluate, options: TrainConfig) -> Verdict:
    """`evaluate` the model as it would be saved now: with averaged weights when averaging.

    In evaluation mode, and in the precision of training; modes, weights and random numbers are afterwards what they were.
    """
    device = training.window.device
    modes = {module: module.training for module in training.model.modules()}
    training.model.eval()
    with (
        training.average.applied(),
        undisturbed(device),
        torch.no_grad(),
        judging(options),
        autocast(options.precision, device),
    ):
        found = evaluate(training.model)
    for module, mode in modes.items():
        module.training = mode
    scores: Any = getattr(found, "scores", None) or {}
    return Verdict(float(found.nll) / max(1, found.tokens), {name: float(score) for name, score in scores.items()})


def cost(metric: str, value: float) -> float:
    """`value` of `metric` as something that is better the lower it is."""
    return value if metric == "loss" else -value


def better(counters: Counters, verdict: Verdict) -> bool:
    """Whether the evaluation after the step of `counters` is the best so far; they take note of it."""
    value = verdict.value(counters.metric)
    if counters.best_metric is None or cost(counters.metric, value) < cost(counters.metric, counters.best_metric):
        counters.best_step, counters.best_nll, counters.best_metric = counters.step, verdict.nll, value
        counters.since_best = 0
        return True
    counters.since_best += 1
    return False
