"""Cross entropy of a linear vocabulary layer without the (T, V) matrix of logits.

    nll_t = logsumexp_v(s_tv) - s_{t,x_t},      s_t = W h_t + b
    d nll_t / d s_tv = softmax_v(s_t) - [v = x_t]

With label smoothing e the target is (1 - e) [v = x_t] + e / V.  Rows are worked off in chunks, so that the scratch memory is
chunk x V. Under autocast the matrix products use its dtype; the softmax and the sums over chunks are always fp32 (or fp64).
Limits: no double backward and no functorch transforms; use `output(hidden)` and a stock loss there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def _chunks(rows: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    budget = 1 << (21 if device.type == "cpu" else 26)  # logits held at a time
    step = min(max(budget // vocabulary, 64), 4096)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands of the matrix products in the dtype that autocast asks for."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if weight.dtype == torch.float64:
        dtype = torch.float64
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(C, V) log-probabilities in fp32 or fp64."""
    logits = F.linear(hidden, weight, bias)
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def _nll(log_prob: Tensor, targets: Tensor) -> Tensor:
    return -log_prob.gather(1, targets[:, None]).squeeze(1)


def _smoothed(nll: Tensor, log_prob: Tensor, smoothing: float) -> Tensor:
    return nll if smoothing == 0 else (1 - smoothing) * nll - smoothing * log_prob.mean(-1)


def _logit_gradient(log_prob: Tensor, targets: Tensor, scale: Tensor | None, smoothing: float) -> Tensor:
    """(C, V), in the memory of `log_prob`: scale_t (softmax - target)."""
    gradient = log_prob.exp_()
    if smoothing:
        gradient.sub_(smoothing / gradient.shape[1])
    rows = torch.arange(targets.shape[0], device=targets.device)
    gradient[rows, targets] -= 1 - smoothing
    return gradient if scale is None else gradient.mul_(scale[:, None])


class _Gradients:
    """Sums of the gradients with respect to W and b, and the rows of the gradient with respect to h."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> None:
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
        self.bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and needs[2] else None

    def add(self, rows: slice, gradient: Tensor, hidden: Tensor, weight: Tensor) -> None:
        low = gradient.to(weight.dtype)
        if self.hidden is not None:
            self.hidden[rows] = low @ weight
        if self.weight is not None:
            if low.dtype == self.weight.dtype:
                self.weight.addmm_(low.t(), hidden[rows])
            else:
                self.weight += low.t() @ hidden[rows]
        if self.bias is not None:
            self.bias += gradient.sum(0)


class _TokenNll(torch.autograd.Function):
    """Per-token nll; the backward pass computes the logits again, so that any cotangent gives the exact gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        h, w, b = _operands(hidden, weight, bias)
        parts = [_nll(_log_softmax(h[rows], w, b), targets[rows]) for rows in _chunks(h.shape[0], w.shape[0], h.device)]
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.dtype = w.dtype
        return torch.cat(parts) if parts else hidden.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        h, w, b = hidden.to(ctx.dtype), weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        sums = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in _chunks(h.shape[0], w.shape[0], h.device):
            log_prob = _log_softmax(h[rows], w, b)
            sums.add(rows, _logit_gradient(log_prob, targets[rows], cotangent[rows], 0.0), h, w)
        return sums.hidden, sums.weight, sums.bias, None


class _WeightedLoss(torch.autograd.Function):
    """sum_t c_t loss_t with known c_t: the gradients are formed in the forward pass, from the one matrix of logits.

    Also returns sum_t c_t nll_t, without gradient: what the loss is before label smoothing.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        h, w, b = _operands(hidden, weight, bias)
        needs = ctx.needs_input_grad
        sums = _Gradients(hidden, weight, bias, needs)
        total, plain = scale.new_zeros(()), scale.new_zeros(())
        for rows in _chunks(h.shape[0], w.shape[0], h.device):
            log_prob = _log_softmax(h[rows], w, b)
            nll = _nll(log_prob, targets[rows])
            plain += (scale[rows] * nll).sum()
            total += (scale[rows] * _smoothed(nll, log_prob, smoothing)).sum()
            if any(needs):
                sums.add(rows, _logit_gradient(log_prob, targets[rows], scale[rows], smoothing), h, w)
        ctx.gradients = (sums.hidden, sums.weight, sums.bias)
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        unit = (
            cotangent.device.type == "cpu" and float(cotangent) == 1.0
        )  # the usual case; asking a GPU would wait for it
        hidden, weight, bias = (g if g is None or unit else g * cotangent for g in ctx.gradients)
        return hidden, weight, bias, None, None, None


@torch.compiler.disable
def token_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """nll in nats of each token: hidden (T, E), weight (V, E), bias (V,) or None, targets (T,) int64 -> (T,)."""
    nll: Tensor = _TokenNll.apply(hidden, weight, bias, targets)
    return nll


@torch.compiler.disable
def weighted_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """sum_t scale_t loss_t and, without gradient, sum_t scale_t nll_t; scale (T,). Shapes as in `token_nll`."""
    if not torch.is_grad_enabled():  # a Function is told what requires gradients even then, and would form them in vain
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss, nll = _WeightedLoss.apply(hidden, weight, bias, targets, scale, label_smoothing)
    return loss, nll
