"""Caches of Hugging Face for our models: keys and values, decayed sums, or Transformer-XL's memory; and their padding."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import Cache as HuggingFaceCache
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from fullrank.core.cache import Cache
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory

State: TypeAlias = Cache | Memory
Held = TypeVar("Held", Cache, Memory)


class StateLayer(CacheLayerMixin):
    """The one layer of our caches: it holds the state of all layers of a model, which is one value.

    The value itself never changes. The methods that Hugging Face calls replace it by another one.
    """

    supports_early_init = False
    is_sliding = False

    def __init__(self, state: State | None = None) -> None:
        super().__init__()
        self.state = state

    def state_of(self, kind: type[Held]) -> Held | None:
        """The state, None at the beginning; InputError if it is that of another kind of model."""
        if self.state is not None and not isinstance(self.state, kind):
            raise InputError(
                f"past_key_values: holds a {type(self.state).__name__}, of another model or of this one with another "
                "memory_length; begin with FullRankCache()"
            )
        return self.state

    def keep(self, state: State | None, device: torch.device) -> None:
        """Hold the state after a call."""
        self.state, self.device = state, device

    @property
    def is_croppable(self) -> bool:
        """True if the last tokens can be taken out again: keys and values can, sums and a memory cannot."""
        return self.state is None or (isinstance(self.state, Cache) and self.state.croppable)

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first token."""
        return -1 if self.state is None else self.state.batch or -1

    def get_seq_length(self) -> int:
        """Tokens and padding read so far, forgotten ones of a memory included."""
        return 0 if self.state is None else self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a model sets the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise InputError("the cache of a fullrank model holds what that model has read; no other model can write to it")

    def reset(self) -> None:
        self.state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows `beam_idx`, in that order; they may repeat."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; InputError where that is impossible."""
        if tokens_to_remove > 0:
            raise InputError(f"crop: a number below zero, the tokens to take out again, given {tokens_to_remove}")
        if tokens_to_remove == 0 or self.state is None:
            return
        if isinstance(self.state, Memory):
            raise InputError(
                "a memory cannot forget its last tokens again: what they pushed out of it is gone; decode without speculation, "
                "or with a memory of 0 (memory_length=0 in from_pretrained)"
            )
        self.state = self.state.first(max(0, self.get_seq_length() + tokens_to_remove))


class FullRankCache(HuggingFaceCache):
    """`past_key_values` of our models: a mutable holder of the state after the tokens read so far.

    An empty one begins a text; a model puts the state of the next call into it. `generate` makes its own.
    """

    def __init__(self, state: State | None = None) -> None:
        super().__init__(layers=[StateLayer(state)])

    @property
    def state(self) -> State | None:
        """`Cache` or `Memory` of our models; None at the beginning."""
        state: State | None = self.layers[0].state
        return state


def layer_of(past: Any) -> StateLayer | None:
    """The layer of a cache that holds our state; an empty `DynamicCache`, which `generate` makes, gets such a layer.

    Raises InputError for caches of other kinds, and for one that another model has filled.
    """
    if past is None:
        return None
    cache = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
    if isinstance(cache, HuggingFaceCache) and cache.layers and isinstance(cache.layers[0], StateLayer):
        return cache.layers[0]
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = "an offloaded cache" if isinstance(cache, DynamicCache) else f"a {type(cache).__name__}"
        raise InputError(f"past_key_values: a FullRankCache or an empty DynamicCache, given {kind}")
    if cache.get_seq_length():
        raise InputError("past_key_values: holds what another model has read; begin with FullRankCache()")
    layer = StateLayer()
    cache.layers[:] = [layer]
    return layer


# -- padding -----------------------------------------------------------------------------------------------------------


def mask_of_new(
    attention_mask: Tensor | None, input_ids: Tensor, state: Cache | Memory | None, *, hidden_behind: bool
) -> Tensor | None:
    """The mask (B, N) of new tokens, None where it changes nothing: engines are faster without one.

    attention_mask (B, N), or (B, M + N) with the M tokens that `state` has read. hidden_behind: no token sees a later one and
    nothing follows this call, so that padding behind a text has no effect.
    Raises InputError for other shapes.
    """
    if attention_mask is None:
        return None
    rows, tokens = input_ids.shape
    past = 0 if state is None else state.length
    if attention_mask.dim() != 2 or attention_mask.shape not in {(rows, tokens), (rows, past + tokens)}:
        allowed = (rows, tokens) if not past else f"{(rows, tokens)} or {(rows, past + tokens)}"
        raise InputError(
            f"attention_mask: {allowed} for input_ids {(rows, tokens)}, given {tuple(attention_mask.shape)}"
        )
    mask = attention_mask.bool()
    new = mask[:, mask.shape[1] - tokens :]
    if not tokens:
        return new
    padded = ~new
    if hidden_behind and not past:  # only padding before a token counts
        padded = torch.cat((~new[:, :1], new[:, 1:] & ~new[:, :-1]), dim=1)
    return new if bool(padded.any()) else None
