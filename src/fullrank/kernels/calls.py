"""Questions about a call of weighted attention, which several kernels ask, and the keys that each query sees, as intervals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.core.engine import Problem
from fullrank.core.layout import Layout, list_positions


def is_plain(problem: Problem) -> bool:
    """Scaled dot product, softmax, no mixing: the attention of PyTorch's fused kernels."""
    mixes = problem.mixing is not None or problem.scoring is not None
    return not mixes and problem.distances is None and problem.normalize == "softmax"


def fits(problem: Problem) -> bool:
    """True if all shapes are those of `Problem`; the definition broadcasts others, or refuses them."""
    (batch, heads, queries, width), keys = problem.query.shape, problem.keys.shape[2]
    mixing, distances, mask = problem.mixing, problem.distances, problem.layout.key_mask
    return (
        problem.keys.shape == problem.values.shape == (batch, heads, keys, width)
        and problem.layout.shape == (queries, keys)
        and (mixing is None or mixing.shape in ((heads, heads), (batch, queries, heads, heads)))
        and (problem.scoring is None or problem.scoring.shape == (heads, heads))
        and (mask is None or mask.shape in ((1, keys), (batch, keys)))
        and (distances is None or distances.keys.shape == (heads, problem.layout.distances, width))
    )


def find_obstacle(problem: Problem) -> str | None:
    """The reason for which neither C++ nor Triton computes a call: its tensors, or keys that are no interval; or None."""
    layout, heads = problem.layout, (problem.query, problem.keys, problem.values)
    if len({x.dtype for x in heads}) > 1:
        return "query, keys and values must have one dtype"
    if any(x.is_meta or x.numel() == 0 for x in heads):  # `meta` knows no autocast either
        return "there are no numbers"
    if layout.strided:
        return "the keys that a query sees at a stride are no interval"
    same_positions = layout.causal and layout.runs is not None
    reads_distances = problem.distances is not None or layout.distance_bias is not None
    if reads_distances and (not same_positions or layout.key_mask is not None):
        return "relative scores and biases need causal keys whose positions are the same in all sequences"
    if layout.narrow and not same_positions:
        return "a window needs causal keys whose positions are the same in all sequences"
    return None if fits(problem) else "the shapes do not fit each other"


def differentiable(problem: Problem) -> list[Tensor]:
    """The tensors for which gradients may be asked."""
    tensors: list[Tensor | None] = [problem.query, problem.keys, problem.values, problem.mixing, problem.scoring]
    if problem.distances is not None:
        tensors += [problem.distances.keys, problem.distances.u, problem.distances.v]
    tensors.append(problem.layout.distance_bias)
    return [tensor for tensor in tensors if tensor is not None]


def needs_grad(problem: Problem) -> bool:
    """True if a gradient is asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable(problem))


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that each query sees, as numbers that a kernel can compare.

    Query n sees the keys first[n] <= k < end[n] that are tokens, and key own[n] whether it is one or not.
    first, end, own (N,) int32, on the CPU; own[n] is -1 where a query has no such key. Where texts have documents, first is
    (B, N) on their device.
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
        positions = list_positions(layout.runs, torch.device("cpu"))
        oldest = positions[keys - queries :] - layout.window
        first = torch.searchsorted(positions, oldest, right=True).to(torch.int32)
    if layout.documents is not None:
        begins = find_beginnings(layout.documents, queries)
        first = torch.maximum(first.to(begins.device), begins)
    return VisibleKeys(first, own + 1, own, tokens_of(layout))


def find_beginnings(documents: Tensor, queries: int) -> Tensor:
    """The first key of the document of each query, (B, N) int32; documents (B, M) ascend."""
    of_queries = documents[:, documents.shape[1] - queries :]
    return torch.searchsorted(documents, of_queries.contiguous(), out_int32=True)


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
