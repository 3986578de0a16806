"""What a decoder reads beside its own tokens: the source, as the encoder left it or as keys and values of every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fullrank.attention.layer import KeyValues
from fullrank.attention.layout import Layout


@dataclass(frozen=True)
class Source:
    """Sentences as the encoder made them: hidden (B, M, E), mask (B, M) True for tokens, None when nothing is padded."""

    hidden: Tensor
    mask: Tensor | None = None

    @property
    def texts(self) -> int:
        """B."""
        return self.hidden.shape[0]

    def of_layer(self, layer: int, queries: int) -> Across:
        """What layer `layer` reads for `queries` tokens of each sentence."""
        return Across(self.hidden, _layout(queries, self.hidden.shape[1], self.mask, self.hidden.device))


class Across(NamedTuple):
    """What cross-attention of one layer reads: hidden states (B, M, E), or keys and values made of them; who sees what."""

    source: Tensor | KeyValues
    layout: Layout


@dataclass(frozen=True)
class Projected:
    """The source while a translation is written: keys and values of each layer, one row a sentence.

    rows: what each text that is being written translates, (R,), ascending. Several texts of one sentence (beams) read one
    row together, as if they were its queries: cross-attention has no order among queries.
    """

    layers: tuple[KeyValues, ...]
    mask: Tensor | None
    rows: Tensor

    def of_layer(self, layer: int, queries: int) -> Across:
        """What layer `layer` reads for `queries` tokens of each text; texts of one sentence count together."""
        known = self.layers[layer]
        together = queries * (self.rows.shape[0] // max(1, known.texts))
        return Across(known, _layout(together, known.length, self.mask, known.values.device))

    def reorder(self, index: Tensor) -> Projected:
        """For the texts `index` (K,) of those now, in that order; they may repeat."""
        rows = self.rows.index_select(0, index)
        kept, counts = torch.unique_consecutive(rows, return_counts=True)
        if not bool((counts == counts[0]).all()) or kept.unique().numel() < kept.numel():
            kept, counts = rows, torch.ones_like(rows)  # not groups of one size: a row for each
        now = torch.arange(kept.numel(), device=kept.device)
        texts = self.layers[0].texts
        if kept.numel() == texts and torch.equal(kept, now):
            return replace(self, rows=rows)
        layers = tuple(known.rows(kept) for known in self.layers)
        mask = None if self.mask is None else self.mask.index_select(0, kept)
        return Projected(layers, mask, now.repeat_interleave(counts))


def _layout(queries: int, keys: int, mask: Tensor | None, device: torch.device) -> Layout:
    return Layout.of(queries, keys, causal=False, device=device, key_mask=mask)
