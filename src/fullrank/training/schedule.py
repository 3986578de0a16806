"""Learning rates by name.

A schedule is registered as a function `(step, total, options) -> learning rate` of the update `step`, which counts from
1, of `total`; or, where it depends on the validation (`plateau`), as a class that follows `Schedule`.
With lr = `learning_rate`, w = `warmup_steps`, T = `total`, every schedule begins with

    rate(t) = warmup_from + (lr - warmup_from) t / w        for t <= w
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fullrank.config import register
from fullrank.config.run import TrainConfig
from fullrank.core.registry import lookup


class Schedule(Protocol):
    """The learning rate of every update."""

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, which counts from 1."""

    def observe(self, cost: float) -> None:
        """Record an evaluation: the value of `eval.metric` as a number that is better the lower it is."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint; empty for a pure function of the step."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state given by `state()`."""


FunctionOfStep = Callable[[int, int, TrainConfig], float]


@dataclass(frozen=True)
class FunctionSchedule:
    """A schedule that is a function of the step alone."""

    function: FunctionOfStep
    total: int
    options: TrainConfig

    def rate(self, step: int) -> float:
        if step <= self.options.warmup_steps:
            return _warm(step, self.options)
        return self.function(step, self.total, self.options)

    def observe(self, cost: float) -> None:
        """Ignored: the rate does not depend on the validation."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Ignored: there is no state."""


def make_schedule(options: TrainConfig, total_steps: int) -> Schedule:
    """The schedule `options.schedule` for a training of `total_steps` updates."""
    registered = lookup("schedule", options.schedule, "train.schedule")
    if isinstance(registered, type):
        return registered(options, total_steps)
    return FunctionSchedule(registered, total_steps, options)


def _warm(step: int, options: TrainConfig) -> float:
    share = step / options.warmup_steps
    return options.warmup_from + (options.learning_rate - options.warmup_from) * share


def _decayed_share(step: int, total: int, options: TrainConfig) -> float:
    """The share of training after the warm-up that is done, 0 to 1."""
    return min(1.0, (step - options.warmup_steps) / max(1, total - options.warmup_steps))


@register("schedule", "constant")
def constant(step: int, total: int, options: TrainConfig) -> float:
    """rate(t) = lr"""
    return options.learning_rate


@register("schedule", "cosine")
def cosine(step: int, total: int, options: TrainConfig) -> float:
    """rate(t) = min + (lr - min) (1 + cos(pi (t - w) / (T - w))) / 2, with min = `min_learning_rate`"""
    low, high = options.min_learning_rate, options.learning_rate
    return low + (high - low) * (1 + math.cos(math.pi * _decayed_share(step, total, options))) / 2


@register("schedule", "cosine_restarts")
def cosine_restarts(step: int, total: int, options: TrainConfig) -> float:
    """Cosines one after another, each `t_mult` times as long as the last and `lr_shrink` times as high (SGDR; fairseq).

        rate(t) = lr_shrink^i (min + (lr - min) (1 + cos(pi (t - w - S_i) / P_i)) / 2)      for S_i < t - w <= S_i + P_i

    with P_i = period t_mult^i and S_i = P_0 + .. + P_{i-1}.  One `period` of T - w steps is `cosine`.
    Differs from fairseq by one step: a period ends with its lowest rate instead of beginning with its highest.
    """
    first = options.period or max(1, total - options.warmup_steps)
    done, index = float(step - options.warmup_steps), 0
    if options.t_mult == 1:  # no need to walk through a million short periods
        index = math.ceil(done / first) - 1
        done -= index * first
    length = float(first)
    while done > length:
        done, length, index = done - length, length * options.t_mult, index + 1
    low, high = options.min_learning_rate, options.learning_rate
    return options.lr_shrink**index * (low + (high - low) * (1 + math.cos(math.pi * done / length)) / 2)


@register("schedule", "linear")
def linear(step: int, total: int, options: TrainConfig) -> float:
    """rate(t) = lr + (min - lr) (t - w) / (T - w), with min = `min_learning_rate`"""
    low, high = options.min_learning_rate, options.learning_rate
    return high + (low - high) * _decayed_share(step, total, options)


@register("schedule", "inverse_sqrt")
def inverse_sqrt(step: int, total: int, options: TrainConfig) -> float:
    """rate(t) = lr sqrt(max(w, 1) / t), not below `min_learning_rate`

    With `warmup_from` 1e-7 that is fairseq's, but for one update: its update t has the rate of our t - 1.
    """
    return max(options.min_learning_rate, options.learning_rate * math.sqrt(max(1, options.warmup_steps) / step))


@register("schedule", "plateau")
class Plateau:
    """rate = lr / k^n, not below `min_learning_rate`, with k = `plateau_factor`.

    n grows by one after more than `plateau_patience` evaluations in a row that do not improve on the best so far.
    """

    def __init__(self, options: TrainConfig, total_steps: int) -> None:
        self.options = options
        self.best: float | None = None
        self.waited = 0
        self.divisions = 0

    def rate(self, step: int) -> float:
        if step <= self.options.warmup_steps:
            return _warm(step, self.options)
        divided = self.options.learning_rate / self.options.plateau_factor**self.divisions
        return max(self.options.min_learning_rate, divided)

    def observe(self, cost: float) -> None:
        if self.best is None or cost < self.best:
            self.best, self.waited = cost, 0
            return
        self.waited += 1
        if self.waited > self.options.plateau_patience:
            self.waited = 0
            self.divisions += 1

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "divisions": self.divisions}

    def restore(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.divisions = state["best"], state["waited"], state["divisions"]
