"""Which keys each query sees, as numbers that a kernel can compare: an interval of keys, and which of them are tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.core.layout import Layout


@dataclass(frozen=True)
class Sight:
    """Query n sees the keys first[n] <= k < end[n] that are tokens, and key own[n] whether it is one or not.

    first, end, own (N,) int32, on the CPU: own[n] is -1 where a query has no such key.
    tokens (B, M) boolean, None where every key is a token: see `tokens_of`.
    """

    first: Tensor
    end: Tensor
    own: Tensor
    tokens: Tensor | None


def sight_of(layout: Layout) -> Sight | None:
    """The same as `layout.visible()`; None where that is no such interval: a window over rows that differ, or without order."""
    queries, keys = layout.shape
    own = torch.arange(keys - queries, keys, dtype=torch.int32, device="cpu")  # wherever tensors are made by default
    if not layout.causal:
        if layout.narrow:
            return None
        nothing = torch.zeros_like(own)
        return Sight(nothing, nothing + keys, nothing - 1, tokens_of(layout))
    first = torch.zeros_like(own)
    if layout.narrow:
        if layout.runs is None or layout.window is None:
            return None
        places = torch.cat([torch.arange(start, start + size, device="cpu") for start, size in layout.runs])
        first = torch.searchsorted(places, places[keys - queries :] - layout.window, right=True).to(torch.int32)
    return Sight(first, own + 1, own, tokens_of(layout))


def tokens_of(layout: Layout) -> Tensor | None:
    """Which keys count as tokens, (B, M) or None for all: where a query is no key, a text without any token is seen whole."""
    mask = layout.key_mask
    return mask if mask is None or layout.causal else mask | ~mask.any(-1, keepdim=True)
