"""Absolute positions, added to the embeddings. Rotary positions act on the heads instead (attention/project.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fullrank.config.registry import register
from fullrank.config.schema import ModelConfig
from fullrank.errors import InputError


@register("position", "sinusoidal")
class Sinusoidal(nn.Module):
    """Fixed sinusoids (Vaswani et al. 2017, §3.5).

        PE(p, 2i) = sin(p / 10000^(2i/E)),   PE(p, 2i+1) = cos(p / 10000^(2i/E))

    hidden (B, N, E), positions (N,) or (B, N) -> hidden + PE.  No parameters and no longest position.
    Differs from fairseq: its sines and cosines stand in two halves (a permutation of the dimensions) and positions start at 2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.size = config.hidden_size

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        exponent = torch.arange(0, self.size, 2, device=hidden.device, dtype=dtype) / self.size
        angle = positions.to(dtype)[..., None] * torch.exp(-math.log(10000.0) * exponent)
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., : self.size]
        return hidden + table.to(hidden.dtype)


@register("position", "learned")
class Learned(nn.Module):
    """One learned vector for each of `max_position_embeddings` positions; longer sequences are refused.

    hidden (B, N, E), positions (N,) or (B, N) -> hidden + weight[positions].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden + self.weight[positions]

    def check(self, length: int) -> None:
        """Raises InputError if a sequence of `length` tokens has no learned position."""
        if length > self.weight.shape[0]:
            raise InputError(
                f"a sequence of {length} tokens, but model.max_position_embeddings is {self.weight.shape[0]} and positions are "
                "learned; shorten the segments or train with a larger model.max_position_embeddings"
            )


@register("position", "rotary")
@register("position", "none")
class NothingAdded(nn.Module):
    """`none`: order is known only through the causal mask. `rotary`: every attention layer rotates its queries and keys.

    hidden (B, N, E) -> hidden.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden
