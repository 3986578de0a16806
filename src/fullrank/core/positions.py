"""Positions: absolute ones are added to hidden states, rotary ones turn heads, relative ones give keys of distances."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import released
from .cache import KeyValues, Past
from .config import ModelConfig, MultiLinearConfig, stage_options
from .errors import InputError
from .layout import Layout
from .registry import register
from .stage import HeadSize

# -- sinusoids --------------------------------------------------------------------------------------------------------


def angles(positions: Tensor, size: int, theta: float, like: Tensor) -> Tensor:
    """p theta^(-2i / size) for 2i < size, without whole turns; positions (...,) -> (..., ceil(size / 2)).

    The product is made in fp64: in fp32 an angle of 10^6 is off by 0.06. The result is fp32, or fp64 if `like` is.
    """
    wide = torch.float32 if positions.device.type == "mps" else torch.float64  # mps has no fp64
    exponent = torch.arange(0, size, 2, device=positions.device, dtype=wide) / size
    angle = positions.to(wide)[..., None] * torch.exp(-math.log(theta) * exponent)
    return angle if like.dtype == torch.float64 else angle.remainder(2 * math.pi).to(torch.float32)


def sines_then_cosines(positions: Tensor, width: int, like: Tensor) -> Tensor:
    """Sinusoids as in Transformer-XL, all sines and then all cosines: (T,) -> (T, E) in the dtype of `like`.

    PE(p, i) = sin(p / 10000^(2i/E)),   PE(p, E/2 + i) = cos(p / 10000^(2i/E)),      i < E/2
    """
    angle = angles(positions, width, 10000.0, like)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)[:, :width].to(like.dtype)


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


# -- keys of distances ------------------------------------------------------------------------------------------------


def encode_distances(
    layout: Layout, width: int, clamp_length: int | None, like: Tensor, rows: int | None = None
) -> Tensor:
    """Sinusoids (T, E) of all distances within `layout.spans`, the smallest first, in the dtype and on the device of `like`.

    Distances beyond `clamp_length` count as `clamp_length`. rows: so many distances from the smallest on instead, for a
    table that will be read again.
    """
    spans = layout.spans if rows is None else ((layout.spans[0][0], layout.spans[0][0] + rows - 1),)
    pieces = [torch.arange(low, high + 1, device=like.device) for low, high in spans]
    distances = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if clamp_length is not None:
        distances = distances.clamp(-clamp_length, clamp_length)
    return sines_then_cosines(distances, width, like)


def encode_places(longest: int, count: int, width: int, like: Tensor) -> Tensor:
    """Sinusoids PE(longest - 1 - j) for j < count, (count, E): the position term of multi-linear attention."""
    return sines_then_cosines(torch.arange(longest - 1, longest - 1 - count, -1, device=like.device), width, like)


def serves(table: Tensor | None, layout: Layout) -> bool:
    """True if `table` (H, T or more, D), keys of the distances 0, 1, .., has all that `layout` needs."""
    return table is not None and layout.from_zero and table.shape[1] >= layout.distances


def encodings_of(layout: Layout, clamp_length: int | None, like: Tensor) -> Tensor:
    """Sinusoids (T, E) of the distances of a layout: those that a model made for all its layers, or else made here."""
    if layout.encodings is not None:
        return layout.encodings
    clamp = clamp_length if layout.clamp_length is None else layout.clamp_length
    return encode_distances(layout, like.shape[-1], clamp, like)


class RelativeKeys(nn.Module):
    """Keys of distances: R = PE W_R without bias, split into heads (Transformer-XL §3.3).  weight (H D, E).

    layout -> (H, T, D).
    """

    def __init__(self, size: HeadSize, clamp_length: int | None) -> None:
        super().__init__()
        self.num_heads, self.clamp_length = size.num_heads, clamp_length
        self.weight = nn.Parameter(torch.empty(size.num_heads * size.head_dim, size.hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as `nn.Linear` starts

    def forward(self, layout: Layout, like: Tensor) -> Tensor:
        encodings = encodings_of(layout, self.clamp_length, like)
        return F.linear(encodings, self.weight).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)


class RelativeBiases(nn.Module):
    """u and v of Transformer-XL: `content_bias` and `position_bias`, (H, D) each, added to every query.

    One pair for all layers of a model, which the layout carries to them, or one for each layer. They never decay.
    """

    no_weight_decay = True

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, head_dim))


# -- positions of a model ---------------------------------------------------------------------------------------------


class Position(nn.Module):
    """Contract of a position, built from a `ModelConfig`: what it adds to hidden states, to heads and to the layout.

    max_length: the longest sequence, None without limit. clamp_length: distances beyond it count as it, None: none do.
    biases: u and v that all layers share, None where there are none.
    """

    max_length: int | None = None
    clamp_length: int | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.biases: RelativeBiases | None = None

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden (B, N, E), positions (N,) or (B, N) -> (B, N, E)."""
        return hidden

    def check(self, length: int) -> None:
        """Raises InputError if a sequence of `length` tokens has no position."""
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"a sequence of {length} tokens, but model.max_position_embeddings is {self.max_length} and positions are "
                "learned; shorten the segments or train with a larger model.max_position_embeddings"
            )

    def place(
        self, layout: Layout, like: Tensor, dropout: nn.Module, known: Past | None = None, cached: bool = False
    ) -> Layout:
        """The layout with everything that layers read of positions, made once for all of them.

        known: of earlier calls, whose keys of distances are not made again; cached: those of this call will be read again.
        """
        return layout


