"""Attention masks as Hugging Face's tools give them, and as our models take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullrank.core.cache import Cache
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory


def mask_of_new(attention_mask: Tensor | None, input_ids: Tensor, state: Any, *, alone: bool) -> Tensor | None:
    """The mask (B, N) of new tokens, None where it changes nothing: then the fast kernels serve.

    attention_mask (B, N), or (B, M + N) with what `state` has read. `alone`: nothing comes after these tokens, and none sees a
    later one, so that padding behind a text is seen by nobody.
    Raises InputError for other shapes, and for a mask that hides other earlier tokens than when they were read.
    """
    if attention_mask is None:
        return None
    rows, tokens = input_ids.shape
    past = 0 if state is None else state.length
    if attention_mask.dim() != 2 or attention_mask.shape not in {(rows, tokens), (rows, past + tokens)}:
        wanted = (rows, tokens) if not past else f"{(rows, tokens)} or {(rows, past + tokens)}"
        raise InputError(
            f"attention_mask: {wanted} for input_ids {(rows, tokens)}, given {tuple(attention_mask.shape)}"
        )
    mask = attention_mask.bool()
    new = mask[:, mask.shape[1] - tokens :]
    if past and mask.shape[1] > tokens:
        _check_past(mask[:, :past], state)
    if not tokens:
        return new
    needed = new[:, 1:] & ~new[:, :-1] if alone and not past else ~new  # padding before tokens, or anywhere
    if alone and not past:
        needed = needed.any() | ~new[:, :1].any()
    return new if bool(needed.any()) else None


def _check_past(past: Tensor, state: Any) -> None:
    if isinstance(state, Cache):
        state.check_mask(past)
    elif isinstance(state, Memory):
        read = torch.full_like(past[:, 0], state.length, dtype=torch.int64) if state.lengths is None else state.lengths
        if not torch.equal(past.sum(1), read):
            raise InputError("attention_mask hides other earlier tokens than when they were read; read them again")
