"""Dropout by place, ordinary or locked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullrank.attention.dropout import dropout


class Dropout(nn.Module):
    """Zero entries with probability p and scale the rest by 1/(1 - p), in training only.

    x (B, N, E) -> (B, N, E), or one sequence (N, E).  `locked` (variational dropout, Gal & Ghahramani 2016): one mask for all
    N positions.
    """

    def __init__(self, p: float, locked: bool = False) -> None:
        super().__init__()
        self.p, self.locked = p, locked

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if not self.locked:
            return dropout(x, self.p)
        kept = torch.empty_like(x[..., :1, :]).bernoulli_(1 - self.p)
        return x * kept.div_(1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", locked" if self.locked else "")
