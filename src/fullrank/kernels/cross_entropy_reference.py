"""What the vocabulary layer computes, as its equations read: slow, and differentiable as often as one likes.

    z_k = W h_k + b                            sigsoftmax: z_k + log sigmoid(z_k)
    log p(v) = log sum_k exp(log pi_k + log_softmax(z_k)_v)          with epsilon: log(p + epsilon)
    nll = -log p(x)

hidden (T, K, E), log_prior (T, K), weight (V, E), bias (V,) or None; builds (T, K, V).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, normalize: str) -> Tensor:
    """z (..., V), of which the probabilities are the softmax, in fp32 at least; hidden (..., E)."""
    z = F.linear(hidden, weight, bias)
    z = z if z.dtype == torch.float64 else z.float()
    return z + F.logsigmoid(z) if normalize == "sigsoftmax" else z


def log_prob(
    hidden: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor | None, normalize: str, epsilon: float
) -> Tensor:
    """log p(v) (T, V)."""
    return mix(torch.log_softmax(logits(hidden, weight, bias, normalize), dim=-1), log_prior, epsilon)


def mix(each: Tensor, log_prior: Tensor, epsilon: float) -> Tensor:
    """log p(v) (T, V) from the log-probabilities of the components, (T, K, V)."""
    mixed = torch.logsumexp(log_prior[:, :, None] + each, dim=1)
    return torch.logaddexp(mixed, mixed.new_tensor(math.log(epsilon))) if epsilon else mixed


def smoothed_nll(log_prob: Tensor, targets: Tensor, smoothing: float, spread: Tensor | None) -> Tensor:
    """-(1 - e) log p(x) - e sum_v q_v log p(v), (T,); q is `spread` (V,), which sums to 1, or 1 / V."""
    nll = -log_prob.gather(1, targets[:, None]).squeeze(1)
    if smoothing == 0:
        return nll
    even = log_prob.mean(1) if spread is None else (log_prob * spread.to(log_prob.dtype)).sum(1)
    return (1 - smoothing) * nll - smoothing * even


def weighted(log_prob: Tensor, targets: Tensor, scale: Tensor, smoothing: float, spread: Tensor | None) -> Tensor:
    """sum_t scale_t nll_t, a scalar; not by a matrix product, which autocast would round to its dtype."""
    return (smoothed_nll(log_prob, targets, smoothing, spread) * scale).sum()
