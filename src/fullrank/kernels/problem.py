"""Shared by several kernels: questions about a call of weighted attention, the precision of products, one derivative only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullrank.core.engine import Problem
from fullrank.core.layout import Layout

SAME_POSITIONS = "causal keys whose positions are the same in all sequences"

# For `torch.library.custom_op`: an operator that keeps tensors for later calls, so that a CUDA graph must not hold it.
# torch has the tag from 2.9 on.
KEEPS_TENSORS: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)


def is_plain(problem: Problem) -> bool:
    """Scaled dot product, softmax, no mixing: the attention of PyTorch's fused kernels."""
    return problem.mixing is None and problem.distances is None and problem.normalize == "softmax"


def fits(problem: Problem) -> bool:
    """True if all shapes are those of `Problem`; the definition broadcasts others, or refuses them."""
    (batch, heads, queries, width), keys = problem.query.shape, problem.keys.shape[2]
    mixing, distances, mask = problem.mixing, problem.distances, problem.layout.key_mask
    return (
        problem.keys.shape == problem.values.shape == (batch, heads, keys, width)
        and problem.layout.shape == (queries, keys)
        and (mixing is None or mixing.shape in ((heads, heads), (batch, queries, heads, heads)))
        and (mask is None or mask.shape in ((1, keys), (batch, keys)))
        and (distances is None or distances.keys.shape == (heads, problem.layout.distances, width))
    )


def declines(problem: Problem) -> str | None:
    """The reason for which the definition is to compute a call: its tensors, or keys that are no interval."""
    layout, heads = problem.layout, (problem.query, problem.keys, problem.values)
    if len({x.dtype for x in heads}) > 1:
        return "query, keys and values must have one dtype"
    if any(x.is_meta or x.numel() == 0 for x in heads):  # `meta` knows no autocast either
        return "there are no numbers"
    if layout.strided:
        return "the keys that a query sees at a stride are no interval"
    if (problem.distances is not None or layout.narrow) and (layout.runs is None or not layout.causal):
        return f"{'a window needs' if problem.distances is None else 'relative scores need'} {SAME_POSITIONS}"
    return None if fits(problem) else "the shapes do not fit each other"


def differentiable(problem: Problem) -> list[Tensor]:
    """The tensors for which gradients may be asked."""
    tensors: list[Tensor | None] = [problem.query, problem.keys, problem.values, problem.mixing]
    if problem.distances is not None:
        tensors += [problem.distances.keys, problem.distances.u, problem.distances.v]
    return [tensor for tensor in tensors if tensor is not None]


def needs_grad(problem: Problem) -> bool:
    """True if a gradient is asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable(problem))


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


def find_visible_keys(layout: Layout) -> VisibleKeys | None:
    """`layout.visible()` as intervals; None where it is none: a stride, or a window over rows that differ or without order."""
    if layout.strided:
        return None
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


def table_row(layout: Layout, distance: int) -> int:
    """The row of `distance` in the table of distances, the nearest first; itself if no query sees a key so far away."""
    before = 0
    for low, high in layout.spans:
        if low <= distance <= high:
            return before + distance - low
        before += high - low + 1
    return distance


def device_kind(tensor: Tensor) -> str:
    """The device as autocast knows it; it does not know `meta`."""
    return "cpu" if tensor.device.type == "meta" else tensor.device.type


def product_dtype(operand: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that autocast asks matrix products to have."""
    kind = device_kind(operand)
    is_narrow = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_narrow else weight.dtype


def refuse_second_order(what: str, instead: str) -> None:
    """Called in a backward pass: RuntimeError where it is to be differentiated again.

    Autograd would take the gradients for constants where their cotangent is one, and say nothing.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"no second derivative (create_graph=True) of {what}: compute it inside "
            f'`with fullrank.kernel("reference"):`, which {instead}'
        )
