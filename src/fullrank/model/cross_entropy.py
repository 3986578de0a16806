"""Cross entropy of a linear vocabulary layer without the (T, V) matrix of logits.

    nll_t = logsumexp_v(s_tv) - s_{t,x_t},      s_t = W h_t + b
    d nll_t / d s_tv = softmax_v(s_t) - [v = x_t] =: G_tv
    of sum_t c_t nll_t:    dW = G^T (c h),    dh = c (G W),    db = G^T c

With label smoothing e the target is (1 - e) [v = x_t] + e / V.  Rows are worked off in chunks, so that the scratch memory is
chunk x V numbers: as much as the gradient of W takes, but 16 MiB at least and 128 MiB at most (on a GPU always 256 MiB), and
never less than 64 rows. Under autocast the operands and results of the matrix products have its dtype; bias, softmax, nll and
the sums over chunks are always fp32 (or fp64).
Limits: no double backward and no functorch transforms; use `output(hidden)` and a stock loss there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def _pieces(total: int, longest: int) -> Iterator[slice]:
    """0 .. total in the fewest pieces of at most `longest`, all nearly equally long."""
    count = -(-total // longest)
    return (slice(total * i // count, total * (i + 1) // count) for i in range(count))


class _Layer:
    """The vocabulary layer as its matrix products see it, worked off in chunks of rows.

    hidden (T, E), weight (V, E), bias (V,) or None; `dtype` is that of the products, `wide` that of softmax and sums.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(self.wide)
        self.on_cpu = hidden.device.type == "cpu"

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and their logits (C, V) without the bias: so many that a pass over dW for each chunk costs little.

        All chunks share one scratch: done with a chunk, it may be written to.
        """
        (rows, _), (vocabulary, width) = self.hidden.shape, self.weight.shape
        budget = min(max(4 * width * vocabulary, 16 << 20), 128 << 20) if self.on_cpu else 256 << 20  # bytes
        longest = max(budget // (vocabulary * self.weight.element_size()), 64)
        pieces = list(_pieces(rows, longest if self.on_cpu else min(longest, 4096)))
        scratch = self.hidden.new_empty(max((p.stop - p.start for p in pieces), default=0), vocabulary)
        for piece in pieces:
            logits = scratch[: piece.stop - piece.start]
            yield piece, torch.mm(self.hidden[piece], self.weight.t(), out=logits)

    def blocks(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """A few rows at a time, in `wide` and with the bias: on a CPU so few that they stay in its cache.

        A block may be the memory of `logits`.
        """
        rows, vocabulary = logits.shape
        for piece in _pieces(rows, max((1 << 19) // vocabulary, 16) if self.on_cpu else rows):
            block = logits[piece].to(self.wide)
            yield piece, block if self.bias is None else block.add_(self.bias)


def _kind(tensor: Tensor) -> str:
    """The device as autocast knows it; it does not know `meta`."""
    return "cpu" if tensor.device.type == "meta" else tensor.device.type


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that autocast asks matrix products to have."""
    kind = _kind(hidden)
    autocast = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if autocast else weight.dtype


