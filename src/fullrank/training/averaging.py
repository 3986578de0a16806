"""Averages of the weights along training, to be evaluated and saved in their place.

With p_s the parameters after update s, after update t

    ema   a_t = sum_s (1-d) d^(t-s) p_s / (1 - d^t),  s = 1 .. t     d = `ema_decay`
    swa   a_t = mean of p_s,  first < s <= t                         first = `swa_start` x planned steps

The division makes the weights of the exponential average sum to one, so that the random start has no part in it.
Both are running means, a += share (p - a). Buffers are not averaged: they stay as training left them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.config.run import TrainConfig


class WeightAverage:
    """The running mean of a model's parameters; `kind` as `train.averaging` says, `none` included."""

    def __init__(self, model: nn.Module, options: TrainConfig, total_steps: int) -> None:
        self.kind = options.averaging
        self.decay = options.ema_decay
        self.first = round(options.swa_start * total_steps)
        self.parameters = dict(model.named_parameters())
        self.count = 0  # updates averaged so far
        self.averages: dict[str, Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether there is an average yet."""
        return self.count > 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters after update `step`."""
        if self.kind == "none" or (self.kind == "swa" and step <= self.first):
            return
        self.count += 1
        if self.count == 1:
            self.averages = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            return
        share = (1 - self.decay) / (1 - self.decay**self.count) if self.kind == "ema" else 1 / self.count
        torch._foreach_lerp_(list(self.averages.values()), [p.detach() for p in self.parameters.values()], share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the averages inside the block, and its own parameters, bit for bit, after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, average in self.averages.items():
            own = self.parameters[name].detach().clone()
            self.parameters[name].copy_(average)
            average.copy_(own)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Leave the averages in the model at the end of training."""
        for name, average in self.averages.items():
            self.parameters[name].copy_(average)

    def state(self) -> dict[str, Any]:
        """Plain values of a checkpoint, beside both sets of weights."""
        return {"kind": self.kind, "count": self.count}

    @torch.no_grad()
    def restore(self, state: dict[str, Any], own: dict[str, Tensor]) -> None:
        """Restore a saved state: the model holds the saved averages, `own` its parameters at that step, by name."""
        if state["kind"] != self.kind:
            raise ValueError(f"train.averaging is '{self.kind}', the checkpoint was made with '{state['kind']}'")
        self.count = state["count"]
        if self.active:
            self.averages = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            for name, parameter in self.parameters.items():
                parameter.copy_(own[name])
