"""Routing: which key and value heads a query head listens to."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SameHead(nn.Module):
    """Query head i listens to key and value head i."""

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


class StochasticCrossHead(nn.Module):
    """Stochastic cross-head attention (Skip Cross-head §2.2).

    In training, with probability `beta` per layer and pass, one permutation of the heads is drawn and applied to keys and
    values alike; in evaluation heads keep to themselves. keys, values (B, H, M, D) -> the same shapes.
    """

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.training:
            return keys, values
        heads, device = keys.shape[1], keys.device
        drawn = torch.rand((), device=device) < self.beta  # stays a tensor: no branch, no synchronisation
        order = torch.where(drawn, torch.randperm(heads, device=device), torch.arange(heads, device=device))
        return keys.index_select(1, order), values.index_select(1, order)
