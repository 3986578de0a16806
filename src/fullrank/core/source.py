"""The source that a decoder reads across: hidden states of the encoder, or keys and values of every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import KeyValues
from .layout import Layout


class CrossInput(NamedTuple):
    """Input of one layer's cross-attention: hidden states (B, M, E), or their keys and values, and the layout."""

    source: Tensor | KeyValues
    layout: Layout


@dataclass(frozen=True)
class Source:
    """Encoded sentences: hidden (B, M, E), mask (B, M) True for tokens, None when nothing is padded.

    positions (B, M): of tokens in their sentences; None where they are 0, 1, .., M - 1 with padding behind them.
    """

    hidden: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def of(cls, hidden: Tensor, mask: Tensor | None) -> Source:
        """Build a Source from hidden states (B, M, E) and the mask (B, M) that the encoder read, 1 for tokens."""
        mask = None if mask is None else mask.bool()
        if mask is None or bool(mask.all()):
            return cls(hidden)
        padded_left = bool((mask[:, 1:] & ~mask[:, :-1]).any())
        return cls(hidden, mask, (mask.cumsum(1) - 1).clamp_min(0) if padded_left else None)

    def rows(self, index: Tensor) -> Source:
        """Sentences `index` (K,)."""
        mask, positions = (None if x is None else x.index_select(0, index) for x in (self.mask, self.positions))
        return Source(self.hidden.index_select(0, index), mask, positions)

    @property
    def batch(self) -> int:
        """B."""
        return self.hidden.shape[0]

    def of_layer(self, layer: int, queries: int) -> CrossInput:
        """Input of layer `layer` for `queries` tokens of each sentence."""
        keys, device = self.hidden.shape[1], self.hidden.device
        return CrossInput(self.hidden, _layout(queries, keys, self.mask, self.positions, device))


@dataclass(frozen=True)
class ProjectedSource:
    """The source during decoding: keys and values of each layer, one row a sentence.

    rows (R,), ascending: the sentence that each target row translates. The target rows of one sentence (beams) read its row
    together, as if they were its queries: cross-attention has no order among queries. mask, positions: as in `Source`.
    """

    layers: tuple[KeyValues, ...]
    mask: Tensor | None
    rows: Tensor
    positions: Tensor | None = None

    def of_layer(self, layer: int, queries: int) -> CrossInput:
        """Input of layer `layer` for `queries` tokens of each target row; rows of one sentence count together."""
        known = self.layers[layer]
        together = queries * (self.rows.shape[0] // max(1, known.batch))
        return CrossInput(known, _layout(together, known.length, self.mask, self.positions, known.values.device))

    def reorder(self, index: Tensor) -> ProjectedSource:
        """The source for target rows `index` (K,), in that order; they may repeat."""
        rows = self.rows.index_select(0, index)
        kept, counts = torch.unique_consecutive(rows, return_counts=True)
        if bool((counts != counts[:1]).any()):
            kept, counts = rows, torch.ones_like(rows)  # groups of several sizes: a row for each target row
        now = torch.arange(kept.numel(), device=kept.device)
        if kept.numel() == self.layers[0].batch and torch.equal(kept, now):
            return replace(self, rows=rows)
        layers = tuple(known.rows(kept) for known in self.layers)
        mask, positions = (None if x is None else x.index_select(0, kept) for x in (self.mask, self.positions))
        return ProjectedSource(layers, mask, now.repeat_interleave(counts), positions)


def _layout(queries: int, keys: int, mask: Tensor | None, positions: Tensor | None, device: torch.device) -> Layout:
    layout = Layout.of(queries, keys, causal=False, device=device, key_mask=mask)
    if positions is None:
        return layout
    return replace(layout, key_positions=positions, runs=None, from_start=False)