@register("position", "none")
@register("position", "rotary")
class NothingAdded(Position):
    """`none`: order is known only through the causal mask. `rotary`: every attention layer rotates its queries and keys."""


@register("position", "sinusoidal")
class Sinusoidal(Position):
    """Fixed sinusoids (Vaswani et al. 2017, §3.5).

        PE(p, 2i) = sin(p / 10000^(2i/E)),   PE(p, 2i+1) = cos(p / 10000^(2i/E))

    hidden (B, N, E), positions (N,) or (B, N) -> hidden + PE.  No parameters and no longest position.
    Differs from fairseq: its sines and cosines stand in two halves (a permutation of the dimensions) and positions start at 2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.size = config.hidden_size

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        angle = angles(positions, self.size, 10000.0, hidden)
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., : self.size]
        return hidden + table.to(hidden.dtype)


@register("position", "learned")
class Learned(Position):
    """One learned vector for each of `max_position_embeddings` positions; longer sequences are refused.

    hidden (B, N, E), positions (N,) or (B, N) -> hidden + weight[positions].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.max_length = config.max_position_embeddings
        self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden + self.weight[positions]


@register("position", "relative")
class Relative(Position):
    """Transformer-XL's positions: nothing is added; the score of every layer reads the distance of query and key.

    Holds what all layers have in common: the sinusoids of distances, and u and v (`biases`, None where each layer has its
    own). Sinusoids are dropped out like embeddings, one draw for all layers, as in Transformer-XL.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        options = stage_options(config.attention.score)
        self.size, self.clamp_length = config.hidden_size, options.get("clamp_length")
        self.as_published = options.get("as_published") is True
        self.places: int | None = None  # of the position term of multi-linear attention
        assert config.head_dim is not None
        heads, width = config.num_attention_heads, config.head_dim
        if isinstance(config.attention, MultiLinearConfig):
            self.places, heads, width = config.max_position_embeddings, 1, config.attention.rank
        shared = options.get("shared_biases", True) and not options.get("shared_projection", False)
        self.biases = RelativeBiases(heads, width) if shared else None

    def place(
        self, layout: Layout, like: Tensor, dropout: nn.Module, known: Past | None = None, cached: bool = False
    ) -> Layout:
        """The layout with sinusoids of its distances, and u and v. Multi-linear attention reads sinusoids of places, (P, E).

        A cache gets a table of more distances than needed, so that it is not made again for every token.
        """
        encodings, layout = None, released.FromLast.from_layout(layout) if self.as_published else layout
        if self.places is not None:
            encodings = encode_places(self.places, self.places, self.size, like)
        elif not serves(known.relative if isinstance(known, KeyValues) else None, layout):
            rows = max(64, 1 << (layout.distances - 1).bit_length()) if cached and layout.from_zero else None
            encodings = encode_distances(layout, self.size, self.clamp_length, like, rows)
        if encodings is not None:
            encodings = dropout(encodings[None], shared=True)[0]
        biases = None if self.biases is None else (self.biases.content_bias, self.biases.position_bias)
        return replace(layout, encodings=encodings, biases=biases, clamp_length=self.clamp_length)
