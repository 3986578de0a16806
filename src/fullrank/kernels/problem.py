"""Questions about a call that several kernels ask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.engine import Problem


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
