"""Routing: which key and value heads a query head listens to.

A route takes the tensors that belong to the listened-to heads - keys and values (B, H, M, D), relative keys (H, T, D), None
where the score has no use for one - and returns as many, with the heads, the third dimension from the end, rearranged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SameHead(nn.Module):
    """Query head i listens to key and value head i."""

    def forward(self, *heads: Tensor | None) -> tuple[Tensor | None, ...]:
        return heads


class StochasticCrossHead(nn.Module):
    """Stochastic cross-head attention (Skip Cross-head §2.2).

    In training, with probability `beta` per layer and pass, one permutation of the heads is drawn and applied to keys,
    relative keys and values alike; in evaluation heads keep to themselves. Queries, and the biases u and v of relative
    attention that are added to them, stay where they are. Every tensor (..., H, M, D) -> the same shape.
    """

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, *heads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = next((tensor for tensor in heads if tensor is not None), None)
        if not self.training or given is None:
            return heads
        count, device = given.shape[-3], given.device
        drawn = torch.rand((), device=device) < self.beta  # stays a tensor: no branch, no synchronisation
        order = torch.where(drawn, torch.randperm(count, device=device), torch.arange(count, device=device))
        return tuple(None if tensor is None else tensor.index_select(-3, order) for tensor in heads)