def _softmax_and_nll(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """softmax (C, V), nll (C,) and smoothed nll (C,) of logits (C, V), from one pass of exponentials.

    The largest probability is 1 / sum_v exp(s_v - max), at least 1/V: unlike that of an improbable target it never
    underflows, and -log of it is what the logsumexp is above the largest logit.
    """
    top, target = logits.amax(1), logits.gather(1, targets[:, None]).squeeze(1)
    probability = torch.softmax(logits, dim=1)
    above = -probability.amax(1).log()
    nll = (top - target) + above
    if smoothing == 0:
        return probability, nll, nll
    return probability, nll, (1 - smoothing) * nll + smoothing * ((top - logits.mean(1)) + above)


class _Gradients:
    """Sums of the gradients with respect to W and b, and the rows of the gradient with respect to h."""

    def __init__(self, layer: _Layer, needs: tuple[bool, ...], smoothing: float) -> None:
        self.layer, self.smoothing = layer, smoothing
        self.wanted, self.wants_weight = any(needs), needs[1]
        self.hidden = torch.empty_like(layer.hidden, dtype=layer.wide) if needs[0] else None
        self.weight = torch.zeros_like(layer.weight) if needs[1] and layer.hidden.shape[0] == 0 else None
        self.bias = torch.zeros_like(layer.bias) if layer.bias is not None and needs[2] else None

    def block(self, probability: Tensor, targets: Tensor, scale: Tensor, out: Tensor) -> None:
        """Write G (C, V) to `out`, in the dtype of the products; spoils `probability`."""
        if self.smoothing:
            probability.sub_(self.smoothing / probability.shape[1])
        less = probability.new_full((1, 1), self.smoothing - 1).expand(targets.shape[0], 1)
        probability.scatter_add_(1, targets[:, None], less)
        if self.bias is not None:
            self.bias.addmv_(probability.t(), scale)
        out.copy_(probability)

    def chunk(self, rows: slice, gradient: Tensor, scale: Tensor) -> None:
        """Add what `rows` contribute: gradient G (C, V) in the dtype of the products, scale c (C,)."""
        layer = self.layer
        if self.hidden is not None:
            self.hidden[rows] = (gradient @ layer.weight) * scale[:, None]
        if not self.wants_weight:
            return
        hidden = (layer.hidden[rows] * scale[:, None]).to(gradient.dtype)
        if self.weight is None:
            self.weight = gradient.t() @ hidden  # one chunk needs no sum: autograd widens it
        elif gradient.dtype == layer.wide:
            self.weight.addmm_(gradient.t(), hidden)
        else:
            self.weight = self.weight.to(layer.wide).add_(gradient.t() @ hidden)


def _refuse_second_order() -> None:
    """Autograd would take the gradients below for constants where their cotangent is one, and say nothing."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "nll and loss have no second derivative (create_graph=True); use the model's logits and F.cross_entropy"
        )


class _TokenNll(torch.autograd.Function):
    """Per-token nll; the backward pass computes the logits again, so that any cotangent gives the exact gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        ctx.dtype = _product_dtype(hidden, weight)
        ctx.save_for_backward(hidden, weight, bias, targets)
        with torch.autocast(_kind(hidden), enabled=False):
            layer = _Layer(hidden, weight, bias, ctx.dtype)
            found = torch.empty(targets.shape, dtype=layer.wide, device=hidden.device)
            for rows, logits in layer.chunks():
                for piece, block in layer.blocks(logits):
                    found[rows][piece] = _softmax_and_nll(block, targets[rows][piece], 0.0)[1]
        return found

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden, weight, bias, targets = ctx.saved_tensors
        with torch.autocast(_kind(hidden), enabled=False):
            layer = _Layer(hidden, weight, bias, ctx.dtype)
            sums = _Gradients(layer, ctx.needs_input_grad, 0.0)
            for rows, logits in layer.chunks():
                chosen, scale = targets[rows], cotangent[rows]
                for piece, block in layer.blocks(logits):
                    sums.block(torch.softmax(block, dim=1), chosen[piece], scale[piece], out=logits[piece])
                sums.chunk(rows, logits, scale)
        return sums.hidden, sums.weight, sums.bias, None


class _WeightedLoss(torch.autograd.Function):
    """sum_t c_t loss_t with known c_t: the gradients are formed in the forward pass, from the one matrix of logits.

    Also returns sum_t c_t nll_t, without gradient: what the loss is before label smoothing.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        dtype = _product_dtype(hidden, weight)
        with torch.autocast(_kind(hidden), enabled=False):
            layer = _Layer(hidden, weight, bias, dtype)
            sums = _Gradients(layer, ctx.needs_input_grad, smoothing)
            losses, plain = torch.empty_like(scale), torch.empty_like(scale)
            for rows, logits in layer.chunks():
                chosen, c = targets[rows], scale[rows]
                for piece, block in layer.blocks(logits):
                    probability, nll, smoothed = _softmax_and_nll(block, chosen[piece], smoothing)
                    plain[rows][piece], losses[rows][piece] = nll, smoothed
                    if sums.wanted:
                        sums.block(probability, chosen[piece], c[piece], out=logits[piece])
                if sums.wanted:
                    sums.chunk(rows, logits, c)
        ctx.gradients = (sums.hidden, sums.weight, sums.bias)
        total, plain_total = (losses * scale).sum(), (plain * scale).sum()
        ctx.mark_non_differentiable(plain_total)
        return total, plain_total

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        unit = (
            cotangent.device.type == "cpu" and float(cotangent) == 1.0
        )  # the usual case; asking a GPU would wait for it
        hidden, weight, bias = (g if g is None or unit else g.to(cotangent.dtype) * cotangent for g in ctx.gradients)
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


def shares(weights: Tensor | None, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """(T,): how much each token of targets (B, N) counts in a weighted mean, w_t / sum(w); all alike without weights."""
    if weights is None:
        return torch.full((targets.numel(),), 1 / max(1, targets.numel()), device=targets.device, dtype=dtype)
    scale = weights.flatten().to(dtype)
    return scale / scale.sum().clamp_min(torch.finfo(dtype).tiny)
