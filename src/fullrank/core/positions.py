"""Positions: absolute ones are added to the embeddings; rotary and relative ones act on the heads (attention/)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.angles import angles
from fullrank.core.config import ModelConfig, stage_options
from fullrank.core.errors import InputError
from fullrank.core.layout import Layout
from fullrank.core.multilinear import encode_places
from fullrank.core.registry import register
from fullrank.core.relative import RelativeBiases, XLRelative, encode_distances, serves


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
        angle = angles(positions, self.size, 10000.0, hidden)
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


@register("position", "relative")
class Relative(nn.Module):
    """Transformer-XL's positions: nothing is added; the score of every layer reads the distance of query and key.

    hidden (B, N, E) -> hidden.  Holds what all layers have in common: the sinusoids of distances, and u and v (`biases`, None
    where each layer has its own). Sinusoids are dropped out like embeddings, one draw for all layers, as in Transformer-XL.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        options = XLRelative.Config(**stage_options(config.attention.score))
        assert config.head_dim is not None
        self.size, self.clamp_length = config.hidden_size, options.clamp_length
        self.places: int | None = None  # of the position term of multi-linear attention
        heads, width = config.num_attention_heads, config.head_dim
        if config.attention.kind == "multilinear":
            assert config.attention.rank is not None
            self.places, heads, width = config.max_position_embeddings, 1, config.attention.rank
        self.biases: RelativeBiases | None = RelativeBiases(heads, width) if options.shared_biases else None

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def lend(self, blocks: Iterable[Any]) -> None:
        """Let the scores of all blocks use the one pair of biases that is held here."""
        for block in blocks:
            if self.biases is not None:
                block.attention.attend.score.share(self.biases)

    def clamp(self, length: int | None, blocks: Iterable[Any]) -> None:
        """Let all distances beyond `length` count as `length`, None: let them count as they are."""
        self.clamp_length = length
        if self.places is not None:
            return
        for block in blocks:
            block.attention.project.relative.clamp_length = length

    def encodings(self, layout: Layout, like: Tensor, known: Tensor | None, cached: bool) -> Tensor | None:
        """Sinusoids (T, E) for `layout`, or None where keys of its distances are `known` (H, T, D) already.

        For a cache of keys, the table is made for more distances, so that it is not made again for every token. The position
        term of multi-linear attention reads places instead, all that it has: (P, E).
        """
        if self.places is not None:
            return encode_places(self.places, self.places, self.size, like)
        if serves(known, layout):
            return None
        rows = max(64, 1 << (layout.distances - 1).bit_length()) if cached and layout.from_zero else None
        return encode_distances(layout, self.size, self.clamp_length, like, rows)
