"""Projection of hidden states to heads, and rotary positions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullrank.core.angles import angles
from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.relative import RelativeKeys, serves
from fullrank.core.stage import drawn_apart


@dataclass(frozen=True)
class Heads:
    """What attention works on. query is as projected (mixing reads it); scored is the query that meets the keys.

    query, scored (B, H, N, D); keys, values (B, H, M, D); relative (H, T, D): keys of the distances in `layout.spans`.
    None is what the stages of a layer have no use for; there are always values.
    """

    query: Tensor | None
    scored: Tensor | None
    keys: Tensor | None
    values: Tensor
    relative: Tensor | None = None


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021), half-split pairing as in Llama.

        (x_i, x_{i+D/2}) -> rotated by the angle  p * theta^(-2i/D),   i < D/2

    heads (B, H, N, D), positions (N,) or (B, N) -> (B, H, N, D). A score of rotated query and key depends on distance only.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        angle = angles(positions, self.head_dim, self.theta, heads)  # (N, D/2) or (B, N, D/2)
        if angle.dim() == 3:
            angle = angle[:, None]
        cos, sin = angle.cos(), angle.sin()
        low, high = heads.to(angle.dtype).chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


class Projection(nn.Module):
    """Q, K, V = X W + b, split into heads (Mixhead Eq. 8), then rotated if positions are rotary; R = PE W_R.

    x (B, N, E), source (B, M, E) -> query, scored (B, H, N, D), keys, values (B, H, M, D) and relative (H, T, D).
    `score_needs` and `mix_needs` name the tensors that the stages read: what neither reads is not allocated, except that of
    `idle`, which is allocated, never trained and never computed. A query that only mixing reads starts from random
    numbers of its own, so that all other parameters start as they do without mixing.
    """

    def __init__(
        self,
        size: HeadSize,
        bias: bool,
        rotary: Rotary | None,
        score_needs: Collection[str] = ("scored", "keys"),
        mix_needs: Collection[str] = ("query",),
        idle: Collection[str] = (),
        clamp_length: int | None = None,
    ) -> None:
        super().__init__()
        inner = size.num_heads * size.head_dim
        self.num_heads, self.head_dim = size.num_heads, size.head_dim
        self.reads_keys = "keys" in score_needs
        self.query: nn.Linear | None = None
        if "scored" in score_needs:
            self.query = nn.Linear(size.hidden_size, inner, bias=bias)
        elif "query" in mix_needs:
            with drawn_apart():
                self.query = nn.Linear(size.hidden_size, inner, bias=bias)
            setattr(self.query, "drawn_apart", True)  # noqa: B010
        kept = "keys" in idle and not self.reads_keys
        self.key = nn.Linear(size.hidden_size, inner, bias=bias) if self.reads_keys or kept else None
        if self.key is not None and kept:
            self.key.requires_grad_(False)
        self.value = nn.Linear(size.hidden_size, inner, bias=bias)
        self.relative = RelativeKeys(size, clamp_length) if "relative" in score_needs else None
        self.rotary = rotary

    def layers(self) -> list[nn.Linear]:
        """Those of query, key and value that exist, in this order."""
        return [layer for layer in (self.query, self.key, self.value) if layer is not None]

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, N, D)

    def forward(self, x: Tensor, source: Tensor, layout: Layout, relative: Tensor | None = None) -> Heads:
        """`layout` places the queries; the keys projected here are the last ones of it.

        `relative` (H, T or more, D): keys of the distances 0, 1, .. that were made before.
        """
        query, scored = self.queries(x, layout)
        keys, values = self.keys_and_values(source, layout)
        if relative is not None and relative.dtype != values.dtype:
            relative = None  # made in another precision
        if self.relative is not None and not serves(relative, layout):
            relative = self.relative(layout, x)
        return Heads(query, scored, keys, values, relative)

    def queries(self, x: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        """`query` and `scored` of x (B, N, E)."""
        query = None if self.query is None else self.split(self.query(x))
        if self.rotary is None or query is None:
            return query, query
        return query, self.rotary(query, layout.query_positions)

    def keys_and_values(self, source: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor]:
        """Those of source (B, M, E), the last ones of `layout`."""
        keys = self.split(self.key(source)) if self.key is not None and self.reads_keys else None
        if self.rotary is not None and keys is not None:
            own = layout.key_positions[..., layout.key_positions.shape[-1] - keys.shape[2] :]
            keys = self.rotary(keys, own)
        return keys, self.split(self.value(source))
