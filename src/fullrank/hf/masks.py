"""Masks of injected models: the masks of eager attention, and the layouts that they describe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from fullrank.core.layout import Layout


class _Description(NamedTuple):
    """The layout of a mask as it was at `version`: a mask that was written into is another one."""

    layout: Layout | None
    version: int


def eager_mask(**arguments: Any) -> Tensor | None:
    """The additive mask (B, 1, N, M) of eager attention, or None where every query sees every key, made once for all layers."""
    mask: Tensor | None = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"](**arguments)
    if mask is not None and not torch.compiler.is_compiling() and (layout := _described(**arguments)) is not None:
        _note(mask, layout)
    return mask


def layout_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Layout | None:
    """The layout of a mask, None where none describes it. A mask without description is read once, by the first layer."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        return Layout.of(queries, keys, causal=False, device=query.device)
    if torch.compiler.is_compiling():
        return None
    known: _Description | None = None if mask.is_inference() else getattr(mask, "fullrank_layout", None)
    if known is None or known.version != mask._version:
        known = _note(mask, _read(mask))
    fits = known.layout is not None and known.layout.shape == (queries, keys)
    return known.layout if fits else None


def _note(mask: Tensor, layout: Layout | None) -> _Description:
    if mask.is_inference():  # it does not count writes
        return _Description(layout, 0)
    description = _Description(layout, mask._version)
    mask.fullrank_layout = description  # type: ignore[attr-defined]
    return description


def _described(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], q_offset: int | Tensor = 0,
               kv_offset: int = 0, attention_mask: Tensor | None = None, device: torch.device | None = None,
               **others: Any) -> Layout | None:  # fmt: skip
    """The layout of a mask that transformers makes of these arguments, None where no layout describes it."""
    causal, window = _kind(mask_function)
    if causal is None or (causal and (isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length)):
        return None  # also a cache with room for more: its queries are not the last of the keys
    tokens = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if tokens is not None:
        tokens = _unless_all(tokens[:, kv_offset : kv_offset + kv_length].bool())
    return Layout.of(q_length, kv_length, causal=causal, device=device, key_mask=tokens, window=window)


def _kind(mask_function: Callable[..., Any]) -> tuple[bool | None, int | None]:
    """True for a causal mask function, and its window; (None, None) for one that is not known."""
    if mask_function is masking_utils.bidirectional_mask_function:
        return False, None
    if mask_function is masking_utils.causal_mask_function:
        return True, None
    parts = list(_closure(mask_function).get("mask_functions", ()))
    windowed = len(parts) == 2 and parts[0].__qualname__.startswith("sliding_window_overlay.")
    if windowed and parts[1] is masking_utils.causal_mask_function:
        return True, _closure(parts[0])["sliding_window"]
    return None, None


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function holds from the function that made it."""
    closed = inspect.isfunction(function) and function.__closure__ is not None
    return dict(inspect.getclosurevars(function).nonlocals) if closed else {}


def _read(mask: Tensor) -> Layout | None:
    """The layout of an additive mask (B or 1, 1, N or 1, M), read from its numbers: causal, padding, or both."""
    if mask.dim() != 4 or mask.shape[1] != 1 or not mask.is_floating_point() or mask.requires_grad:
        return None
    hidden = mask[:, 0] <= torch.finfo(mask.dtype).min / 2
    if bool((mask[:, 0].masked_fill(hidden, 0) != 0).any()):
        return None  # it is a bias as well
    queries, keys = mask.shape[2:]
    tokens = ~hidden[:, -1]  # the last query sees every token before it, which are all
    if torch.equal(hidden, ~tokens[:, None].expand_as(hidden)):
        return Layout.of(queries, keys, causal=False, device=mask.device, key_mask=_unless_all(tokens))
    if queries <= keys:
        before = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
        if torch.equal(hidden, ~(before & tokens[:, None])):
            return Layout.of(queries, keys, causal=True, device=mask.device, key_mask=_unless_all(tokens))
    return None


def _unless_all(tokens: Tensor) -> Tensor | None:
    return None if bool(tokens.all()) else tokens
