"""Relative positions as in Transformer-XL: sinusoids of distances, their keys, the two learned biases, and the score."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.core.angles import halves
from fullrank.core.engine import Distances, Terms
from fullrank.core.errors import InputError
from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.registry import register
from fullrank.core.score_contract import Score


def encode_distances(
    layout: Layout, width: int, clamp_length: int | None, like: Tensor, rows: int | None = None
) -> Tensor:
    """Sinusoids of all distances within `layout.spans`, the smallest first, (T, E) in the dtype and on the device of `like`.

        PE(d, i) = sin(d / 10000^(2i/E)),   PE(d, E/2 + i) = cos(d / 10000^(2i/E)),      i < E/2

    The halves stand one after the other, as in Transformer-XL. Distances beyond `clamp_length` count as `clamp_length`.
    `rows`: so many distances from the smallest on instead, for a table that will be read again.
    """
    spans = layout.spans if rows is None else ((layout.spans[0][0], layout.spans[0][0] + rows - 1),)
    pieces = [torch.arange(low, high + 1, device=like.device) for low, high in spans]
    distances = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if clamp_length is not None:
        distances = distances.clamp(-clamp_length, clamp_length)
    return halves(distances, width, like)


def serves(table: Tensor | None, layout: Layout) -> bool:
    """Whether `table` (H, T or more, D), keys of the distances 0, 1, .., has those that `layout` needs."""
    return table is not None and layout.from_zero and table.shape[1] >= layout.distances


class RelativeKeys(nn.Module):
    """Keys of distances: R = PE W_R without bias, split into heads (Transformer-XL §3.3).  weight (H D, E).

    encodings (T, E) -> (H, T, D). A layout that carries no encodings is given them here, without dropout.
    """

    def __init__(self, size: HeadSize, clamp_length: int | None) -> None:
        super().__init__()
        self.num_heads, self.clamp_length = size.num_heads, clamp_length
        self.weight = nn.Parameter(torch.empty(size.num_heads * size.head_dim, size.hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as `nn.Linear` starts

    def forward(self, layout: Layout, like: Tensor) -> Tensor:
        encodings = layout.encodings
        if encodings is None:
            encodings = encode_distances(layout, self.weight.shape[1], self.clamp_length, like)
        return F.linear(encodings, self.weight).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)


class RelativeBiases(nn.Module):
    """u and v: `content_bias` and `position_bias`, (H, D) each, added to every query. They never decay, like all biases."""

    no_weight_decay = True

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, head_dim))


def u_and_v(own: RelativeBiases | None, lent: tuple[RelativeBiases, ...]) -> tuple[Tensor, Tensor]:
    """u and v (H, D) of a layer: its own, or those that the model holds for all layers."""
    biases = lent[0] if lent else own
    assert biases is not None
    return biases.content_bias, biases.position_bias


@register("score", "relative")
class XLRelative(Score):
    """Transformer-XL's score of content and distance (Dai et al. 2019, §3.3; Skip Cross-head app. A, Eq. 15).

        A(n, m) = ((Q(n) + u) . K(m)  +  (Q(n) + v) . R(p_n - p_m)) / sqrt(D)

    query (B, H, N, D), keys (B, H, M, D), relative (H, T, D): the keys R of the distances in `layout.spans` -> (B, H, N, M).
    p are positions in the text: whatever stands between query and key counts, whether it can be seen or not.
    `shared_biases`: u and v are one pair for all layers of a model, stored with it once, as in Transformer-XL's base models;
    otherwise, and in a layer by itself, each layer has its own. `clamp_length`: farther keys count as that far.
    `as_published`: the formula of Skip Cross-head's paper and code, which takes the distance of the key to the last token of
    the block instead of to the query, R(p_last - p_m), for comparison only: a query does not know how far a key is, and the
    weights of a token change with what is appended to its block, so that decoding token by token is another function.
    It goes without `same_length`.
    """

    needs = ("scored", "keys", "relative")

    @dataclass(frozen=True)
    class Config:
        shared_biases: bool = True
        clamp_length: int | None = None
        as_published: bool = False

        def __post_init__(self) -> None:
            clamp = self.clamp_length
            if clamp is not None and not (type(clamp) is int and clamp > 0):
                raise ValueError(f"clamp_length: a positive whole number of tokens, or null, given {clamp!r}")
            for name in ("shared_biases", "as_published"):
                if type(value := getattr(self, name)) is not bool:
                    raise ValueError(f"{name}: true or false, given {value!r}")

    def __init__(self, config: Config, size: HeadSize) -> None:
        super().__init__()
        self.scale = size.head_dim**-0.5
        self.clamp_length, self.as_published = config.clamp_length, config.as_published
        self.biases: RelativeBiases | None = RelativeBiases(size.num_heads, size.head_dim)
        self._shared: tuple[RelativeBiases, ...] = ()

    def share(self, biases: RelativeBiases) -> None:
        """Use `biases`, which the model holds, instead of an own pair."""
        # in a tuple, so that they are not registered here too and are saved once
        self.biases, self._shared = None, (biases,)

    def queries(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """(Q + u) / sqrt(D) and (Q + v) / sqrt(D), in the dtype of the query."""
        u, v = self.u_and_v()
        content, position = (query + u[:, None]) * self.scale, (query + v[:, None]) * self.scale
        return content.to(query.dtype), position.to(query.dtype)

    def u_and_v(self) -> tuple[Tensor, Tensor]:
        return u_and_v(self.biases, self._shared)

    def forward(self, query: Tensor, keys: Tensor, relative: Tensor, layout: Layout) -> Tensor:
        content, position = self.queries(query)
        by_distance = position @ relative.transpose(-1, -2)  # (B, H, N, T)
        if self.as_published and layout.window is not None and layout.reach[1] >= layout.window:
            raise InputError(
                "same_length: not with a score that is as_published, which measures distances beyond the window; leave it out"
            )
        places = layout.query_positions[..., -1:] if self.as_published else layout.query_positions
        distances = places[..., :, None] - layout.key_positions[..., None, :]  # (N, M), (B, N, M); one row as published
        index = layout.distance_rows(distances)
        index = index.view(-1, 1, *index.shape[-2:]).expand(*query.shape[:3], keys.shape[2])
        return content @ keys.transpose(-1, -2) + by_distance.gather(-1, index)

    def terms(self, query: Tensor, keys: Tensor, relative: Tensor, layout: Layout) -> Terms | str:  # type: ignore[override]  # its arguments are what it needs
        if self.as_published:
            return "no engine knows relative scores as_published"
        return Terms(query, keys, self.scale, Distances(relative[:, : layout.distances], *self.u_and_v()))
