"""Stochastic cross-head attention: query heads listen to key and value heads in another order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import draws


class StochasticCrossHead(nn.Module):
    """Stochastic cross-head attention (Skip Cross-head §2.2).

    In training, with probability `beta` per layer and pass, one permutation of the heads is drawn and applied to keys,
    relative keys and values alike; in evaluation heads keep to themselves. Queries, and the biases u and v of relative
    attention that are added to them, stay where they are.
    heads: (..., H, M, D) each, None for what a score does not read -> the same shapes.
    """

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, *heads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [tensor for tensor in heads if tensor is not None]
        if self.beta == 0 or not self.training or not given:
            return heads
        count, device = given[0].shape[-3], given[0].device
        if not torch.compiler.is_compiling() and draws.current is not None:
            drawn = draws.current.permutation(count, self.beta)
            if drawn is None:
                return heads
            order = drawn.to(device, non_blocking=True)
            return tuple(None if tensor is None else tensor.index_select(-3, order) for tensor in heads)
        permuted = torch.rand((), device=device) < self.beta  # stays a tensor: no branch, no synchronisation
        order = torch.where(permuted, torch.randperm(count, device=device), torch.arange(count, device=device))
        return tuple(None if tensor is None else tensor.index_select(-3, order) for tensor in heads)
