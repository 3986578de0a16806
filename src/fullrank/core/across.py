"""What a decoder reads beside its own tokens: the source, as the encoder left it or as keys and values of every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.core.attention import KeyValues
from fullrank.core.layout import Layout


@dataclass(frozen=True)
class Source:
    """Sentences as the encoder made them: hidden (B, M, E), mask (B, M) True for tokens, None when nothing is padded.

    positions (B, M): places of tokens in their sentences; None where they are 0, 1, .., M - 1, padding behind them.
    """

    hidden: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def of(cls, hidden: Tensor, mask: Tensor | None) -> Source:
        """That of hidden states (B, M, E) and of the mask (B, M) that the encoder made them with, 1 for tokens."""
        mask = None if mask is None else mask.bool()
        if mask is None or bool(mask.all()):
            return cls(hidden)
        padded_left = bool((mask[:, 1:] & ~mask[:, :-1]).any())
        return cls(hidden, mask, (mask.cumsum(1) - 1).clamp_min(0) if padded_left else None)

    def rows(self, index: Tensor) -> Source:
        """Those sentences `index` (K,)."""
        mask, positions = (None if of is None else of.index_select(0, index) for of in (self.mask, self.positions))
        return Source(self.hidden.index_select(0, index), mask, positions)

    @property
    def texts(self) -> int:
        """B."""
        return self.hidden.shape[0]

    def of_layer(self, layer: int, queries: int) -> Across:
        """What layer `layer` reads for `queries` tokens of each sentence."""
        keys, device = self.hidden.shape[1], self.hidden.device
        return Across(self.hidden, _layout(queries, keys, self.mask, self.positions, device))


class Across(NamedTuple):
    """What cross-attention of one layer reads: hidden states (B, M, E), or keys and values made of them; who sees what."""

    source: Tensor | KeyValues
    layout: Layout


@dataclass(frozen=True)
class Projected:
    """The source while a translation is written: keys and values of each layer, one row a sentence.

    rows: what each text that is being written translates, (R,), ascending. Several texts of one sentence (beams) read one
    row together, as if they were its queries: cross-attention has no order among queries. mask, positions: of `Source`.
    """

    layers: tuple[KeyValues, ...]
    mask: Tensor | None
    rows: Tensor
    positions: Tensor | None = None

    def of_layer(self, layer: int, queries: int) -> Across:
        """What layer `layer` reads for `queries` tokens of each text; texts of one sentence count together."""
        known = self.layers[layer]
        together = queries * (self.rows.shape[0] // max(1, known.texts))
        return Across(known, _layout(together, known.length, self.mask, self.positions, known.values.device))

    def reorder(self, index: Tensor) -> Projected:
        """For the texts `index` (K,) of those now, in that order; they may repeat."""
        rows = self.rows.index_select(0, index)
        kept, counts = torch.unique_consecutive(rows, return_counts=True)
        if bool((counts != counts[:1]).any()):
            kept, counts = rows, torch.ones_like(rows)  # not groups of one size: a row for each
        now = torch.arange(kept.numel(), device=kept.device)
        texts = self.layers[0].texts
        if kept.numel() == texts and torch.equal(kept, now):
            return replace(self, rows=rows)
        layers = tuple(known.rows(kept) for known in self.layers)
        mask, positions = (None if of is None else of.index_select(0, kept) for of in (self.mask, self.positions))
        return Projected(layers, mask, now.repeat_interleave(counts), positions)


def _layout(queries: int, keys: int, mask: Tensor | None, positions: Tensor | None, device: torch.device) -> Layout:
    layout = Layout.of(queries, keys, causal=False, device=device, key_mask=mask)
    if positions is None:
        return layout
    return replace(layout, key_positions=positions, runs=None, from_start=False)
