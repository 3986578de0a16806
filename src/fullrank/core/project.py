"""Projection of hidden states to heads, and the permutation of heads in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import draws
from .draws import Dropout
from .layout import Layout
from .positions import RelativeKeys, Rotary, encodings_of, serves, sines_then_cosines
from .stage import HeadSize, draw_apart


@dataclass(frozen=True)
class Heads:
    """The tensors that attention works on.

    query, scored (B, H, N, D): the query as projected, which mixing reads, and the query that meets the keys.
    keys, values (B, H, M, D); relative (H, T, D): keys of the distances in `layout.spans`.
    None stands for a tensor that no stage of the layer reads; there are always values.
    """

    query: Tensor | None
    scored: Tensor | None
    keys: Tensor | None
    values: Tensor
    relative: Tensor | None = None


@dataclass(frozen=True)
class Needs:
    """The fields of `Heads` that the stages of a layer read; `idle` ones are allocated, but never trained or computed.

    shared_projection: keys of distances have no projection of their own.
    """

    score: tuple[str, ...] = ("scored", "keys")
    mix: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    clamp_length: int | None = None
    shared_projection: bool = False


class SeparateLinear(nn.Linear):
    """A linear layer that is drawn apart: no other parameter starts differently because of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with draw_apart():
            super().__init__(*args, **options)


class Projection(nn.Module):
    """Q, K, V = X W + b, split into heads (Mixhead Eq. 8), then rotated if positions are rotary; R = PE W_R.

    x (B, N, E), source (B, M, E) -> query, scored (B, H, N, D), keys, values (B, H, M, D) and relative (H, T, D).
    With `shared_projection` R = PE W_K, and PE(0) W_Q is added to the queries that meet keys. Queries, keys and values are
    dropped out before they are rotated. Only what the stages need is allocated. A query that only mixing reads starts from
    random numbers of its own, so that all other parameters start as they do without mixing.
    """

    def __init__(
        self, size: HeadSize, bias: bool, rotary: Rotary | None, needs: Needs, dropout: Dropout | None = None
    ) -> None:
        super().__init__()
        inner = size.num_heads * size.head_dim
        self.num_heads, self.head_dim = size.num_heads, size.head_dim
        self.reads_keys = "keys" in needs.score
        self.query: nn.Linear | None = None
        if "scored" in needs.score:
            self.query = nn.Linear(size.hidden_size, inner, bias=bias)
        elif "query" in needs.mix:
            self.query = SeparateLinear(size.hidden_size, inner, bias=bias)
        idle = "keys" in needs.idle and not self.reads_keys
        self.key = nn.Linear(size.hidden_size, inner, bias=bias) if self.reads_keys or idle else None
        if self.key is not None and idle:
            self.key.requires_grad_(False)
        self.value = nn.Linear(size.hidden_size, inner, bias=bias)
        own = "relative" in needs.score and not needs.shared_projection
        self.relative = RelativeKeys(size, needs.clamp_length) if own else None
        self.shared_projection, self.clamp_length = needs.shared_projection, needs.clamp_length
        self.rotary = rotary
        self.dropout = Dropout(0.0) if dropout is None else dropout

    def layers(self) -> list[nn.Linear]:
        """The layers of query, key and value that exist, in this order."""
        return [layer for layer in (self.query, self.key, self.value) if layer is not None]

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, N, D)

    def forward(self, x: Tensor, source: Tensor, layout: Layout, relative: Tensor | None = None) -> Heads:
        """`layout` places the queries; the keys projected here are the last ones of it.

        relative (H, T or more, D): keys of the distances 0, 1, .. of an earlier call.
        """
        query, scored = self.queries(x, layout)
        keys, values = self.keys_and_values(source, layout)
        if relative is not None and relative.dtype != values.dtype:
            relative = None  # made in another precision
        if self.relative is not None and not serves(relative, layout):
            relative = self.relative(layout, x)
        if self.shared_projection:
            assert scored is not None
            relative, nearest = self._project_distances(layout, x, relative)
            scored = scored + nearest
        return Heads(query, scored, keys, values, relative)

    def _project_distances(self, layout: Layout, x: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys of distances (H, T, D), those that are known where they serve, and the query of distance 0 (H, 1, D)."""
        assert self.query is not None
        assert self.key is not None
        if known is not None and serves(known, layout):
            keys, zero = known, sines_then_cosines(torch.zeros(1, device=x.device), x.shape[-1], x)
        else:
            encodings = encodings_of(layout, self.clamp_length, x)
            keys = self.split(self.dropout(self.key(encodings)[None], shared=True))[0]
            zero = encodings[-layout.spans[0][0]][None]
        return keys, self.split(self.dropout(self.query(zero)[None], shared=True))[0]

    def queries(self, x: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        """`query` and `scored` of x (B, N, E)."""
        query = None if self.query is None else self.split(self.dropout(self.query(x)))
        if self.rotary is None or query is None:
            return query, query
        return query, self.rotary(query, layout.query_positions)

    def keys_and_values(self, source: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor]:
        """Keys and values of source (B, M, E), the last ones of `layout`."""
        keys = self.split(self.dropout(self.key(source))) if self.key is not None and self.reads_keys else None
        if self.rotary is not None and keys is not None:
            own = layout.key_positions[..., layout.key_positions.shape[-1] - keys.shape[2] :]
            keys = self.rotary(keys, own)
        return keys, self.split(self.dropout(self.value(source)))


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
