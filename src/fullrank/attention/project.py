"""Projection of hidden states to heads, and rotary positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullrank.attention.layout import Layout
from fullrank.attention.size import HeadSize


@dataclass(frozen=True)
class Heads:
    """What attention works on. query is as projected (mixing reads it); scored is the query that meets the keys.

    query, scored (B, H, N, D); keys, values (B, H, M, D).
    """

    query: Tensor
    scored: Tensor
    keys: Tensor
    values: Tensor


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021), half-split pairing as in Llama.

        (x_i, x_{i+D/2}) -> rotated by the angle  p * theta^(-2i/D),   i < D/2

    heads (B, H, N, D), positions (N,) or (B, N) -> (B, H, N, D). A score of rotated query and key depends on distance only.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        dtype = torch.float64 if heads.dtype == torch.float64 else torch.float32
        exponent = torch.arange(0, self.head_dim, 2, device=heads.device, dtype=dtype) / self.head_dim
        angle = positions.to(dtype)[..., None] * self.theta**-exponent  # (N, D/2) or (B, N, D/2)
        if angle.dim() == 3:
            angle = angle[:, None]
        cos, sin = angle.cos(), angle.sin()
        low, high = heads.to(dtype).chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


class Projection(nn.Module):
    """Q, K, V = X W + b, split into heads (Mixhead Eq. 8), then rotated if positions are rotary.

    x (B, N, E), source (B, M, E) -> query, scored (B, H, N, D) and keys, values (B, H, M, D).
    """

    def __init__(self, size: HeadSize, bias: bool, rotary: Rotary | None) -> None:
        super().__init__()
        inner = size.num_heads * size.head_dim
        self.num_heads, self.head_dim = size.num_heads, size.head_dim
        self.query = nn.Linear(size.hidden_size, inner, bias=bias)
        self.key = nn.Linear(size.hidden_size, inner, bias=bias)
        self.value = nn.Linear(size.hidden_size, inner, bias=bias)
        self.rotary = rotary

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, N, D)

    def forward(self, x: Tensor, source: Tensor, layout: Layout) -> Heads:
        """`layout` places the queries; the keys projected here are the last ones of it."""
        query, keys, values = self.split(self.query(x)), self.split(self.key(source)), self.split(self.value(source))
        if self.rotary is None:
            return Heads(query, query, keys, values)
        own = layout.key_positions[..., layout.key_positions.shape[-1] - keys.shape[2] :]
        return Heads(query, self.rotary(query, layout.query_positions), self.rotary(keys, own), values)
