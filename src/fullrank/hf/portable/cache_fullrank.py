"""What layers keep of the text so far, as layers of a Hugging Face cache: keys and values, or a memory of hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class Known(NamedTuple):
    """Of earlier tokens: hidden (B, M, E), inputs of a layer, or their keys and values (B, H, M, D); relative (H, T, D)."""

    hidden: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    relative: Tensor | None = None


NOTHING = Known()


class TextLayer(CacheLayerMixin):
    """One layer's part of a cache, for the last `limit` tokens, or for all where limit is None.

    keys, values (B, H, M, D); where there is a limit also hidden (B, M, E), the layer's inputs: Transformer-XL's memory, of
    which keys and values are made anew where gradients are needed. places (B or 1, M): positions in the text; mask (B, M):
    False for padding, None without. relative (H, T, D): keys of distances. seen: tokens and padding read so far.
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.limit = limit
        self.reset()

    def reset(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.hidden: Tensor | None = None
        self.relative: Tensor | None = None
        self.places: Tensor | None = None
        self.mask: Tensor | None = None
        self.order: Tensor | None = None  # of the columns that are kept, where texts are padded
        self.seen = 0

    @property
    def next_positions(self) -> Tensor | int:
        """Where each text goes on: an integer, or (B, 1) where texts differ."""
        if self.places is None:
            return 0
        if self.mask is None:
            return self.places[:, -1:] + 1
        return self.places.masked_fill(~self.mask, -1).max(dim=1, keepdim=True).values + 1

    def begin(self, places: Tensor, mask: Tensor | None, tokens: int) -> None:
        """Before `tokens` new ones are read: positions and mask of what is kept and of them."""
        self.order = None
        if mask is not None and self.limit is not None:
            # padding goes to the left of every row, so that the last tokens of a row are its last columns
            self.order = mask.to(torch.uint8).argsort(dim=1, stable=True)[:, -self.limit :]
            places, mask = places.expand(len(mask), -1).gather(1, self.order), mask.gather(1, self.order)
        self.places = places if self.limit is None else places[:, -self.limit :]
        self.mask = mask
        self.seen += tokens

    def known(self, reusable: bool) -> Known:
        """What the next call reads. Not `reusable`: a gradient is needed, and nothing that has none or no dropout may serve."""
        if self.limit is None:
            return Known(None, self.keys, self.values, self.relative if reusable else None)
        return Known(self.hidden, self.keys, self.values, self.relative) if reusable else Known(self.hidden)

    def keep(self, hidden: Tensor, made: Known, reusable: bool) -> None:
        """New inputs (B, N, E) of the layer, and keys and values of what was kept and of them."""
        self.is_initialized = True
        self.relative = made.relative if reusable else None
        if self.limit is None:
            self.keys, self.values = made.keys, made.values
            return
        hidden = hidden.detach()
        if self.hidden is not None:
            hidden = torch.cat((self.hidden.to(hidden.dtype), hidden), dim=1)
        self.hidden = self._last(hidden, 1)
        self.keys = self._last(made.keys, 2) if reusable and made.keys is not None else None
        self.values = self._last(made.values, 2) if reusable and made.values is not None else None

    def _last(self, tokens: Tensor, dim: int) -> Tensor:
        """The last `limit` along `dim`; padding apart."""
        assert self.limit is not None
        if self.order is None:
            return tokens.narrow(dim, max(0, tokens.shape[dim] - self.limit), min(self.limit, tokens.shape[dim]))
        order = self.order[:, :, None] if dim == 1 else self.order[:, None, :, None]
        shape = list(tokens.shape)
        shape[dim] = self.order.shape[1]
        return tokens.gather(dim, order.expand(shape))

    # -- what a Hugging Face cache asks of its layers ---------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the layers of a fullrank model fill their cache with `keep`")

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("keys", "values", "hidden", "mask"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, change(tensor))
        if self.places is not None and len(self.places) > 1:
            self.places = change(self.places)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each_row(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each_row(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each_row(lambda tensor: tensor[indices])

    def offload(self) -> None:
        raise NotImplementedError("a fullrank model keeps its cache on its own device")
