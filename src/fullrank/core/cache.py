"""Keys and values of what was already read: decoding one token at a time without reading the text again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullrank.core.attention import KeyValues, Past
from fullrank.core.errors import InputError


@dataclass(frozen=True)
class Cache:
    """A value: pass it in, take the next one out.

    layers: keys, values (B, H, M, D) and keys of distances of each layer, None before the first token; or sums that stand
    for all tokens so far, where a layer needs no more.
    key_mask (B, M), True for tokens and False for padding; None when nothing was padded.
    clamp_length: what the keys of distances were clamped at.
    """

    layers: tuple[Past | None, ...]
    key_mask: Tensor | None = None
    clamp_length: int | None = None

    @property
    def length(self) -> int:
        """M, tokens and padding read so far."""
        first = self.layers[0]
        return 0 if first is None else first.length

    @property
    def texts(self) -> int | None:
        """B, None before the first token."""
        return None if self.layers[0] is None else self.layers[0].texts

    @property
    def croppable(self) -> bool:
        """Whether the last tokens can be taken out again: of keys and values, not of sums."""
        return all(past is None or isinstance(past, KeyValues) for past in self.layers)

    def first(self, length: int) -> Cache:
        """The cache of the first `length` tokens and padding.

        Raises InputError where layers keep sums: they cannot be parted again.
        """
        if length >= self.length:
            return self
        if not self.croppable:
            raise InputError(
                "output_map decayed keeps sums over all earlier tokens, which cannot be parted again; "
                "read the text anew"
            )
        layers = tuple(past.first(length) if isinstance(past, KeyValues) and length else None for past in self.layers)
        mask = None if self.key_mask is None or not length else self.key_mask[:, :length]
        return replace(self, layers=layers, key_mask=mask)

    def clamped(self, length: int | None) -> Cache:
        """The cache for a model that clamps distances at `length`: without keys of distances that were clamped otherwise."""
        if length == self.clamp_length:
            return self
        layers = tuple(kv._replace(relative=None) if isinstance(kv, KeyValues) else kv for kv in self.layers)
        return replace(self, layers=layers, clamp_length=length)

    def check(self, layers: int, rows: int) -> None:
        """Raises InputError unless this is the cache of a model of `layers` layers that reads `rows` texts."""
        if len(self.layers) != layers:
            raise InputError(
                f"the cache has {len(self.layers)} layers, the model {layers}; begin with model.new_cache()"
            )
        first = self.layers[0]
        if first is not None and first.texts not in (None, rows):
            raise InputError(f"the cache holds {first.texts} texts, input_ids {rows}; see cache.reorder")

    def check_mask(self, past: Tensor) -> None:
        """Raises InputError if `past` (B, M) is not the mask that the cached tokens were read with."""
        known = torch.ones_like(past) if self.key_mask is None else self.key_mask
        if not torch.equal(past, known):
            raise InputError("attention_mask hides other earlier tokens than when they were read; read them again")

    def reorder(self, index: Tensor) -> Cache:
        """The cache of rows `index` (K,) of this one, in that order; rows may repeat (beams)."""
        layers = tuple(None if kv is None else kv.rows(index) for kv in self.layers)
        mask = None if self.key_mask is None else self.key_mask.index_select(0, index)
        return replace(self, layers=layers, key_mask=mask)

    def mask_after(self, new: Tensor | None, rows: int, tokens: int, device: torch.device) -> Tensor | None:
        """(B, M + N): the mask of old and new keys; `new` (B, N) or None where nothing is padded."""
        if self.key_mask is None and new is None:
            return None
        old = (
            self.key_mask
            if self.key_mask is not None
            else torch.ones(rows, self.length, dtype=torch.bool, device=device)
        )
        new = new if new is not None else torch.ones(rows, tokens, dtype=torch.bool, device=device)
        return torch.cat((old, new), dim=1)
