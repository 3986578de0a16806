"""Questions about a call of weighted attention that several kernels ask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.engine import Problem
from fullrank.core.layout import Layout

NO_NUMBERS = "there are no numbers"
TWO_DTYPES = "query, keys and values must have one dtype"
NO_FIT = "the shapes do not fit each other"
NO_INTERVAL = "a window needs causal keys whose positions are the same in all sequences"
NO_RUNS = "relative scores need causal keys whose positions are the same in all sequences"


def is_plain(problem: Problem) -> bool:
    """Scaled dot product, softmax, no mixing: the attention of PyTorch's fused kernels."""
    return problem.mixing is None and problem.distances is None and problem.normalize == "softmax"


def fits(problem: Problem) -> bool:
    """Whether all shapes are those of `Problem`; the definition broadcasts others, or refuses them."""
    (batch, heads, queries, width), keys = problem.query.shape, problem.keys.shape[2]
    mixing, distances, mask = problem.mixing, problem.distances, problem.layout.key_mask
    return (
        problem.keys.shape == problem.values.shape == (batch, heads, keys, width)
        and problem.layout.shape == (queries, keys)
        and (mixing is None or mixing.shape in ((heads, heads), (batch, queries, heads, heads)))
        and (mask is None or mask.shape in ((1, keys), (batch, keys)))
        and (distances is None or distances.keys.shape == (heads, problem.layout.distances, width))
    )


def differentiable(problem: Problem) -> list[Tensor]:
    """The tensors for which gradients may be asked."""
    tensors: list[Tensor | None] = [problem.query, problem.keys, problem.values, problem.mixing]
    if problem.distances is not None:
        tensors += [problem.distances.keys, problem.distances.u, problem.distances.v]
    return [tensor for tensor in tensors if tensor is not None]


def needs_grad(problem: Problem) -> bool:
    """Whether a gradient is asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable(problem))


def normalized(scores: Tensor, normalize: str) -> Tensor:
    """Masked scores (.., M) to weights."""
    if normalize == "sigsoftmax":
        scores = scores + F.logsigmoid(scores)
    return torch.softmax(scores, dim=-1)


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that each query sees, as numbers that a kernel can compare.

    Query n sees the keys first[n] <= k < end[n] that are tokens, and key own[n] whether it is one or not.
    first, end, own (N,) int32, on the CPU; own[n] is -1 where a query has no such key.
    tokens (B, M) boolean, None where every key is a token: see `tokens_of`.
    """

    first: Tensor
    end: Tensor
    own: Tensor
    tokens: Tensor | None


def visible_keys(layout: Layout) -> VisibleKeys | None:
    """The same as `layout.visible()`; None where that is no interval: a window over rows that differ, or without order."""
    queries, keys = layout.shape
    own = torch.arange(keys - queries, keys, dtype=torch.int32, device="cpu")  # wherever tensors are made by default
    if not layout.causal:
        if layout.narrow:
            return None
        zeros = torch.zeros_like(own)
        return VisibleKeys(zeros, zeros + keys, zeros - 1, tokens_of(layout))
    first = torch.zeros_like(own)
    if layout.narrow:
        if layout.runs is None or layout.window is None:
            return None
        positions = torch.cat([torch.arange(start, start + size, device="cpu") for start, size in layout.runs])
        oldest = positions[keys - queries :] - layout.window
        first = torch.searchsorted(positions, oldest, right=True).to(torch.int32)
    return VisibleKeys(first, own + 1, own, tokens_of(layout))


def tokens_of(layout: Layout) -> Tensor | None:
    """Keys that are tokens, (B, M) or None for all; where a query is no key, a sequence without any token is seen whole."""
    mask = layout.key_mask
    return mask if mask is None or layout.causal else mask | ~mask.any(-1, keepdim=True)
