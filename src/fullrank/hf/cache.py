"""What our models have read, as a cache of Hugging Face: keys and values, sums, or Transformer-XL's memory."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache as HuggingFaceCache
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from fullrank.core.cache import Cache
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory
from fullrank.core.translator import TranslationCache

State: TypeAlias = Cache | Memory | TranslationCache


class StateLayer(CacheLayerMixin):
    """The one layer of our caches; it holds the value that all layers of a model have together.

    The value itself never changes. What Hugging Face's methods change is which value is held.
    """

    supports_early_init = False
    is_sliding = False

    def __init__(self, state: State | None = None) -> None:
        super().__init__()
        self.state = state

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken out again: of keys and values, not of sums or of a memory."""
        state = self.state.written if isinstance(self.state, TranslationCache) else self.state
        return state is None or (isinstance(state, Cache) and state.croppable)

    @property
    def batch_size(self) -> int:
        """Texts; -1 before the first token."""
        return -1 if self.state is None else self.state.batch or -1

    def get_seq_length(self) -> int:
        """Tokens and padding read so far, all of them, also those that a memory has forgotten."""
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

    def offload(self) -> None:
        raise InputError("the cache of a fullrank model stays on its device; leave offloading out")

    prefetch = offload

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The texts `beam_idx`, in that order; they may repeat."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None and (texts := self.batch_size) > 0:
            self.reorder_cache(torch.arange(texts, device=_device(self.state)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; InputError where nobody can."""
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


def _device(state: State) -> torch.device | None:
    tensors = [tensor for tensor in _tensors(state) if tensor is not None]
    return tensors[0].device if tensors else None


def _tensors(state: State) -> list[Tensor | None]:
    if isinstance(state, TranslationCache):
        return [state.source.rows]
    if isinstance(state, Memory):
        return [state.lengths, *(layer.hidden for layer in state.layers)]
    return [None if past is None else past.values for past in state.layers]


class FullRankCache(HuggingFaceCache):
    """`past_key_values` of our models: a mutable box around what was read.

    An empty one begins a text; a model that is handed it puts into it what the next call needs. `generate` makes its own.
    """

    def __init__(self, state: State | None = None) -> None:
        super().__init__(layers=[StateLayer(state)])

    @property
    def state(self) -> State | None:
        """What was read: `Cache`, `Memory` or `TranslationCache` of our models; None at the beginning."""
        state: State | None = self.layers[0].state
        return state


def layer_of(past: Any) -> StateLayer:
    """The layer of a cache that holds our value; the empty `DynamicCache` that `generate` makes becomes such a cache.

    Raises InputError for caches of other kinds, and for one that another model has filled.
    """
    box = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
    layers = getattr(box, "layers", None)
    if isinstance(box, HuggingFaceCache) and layers and isinstance(layers[0], StateLayer):
        return layers[0]
    if not isinstance(box, DynamicCache) or box.offloading:
        kind = "an offloaded cache" if isinstance(box, DynamicCache) else f"a {type(box).__name__}"
        raise InputError(
            f"past_key_values: a FullRankCache or an empty DynamicCache, given {kind}; leave cache_implementation out"
        )
    if box.get_seq_length():
        raise InputError("past_key_values: holds what another model has read; begin with FullRankCache()")
    box.layers[:] = [StateLayer()]
    layer: StateLayer = box.layers[0]
    return layer
