"""The masks of injected models: those of their own eager attention, which also know what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from fullrank.attention.layout import Layout


class _Meaning(NamedTuple):
    layout: Layout
    version: int  # of the mask when it was made: whoever writes into it makes another mask of it


def eager_mask(**given: Any) -> Tensor | None:
    """The additive mask (B, 1, N, M) of eager attention, or None where every query sees every key, made once for all layers."""
    mask: Tensor | None = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"](**given)
    if mask is not None and not torch.compiler.is_compiling() and (layout := _described(**given)) is not None:
        mask.fullrank_meaning = _Meaning(layout, mask._version)  # type: ignore[attr-defined]
    return mask


def _described(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], q_offset: int | Tensor = 0,
               kv_offset: int = 0, attention_mask: Tensor | None = None, device: torch.device | None = None,
               **others: Any) -> Layout | None:  # fmt: skip
    """Who sees whom, as a layout can say it; None where it cannot."""
    causal = mask_function is masking_utils.causal_mask_function
    if not causal and mask_function is not masking_utils.bidirectional_mask_function:
        return None
    if causal and (isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length):
        return None  # a cache with room for more: the queries are not the last of the keys
    tokens = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if tokens is not None:
        tokens = tokens[:, kv_offset : kv_offset + kv_length].bool()
        tokens = None if bool(tokens.all()) else tokens
    return Layout.of(q_length, kv_length, causal=causal, device=device, key_mask=tokens)


def layout_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Layout | None:
    """Who sees whom under a mask that `eager_mask` made; None where that is not known."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        return Layout.of(queries, keys, causal=False, device=query.device)
    meaning: _Meaning | None = getattr(mask, "fullrank_meaning", None)
    if meaning is None or meaning.version != mask._version or meaning.layout.shape != (queries, keys):
        return None
    return meaning.layout
