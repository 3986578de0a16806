"""Keys and values of tokens that were already read, so that decoding never reads a text twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InputError

_SMALLEST_BUFFER = 64  # tokens


class Buffer:
    """Storage (B, H, C, D) whose first `used` tokens are taken; C doubles when it is full.

    Several caches may share one storage. Each sees its own first tokens only. The cache that sees all taken tokens may write
    behind them, any other copies first: so a cache stays a value, also where two texts go on from one.
    """

    def __init__(self, storage: Tensor, used: int) -> None:
        self.storage, self.used = storage, used

    @classmethod
    def full(cls, tokens: Tensor | None) -> Buffer | None:
        """A buffer around `tokens` without space behind them: the next call allocates some."""
        return None if tokens is None else cls(tokens, -1)

    def append(self, length: int, new: Tensor) -> tuple[Tensor, Buffer]:
        """The first `length` tokens, then new ones (B, H, N, D), as a view (B, H, length + N, D), and its buffer."""
        buffer, end = self, length + new.shape[2]
        # a tensor made in inference mode must not be written outside of it
        frozen = self.storage.is_inference() and not torch.is_inference_mode_enabled()
        if self.used != length or end > self.storage.shape[2] or frozen:
            batch, heads, _, width = self.storage.shape
            storage = new.new_empty(batch, heads, max(2 * length, end, _SMALLEST_BUFFER), width)
            storage[:, :, :length] = self.storage[:, :, :length]
            buffer = Buffer(storage, length)
        buffer.storage[:, :, length:end] = new
        buffer.used = end
        return buffer.storage[:, :, :end], buffer


def append(past: Tensor, buffer: Buffer | None, new: Tensor) -> tuple[Tensor, Buffer | None]:
    """Earlier tokens (B, H, M, D), then new ones (B, H, N, D): (B, H, M + N, D), without a copy where the buffer has space.

    With gradients, in compiled code and for another dtype they are concatenated, without a buffer.
    """
    if buffer is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or past.dtype != new.dtype:
        return torch.cat((past.to(new.dtype), new), dim=2), None
    return buffer.append(past.shape[2], new)


class KeyValues(NamedTuple):
    """Keys and values (B, H, M, D) of earlier tokens, and keys of distances (H, T, D).

    keys is None where the score has none, relative where it reads no distances; T may be more than is needed yet.
    buffers: of keys and values, where new tokens may be written behind them.
    """

    keys: Tensor | None
    values: Tensor
    relative: Tensor | None = None
    buffers: tuple[Buffer | None, Buffer | None] = (None, None)

    @property
    def length(self) -> int:
        """M."""
        return self.values.shape[2]

    @property
    def batch(self) -> int:
        """B."""
        return self.values.shape[0]

    def rows(self, index: Tensor) -> KeyValues:
        """Rows `index` (K,) of the batch; distances are the same for all rows."""
        return self._each(lambda heads: heads.index_select(0, index))

    def first(self, length: int) -> KeyValues:
        """The first `length` tokens."""
        return self._each(lambda heads: heads[:, :, :length])

    def last(self, length: int) -> KeyValues:
        """The last `length` tokens, without their buffers."""
        return self._each(lambda heads: heads[:, :, -length:])

    def columns(self, order: Tensor) -> KeyValues:
        """The tokens `order` (B, K) of each row."""
        column = order[:, None, :, None]
        return self._each(lambda heads: heads.gather(2, column.expand(-1, heads.shape[1], -1, heads.shape[3])))

    def _each(self, select: Callable[[Tensor], Tensor]) -> KeyValues:
        return KeyValues(None if self.keys is None else select(self.keys), select(self.values), self.relative)


@dataclass(frozen=True)
class DecayedSums:
    """Decayed sums A_s and B_s of keys and values, (B, S, R) each, over `length` earlier tokens; None: no token yet."""

    keys: Tensor | None = None
    values: Tensor | None = None
    length: int = 0

    @property
    def batch(self) -> int | None:
        """B, None before the first token."""
        return None if self.keys is None else self.keys.shape[0]

    def rows(self, index: Tensor) -> DecayedSums:
        """Rows `index` (K,) of the batch."""
        if self.keys is None or self.values is None:
            return self
        return DecayedSums(self.keys.index_select(0, index), self.values.index_select(0, index), self.length)


Past = KeyValues | DecayedSums  # one layer's record of earlier tokens


@dataclass(frozen=True)
class Cache:
    """The record of every layer: a value that goes into a call and comes out of it anew.

    layers: None before the first token.
    key_mask (B, M), True for tokens and False for padding; None when nothing was padded.
    clamp_length: the length at which the keys of distances were clamped.
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
    def batch(self) -> int | None:
        """B, None before the first token."""
        return None if self.layers[0] is None else self.layers[0].batch

    @property
    def croppable(self) -> bool:
        """True if the last tokens can be taken out again: keys and values can, sums cannot."""
        return all(past is None or isinstance(past, KeyValues) for past in self.layers)

    def first(self, length: int) -> Cache:
        """The cache of the first `length` tokens and padding. Raises InputError for a layer that keeps sums."""
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
        """The cache for distances clamped at `length`, without keys of distances that were clamped otherwise."""
        if length == self.clamp_length:
            return self
        layers = tuple(past._replace(relative=None) if isinstance(past, KeyValues) else past for past in self.layers)
        return replace(self, layers=layers, clamp_length=length)

    def check(self, layers: int, batch: int) -> None:
        """Raises InputError unless the cache belongs to a model of `layers` layers that reads `batch` rows."""
        if len(self.layers) != layers:
            raise InputError(
                f"the cache has {len(self.layers)} layers, the model {layers}; begin with model.new_cache()"
            )
        if self.batch not in (None, batch):
            raise InputError(f"the cache holds {self.batch} rows, input_ids {batch}; see cache.reorder")

    def check_mask(self, past: Tensor) -> None:
        """Raises InputError if `past` (B, M) is not the mask that the cached tokens were read with."""
        known = torch.ones_like(past) if self.key_mask is None else self.key_mask
        if not torch.equal(past, known):
            raise InputError("attention_mask hides other earlier tokens than when they were read; read them again")

    def reorder(self, index: Tensor) -> Cache:
        """The cache of rows `index` (K,), in that order; rows may repeat (beams)."""
        layers = tuple(None if past is None else past.rows(index) for past in self.layers)
        mask = None if self.key_mask is None else self.key_mask.index_select(0, index)
        return replace(self, layers=layers, key_mask=mask)

    def mask_after(self, new: Tensor | None, batch: int, tokens: int, device: torch.device) -> Tensor | None:
        """The mask (B, M + N) of old and new keys; `new` (B, N) or None where nothing is padded."""
        if self.key_mask is None and new is None:
            return None
        old, recent = (
            torch.ones(batch, count, dtype=torch.bool, device=device) if mask is None else mask
            for mask, count in ((self.key_mask, self.length), (new, tokens))
        )
        return torch.cat((old, recent), dim=1)
