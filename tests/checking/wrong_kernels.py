"""What is made of a kernel's output to see whether a check notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1 + 1e-3)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "outputs": lambda out: out * (1 + 1e-4),
    "gradients": WrongGradient.apply,
    "not a number": lambda out: out * float("nan"),
}
