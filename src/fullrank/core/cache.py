"""Keys and values of tokens that were already read, so that decoding never reads a text twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import InputError
from .layout import Layout, State, find_positions, read_mask

_SMALLEST_BUFFER = 64  # tokens
_LANES = 16  # numbers of a vector of the C++ kernel, in fp32


def take_rows(tensor: Tensor | None, index: Tensor) -> Tensor | None:
    """Take rows `index` (K,) of a tensor whose first dimension is the batch; None stays None."""
    return None if tensor is None else tensor.index_select(0, index)


class Buffer:
    """Storage (B, H, C, D or more) whose first `used` tokens are taken; new storage has room for twice the tokens seen.

    Several caches may share one storage. Each sees some consecutive tokens of it. The cache that sees the last taken token may
    write behind it, any other copies first. So a cache stays a value, also where two texts go on from one.
    On a CPU a row takes a multiple of `_LANES` numbers, the rest of them zeros, so that a kernel reads it in place.
    """

    def __init__(self, storage: Tensor, used: int = -1) -> None:
        self.storage = storage
        self.used = used

    def append(self, old: Tensor, new: Tensor) -> tuple[Tensor, Buffer]:
        """Append new tokens (B, H, N, D) to seen ones (B, H, M, D); return a view (B, H, M + N, D) and its buffer."""
        buffer = self
        added, width = new.shape[2:]
        numbers_before = old.storage_offset() - self.storage.storage_offset()
        start = numbers_before // max(1, self.storage.stride(2))
        seen = start + old.shape[2]
        # a tensor made in inference mode must not be written outside of it
        frozen = self.storage.is_inference() and not torch.is_inference_mode_enabled()
        if self.used != seen or self.storage.shape[2] < seen + added or frozen:
            buffer = self.copy(old, added)
            start = 0
            seen = old.shape[2]
        end = seen + added
        buffer.storage[:, :, buffer.used : end, :width] = new
        buffer.used = end
        return buffer.storage[:, :, start:end, :width], buffer

    def copy(self, old: Tensor, more: int) -> Buffer:
        """Copy seen tokens (B, H, M, D) to the start of another buffer, with room for `more` at least."""
        batch, heads, length, width = old.shape
        padding = -width % _LANES if old.device.type == "cpu" else 0
        room = max(2 * length, length + more, _SMALLEST_BUFFER)
        storage: Any = old.new_empty(batch, heads, room, width + padding)
        storage[..., width:] = 0
        storage.ends_in_zeros = True  # a kernel asks the base of the views for it
        storage[:, :, :length, :width] = old
        return Buffer(storage, length)


def join_tokens(old: Tensor | None, buffer: Buffer | None, new: Tensor | None) -> tuple[Tensor | None, Buffer | None]:
    """Append new tokens to old ones.

    They are concatenated where there is no buffer, with gradients, in compiled code and for another dtype.

    Args:
        old: (B, H, M, D), or None.
        buffer: holds the old tokens; None for none.
        new: (B, H, N, D), or None.

    Returns:
        All tokens (B, H, M + N, D), and their buffer, None after a concatenation. Without old or new tokens both are None.
    """
    if old is None or new is None:
        return None, None
    if buffer is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or old.dtype != new.dtype:
        return torch.cat((old.to(new.dtype), new), dim=2), None
    return buffer.append(old, new)


class KeyValues(NamedTuple):
    """Keys and values (B, G, M, D) of earlier tokens, and keys of distances (G, T, D).

    keys: None where the score has none.
    relative: None where the score reads no distances. T may be larger than the number of tokens.
    notes: what stages that mix heads remember of each token besides, (B, C, M, F) each; None for a stage that needs nothing.
    buffers: storage of keys, values and notes with room for new tokens; None after rows or tokens were selected, () before any
    were appended.
    """

    keys: Tensor | None
    values: Tensor
    relative: Tensor | None = None
    notes: tuple[Tensor | None, ...] = (None, None)
    buffers: tuple[Buffer | None, ...] = ()

    @property
    def parts(self) -> tuple[Any, ...]:
        """Keys, values and notes."""
        return self.keys, self.values, *self.notes

    def append(self, new: KeyValues) -> KeyValues:
        """Append new tokens; their keys of distances take the place of those here."""
        buffers = self.buffers or map(Buffer, self.parts)
        joined: Any = map(join_tokens, self.parts, buffers, new.parts)
        (keys, values, *notes), after = zip(*joined, strict=True)
        return KeyValues(keys, values, new.relative, tuple(notes), after)

    @property
    def length(self) -> int:
        return self.values.shape[2]

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    def select(self, choose: Callable[[Tensor], Tensor]) -> KeyValues:
        """Select the part of keys, values and notes that `choose` takes, without their buffers."""
        chosen: Any = (None if part is None else choose(part) for part in self.parts)
        keys, values, *notes = chosen
        return KeyValues(keys, values, self.relative, tuple(notes), (None,) * len(self.parts))

    def last(self, limit: int) -> KeyValues:
        """Take the last `limit` tokens, with their buffers."""
        if self.length <= limit:
            return self
        tokens = self.select(lambda part: part[:, :, -limit:])
        return tokens._replace(buffers=self.buffers)

    def rows(self, index: Tensor) -> KeyValues:
        """Take rows `index` (K,), in that order; rows may repeat."""
        return self.select(lambda heads: heads.index_select(0, index))

    def crop(self, length: int) -> KeyValues:
        """Take the first `length` tokens."""
        return self.select(lambda heads: heads[:, :, :length])


class DecayedSums(NamedTuple):
    """Decayed sums A_s and B_s of keys and values, (B, S, R) each, over `length` earlier tokens; None: no token yet."""

    keys: Tensor | None = None
    values: Tensor | None = None
    length: int = 0

    @property
    def batch(self) -> int | None:
        return None if self.keys is None else self.keys.shape[0]

    def rows(self, index: Tensor) -> DecayedSums:
        """Take rows `index` (K,), in that order; rows may repeat."""
        return DecayedSums(take_rows(self.keys, index), take_rows(self.values, index), self.length)


Past = KeyValues | DecayedSums  # one layer's record of earlier tokens


@dataclass(frozen=True)
class Cache:
    """The record of every layer, a value: a call takes it as input and returns another one.

    layers: None before the first token.
    key_mask (B, M), True for tokens and False for padding; None when nothing was padded.
    documents (B, M): the number of each token's document; None for a model without documents.
    """

    layers: tuple[Past | None, ...]
    key_mask: Tensor | None = None
    documents: Tensor | None = None

    @property
    def length(self) -> int:
        """M, tokens and padding read so far."""
        first = self.layers[0]
        return 0 if first is None else first.length

    @property
    def batch(self) -> int | None:
        return None if self.layers[0] is None else self.layers[0].batch

    @property
    def croppable(self) -> bool:
        """True if the last tokens can be taken out again: those of keys and values can, those of sums cannot."""
        return all(past is None or isinstance(past, KeyValues) for past in self.layers)

    def crop(self, length: int) -> Cache:
        """Take the first `length` tokens; InputError for sums, whose last tokens cannot be taken out again."""
        if length >= self.length:
            return self
        if not self.croppable:
            raise InputError(
                "output_map decayed keeps sums over all earlier tokens, which cannot be parted again; "
                "read the text anew"
            )
        if length == 0:
            return Cache((None,) * len(self.layers))
        layers = tuple(past.crop(length) for past in self.layers if isinstance(past, KeyValues))
        mask = None if self.key_mask is None else self.key_mask[:, :length]
        documents = None if self.documents is None else self.documents[:, :length]
        return replace(self, layers=layers, key_mask=mask, documents=documents)

    def reorder(self, index: Tensor) -> Cache:
        """Take rows `index` (K,), in that order; rows may repeat (beams)."""
        layers = tuple(None if past is None else past.rows(index) for past in self.layers)
        mask = take_rows(self.key_mask, index)
        documents = take_rows(self.documents, index)
        return replace(self, layers=layers, key_mask=mask, documents=documents)

    def check(self, layers: int, batch: int) -> None:
        """Raise InputError unless the cache belongs to a model of `layers` layers that reads `batch` rows."""
        sizes = (len(self.layers), batch if self.batch is None else self.batch)
        if sizes != (layers, batch):
            raise InputError(
                f"the cache has (layers, rows) {sizes}, the model and input_ids {(layers, batch)}; see "
                "model.new_cache and cache.reorder"
            )

    def mask_after(self, mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
        """Join the masks of cached and new tokens to (B, M + N), None where none was ever given.

        mask: of the new tokens or of all, or None. Raises InputError for another shape, and if it hides other cached tokens
        than when they were read.
        """
        if mask is None and self.key_mask is None:
            return None
        rows = len(input_ids)
        past = self.length
        old = self.key_mask
        if old is None:
            old = input_ids.new_ones(rows, past, dtype=torch.bool)
        if mask is not None and past and mask.shape == (rows, past + input_ids.shape[1]):
            if not torch.equal(mask[:, :past].bool(), old):
                raise InputError("attention_mask hides other earlier tokens than when they were read; read them again")
            mask = mask[:, past:]
        new = read_mask(mask, input_ids)
        if new is None:
            new = torch.ones_like(input_ids, dtype=torch.bool)
        return torch.cat((old, new), dim=1)


class CacheState(State):
    """New tokens after those of a cache; mask (B, M + N) of all of them."""

    keeps = True

    def __init__(self, cache: Cache, mask: Tensor | None, layout: Layout, place: Callable[..., Layout]) -> None:
        first = cache.layers[0]
        distance_keys = first.relative if isinstance(first, KeyValues) else None
        super().__init__(layout, partial(place, distance_keys=distance_keys, cached=True))
        self.cache = cache
        self.mask = mask
        self.layers = list(cache.layers)

    def enter(self, layer: int, x: Tensor) -> tuple[Layout, Past | None, None]:
        layout, _, _ = super().enter(layer, x)
        return layout, self.cache.layers[layer], None

    def leave(self, layer: int, x: Tensor, pasts: list[Past]) -> None:
        self.layers[layer] = pasts[0]

    def next(self) -> tuple[None, Cache]:
        documents = self.layout.documents
        return None, replace(self.cache, layers=tuple(self.layers), key_mask=self.mask, documents=documents)


# input of one layer's cross-attention: hidden states (B, M, E), or their keys and values, and the layout
CrossInput = tuple[Tensor | KeyValues, Layout]


@dataclass(frozen=True)
class Source:
    """Encoded sentences: hidden (B, M, E), mask (B, M) True for tokens, None when nothing is padded."""

    hidden: Tensor
    mask: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.hidden.shape[0]

    def get_layer_input(self, layer: int, queries: int) -> CrossInput:
        """Return what the cross-attention of layer `layer` reads, for `queries` target tokens of each sentence."""
        return self.hidden, _source_layout(queries, self.hidden.shape[1], self.mask, self.hidden.device)


@dataclass(frozen=True)
class TranslationCache:
    """Cache of a translation that is decoded, a value like `Cache`: the target `written` so far, and its source.

    layers: keys and values of the source for each layer, a row for each target row.
    mask: as in `Source`.
    rows (R,): the sentence that each target row translates.
    """

    written: Cache
    layers: tuple[KeyValues, ...]
    mask: Tensor | None
    rows: Tensor

    @property
    def length(self) -> int:
        return self.written.length

    @property
    def batch(self) -> int:
        return len(self.rows)

    def get_layer_input(self, layer: int, queries: int) -> CrossInput:
        heads = self.layers[layer]
        return heads, _source_layout(queries, heads.length, self.mask, heads.values.device)

    def reorder(self, index: Tensor) -> TranslationCache:
        """Take target rows `index` (K,), in that order; they may repeat (beams)."""
        written = self.written.reorder(index)
        rows = self.rows.index_select(0, index)
        if torch.equal(rows, self.rows):  # beams changed places within their sentences
            return replace(self, written=written)
        layers = tuple(heads.rows(index) for heads in self.layers)
        return TranslationCache(written, layers, take_rows(self.mask, index), rows)


def _source_layout(queries: int, keys: int, mask: Tensor | None, device: torch.device) -> Layout:
    layout = Layout.of(queries, keys, causal=False, device=device, key_mask=mask)
    if mask is None:
        return layout
    return replace(layout, key_positions=find_positions(mask), runs=None, from_start=False)
