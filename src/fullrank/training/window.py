"""Sums over the steps since the last line of metrics, kept where the model computes: no step waits for a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fullrank.config.run import TrainConfig
from fullrank.core.errors import RunError


class Window:
    """nats and tokens since the last line, and the first step whose loss was not a finite number."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nll = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0
        self._bad = torch.zeros((), dtype=torch.int64, device=device)  # 0: none

    def add(self, nll: Tensor | float, tokens: int) -> None:
        """One batch: nats summed over its tokens."""
        self.nll += nll.detach() if isinstance(nll, Tensor) else nll
        self.tokens += tokens

    def watch(self, step: int, loss: Tensor) -> bool:
        """Note whether the loss of update `step` is a number; False if it is known not to be (a GPU is not asked yet)."""
        if self.device.type == "cpu":
            if not math.isfinite(loss.item()):
                self._bad.fill_(step)
                return False
        else:
            self._bad = torch.where((self._bad > 0) | torch.isfinite(loss), self._bad, step)
        return True

    def bad_step(self) -> int | None:
        """The first step whose loss was not a finite number; waits for the device."""
        return int(self._bad.item()) or None

    def close(self) -> float:
        """The mean in nats per token; the sums start again from zero."""
        mean = float(self.nll) / max(1, self.tokens)
        self.nll = torch.zeros_like(self.nll)
        self.tokens = 0
        return mean


def diverged(what: str, step: int, options: TrainConfig, kept: str) -> RunError:
    """The error about a loss that is not a number; `kept` says which checkpoint there is."""
    clip = "none" if options.max_grad_norm is None else str(options.max_grad_norm)
    bf16 = " or set train.precision=fp32" if options.precision == "bf16" else ""
    return RunError(
        f"{what} at step {step} is not a finite number: lower train.learning_rate (now {options.learning_rate:g}), raise "
        f"train.warmup_steps (now {options.warmup_steps}), lower train.max_grad_norm (now {clip}){bf16}; {kept}"
    )
