"""Cross entropy of a softmax over the vocabulary, or of a mixture of them, without the matrix of logits.

    s_k = W h_k + b,   z = s, or s + log sigmoid(s) for sigsoftmax,   a_k = log pi_k + log softmax(z_k)_x
    nll = -log sum_k exp(a_k)                                                            (one softmax: -a)
    d nll / d z_k = gamma_k (softmax(z_k) - [v = x]),   d nll / d log pi_k = -gamma_k,   gamma = softmax(a)

With weights c_t known, sum_t c_t nll_t has its gradients formed in the forward pass, from the one matrix of logits: three
products for each chunk of tokens (docs/derivations/mixture_of_softmaxes.md). gamma couples the K rows of a token.
Where every word counts (label smoothing, log-probabilities), gamma depends on the word:

    sum_v q_v log p(v),   gamma_kv = pi_k softmax(z_k)_v / p(v),   Q_k = sum_v q_v gamma_kv
    d / d z_kv = q_v gamma_kv - Q_k softmax(z_k)_v,                d / d log pi_k = Q_k

`epsilon`: log(p + epsilon) for log p, as a softmax more that knows all words alike.
Limits: no double backward and no functorch transforms; `fullrank.kernel("reference")` has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.kernels import cross_entropy_blocks as blocks
from fullrank.kernels import cross_entropy_reference as reference
from fullrank.kernels import forced
from fullrank.kernels.chunks import Gradients, Layer
from fullrank.kernels.cross_entropy_blocks import PLAIN, Form, Found, Target
from fullrank.kernels.precision import device_kind, product_dtype, refuse_second_order


class _Work:
    """One pass over all tokens, with or without gradients; their sums stay in `sums` and `prior`."""

    def __init__(
        self, hidden: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor | None, form: Form, dtype: torch.dtype,
        needs: tuple[bool, ...] = (False,) * 4,
    ) -> None:  # fmt: skip
        group = 1 if log_prior is None else log_prior.shape[1]
        self.layer, self.form = Layer(hidden, weight, bias, dtype, group), form
        self.log_prior = None if log_prior is None else log_prior.to(self.layer.wide)
        self.sums = Gradients(self.layer, (needs[0], needs[2], needs[3])) if any(needs) else None
        self.prior = torch.empty_like(self.log_prior) if self.log_prior is not None and needs[1] else None

    def losses(self, target: Target, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """loss and nll (T,); the gradients are those of sum_t scale_t loss_t, scale (T,)."""
        loss = torch.empty(target.ids.shape, dtype=self.layer.wide, device=self.layer.hidden.device)
        nll = loss if target.smoothing == 0 else torch.empty_like(loss)
        spread = None if target.spread is None else target.spread.to(loss.dtype)

        def found(z: Tensor, tokens: slice, prior: Tensor | None) -> Found:
            of = target._replace(spread=spread).at(tokens)
            if prior is None:
                block = blocks.one(z, of)
            elif of.smoothing:
                block = blocks.smoothed(z, of, prior, self.form.epsilon)
            else:
                block = blocks.mixed(z, of, prior, self.form.epsilon)
            loss[tokens], nll[tokens] = block.loss, block.nll
            return block

        self._each(found, scale)
        return loss, nll

    def log_prob(self) -> Tensor:
        """log p (T, V) of a mixture."""
        out = self.layer.hidden.new_empty(self.layer.tokens, self.layer.weight.shape[0], dtype=self.layer.wide)
        for chunk, logits in self.layer.chunks():
            for piece, block in self.layer.blocks(logits):
                assert self.log_prior is not None
                tokens = slice(chunk.start + piece.start, chunk.start + piece.stop)
                z, _ = blocks.normalized(block, self.form, False)
                out[tokens] = blocks.mixed_log_prob(z, self.log_prior[tokens], self.form.epsilon)[0]
        return out

    def log_prob_backward(self, cotangent: Tensor) -> None:
        """The gradients of sum_tv cotangent_tv log p_tv, cotangent (T, V)."""

        def found(z: Tensor, tokens: slice, prior: Tensor | None) -> Found:
            assert prior is not None
            log_prob, gradient, to_prior = blocks.coupled(z, prior, -cotangent[tokens].to(z.dtype), self.form.epsilon)
            return Found(log_prob, log_prob, gradient, None, to_prior)

        self._each(found, cotangent.new_ones(self.layer.tokens, dtype=self.layer.wide))

    def _each(self, find: Callable[[Tensor, slice, Tensor | None], Found], scale: Tensor | None) -> None:
        layer, sums = self.layer, self.sums
        for chunk, logits in layer.chunks():
            scales = logits.new_empty(logits.shape[0], dtype=layer.wide)
            for piece, block in layer.blocks(logits):
                tokens = slice(chunk.start + piece.start, chunk.start + piece.stop)
                z, slope = blocks.normalized(block, self.form, sums is not None)
                of = find(z, tokens, None if self.log_prior is None else self.log_prior[tokens])
                if sums is None:
                    continue
                assert scale is not None
                known, rows = scale[tokens, None], layer.rows(piece)
                if self.prior is not None:
                    assert of.prior is not None
                    self.prior[tokens] = known * of.prior
                each = known.expand(-1, layer.group) if of.share is None else known * of.share
                scales[rows] = each.reshape(-1)
                gradient = of.gradient if slope is None else of.gradient.mul_(slope)
                sums.block(gradient, scales[rows])
                logits[rows].copy_(gradient)
            if sums is not None:
                sums.chunk(chunk, logits, scales)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """With respect to hidden, log_prior, weight and bias."""
        assert self.sums is not None
        return self.sums.hidden, self.prior, self.sums.weight, self.sums.bias


class _TokenNll(torch.autograd.Function):
    """Per-token nll; the backward pass computes the logits again, so that any cotangent gives the exact gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor | None, ids: Tensor, form: Form
    ) -> Tensor:
        ctx.dtype, ctx.form = product_dtype(hidden, weight), form
        ctx.save_for_backward(hidden, log_prior, weight, bias, ids)
        with torch.autocast(device_kind(hidden), enabled=False):
            return _Work(hidden, log_prior, weight, bias, form, ctx.dtype).losses(Target(ids), None)[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("nll, loss and the log-probabilities of a mixture", "keeps all logits")
        hidden, log_prior, weight, bias, ids = ctx.saved_tensors
        with torch.autocast(device_kind(ids), enabled=False):
            work = _Work(hidden, log_prior, weight, bias, ctx.form, ctx.dtype, ctx.needs_input_grad[:4])
            work.losses(Target(ids), cotangent)
        return *work.gradients(), None, None


class _WeightedLoss(torch.autograd.Function):
    """sum_t c_t loss_t with known c_t: the gradients are formed in the forward pass, from the one matrix of logits.

    Also returns sum_t c_t nll_t, without gradient: what the loss is before label smoothing.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor | None, scale: Tensor,
        target: Target, form: Form,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype, wanted = product_dtype(hidden, weight), ctx.needs_input_grad[:4]
        with torch.autocast(device_kind(hidden), enabled=False):
            work = _Work(hidden, log_prior, weight, bias, form, dtype, wanted)
            loss, nll = work.losses(target, scale)
        # saved, so that they go with the graph: a loss that is kept after its backward pass keeps no gradients
        ctx.save_for_backward(*(work.gradients() if any(wanted) else (None,) * 4))
        total, plain_total = (loss * scale).sum(), (nll * scale).sum()
        ctx.mark_non_differentiable(plain_total)
        return total, plain_total

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("nll, loss and the log-probabilities of a mixture", "keeps all logits")
        unit = (
            cotangent.device.type == "cpu" and float(cotangent) == 1.0
        )  # the usual case; asking a GPU would wait for it
        return (
            *(g if g is None or unit else g.to(cotangent.dtype) * cotangent for g in ctx.saved_tensors),
            None,
            None,
            None,
        )


class _MixedLogProb(torch.autograd.Function):
    """log p over the whole vocabulary; the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
        ctx.dtype, ctx.form = product_dtype(hidden, weight), form
        ctx.save_for_backward(hidden, log_prior, weight, bias)
        with torch.autocast(device_kind(hidden), enabled=False):
            return _Work(hidden, log_prior, weight, bias, form, ctx.dtype).log_prob()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("nll, loss and the log-probabilities of a mixture", "keeps all logits")
        hidden, log_prior, weight, bias = ctx.saved_tensors
        with torch.autocast(device_kind(cotangent), enabled=False):
            work = _Work(hidden, log_prior, weight, bias, ctx.form, ctx.dtype, ctx.needs_input_grad[:4])
            work.log_prob_backward(cotangent)
        return *work.gradients(), None


def _rows(hidden: Tensor, log_prior: Tensor | None) -> Tensor:
    return hidden if log_prior is None else hidden.flatten(0, 1)


@torch.compiler.disable
def token_nll(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, *, log_prior: Tensor | None = None, form: Form = PLAIN
) -> Tensor:  # fmt: skip
    """nll in nats of each token, (T,), exact under any cotangent.

    hidden (T, E), or of a mixture (T, K, E) with log_prior (T, K); weight (V, E), bias (V,) or None, ids (T,) int64.
    """
    if forced() == "reference":
        return reference.smoothed_nll(_reference(hidden, weight, bias, log_prior, form), ids, 0.0, None)
    nll: Tensor = _TokenNll.apply(_rows(hidden, log_prior), log_prior, weight, bias, ids, form)
    return nll


@torch.compiler.disable
def weighted_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    scale: Tensor,
    label_smoothing: float = 0.0,
    *,
    spread: Tensor | None = None,
    log_prior: Tensor | None = None,
    form: Form = PLAIN,
) -> tuple[Tensor, Tensor]:
    """sum_t scale_t loss_t and, without gradient, sum_t scale_t nll_t; scale (T,), other shapes as in `token_nll`.

    With label smoothing e the target is (1 - e) [v = x] + e spread_v; spread (V,) sums to one, None: 1 / V each.
    """
    if forced() == "reference":
        log_prob = _reference(hidden, weight, bias, log_prior, form)
        loss, nll = (reference.weighted(log_prob, ids, scale, e, spread) for e in (label_smoothing, 0.0))
        return loss, nll.detach()
    given: tuple[Tensor | None, ...] = (_rows(hidden, log_prior), log_prior, weight, bias)
    if not torch.is_grad_enabled():  # a Function is told what requires gradients even then, and would form them in vain
        given = tuple(None if tensor is None else tensor.detach() for tensor in given)
    loss, nll = _WeightedLoss.apply(*given, scale, Target(ids, label_smoothing, spread), form)
    return loss, nll


@torch.compiler.disable
def mixed_log_prob(
    hidden: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor | None, form: Form = PLAIN
) -> Tensor:
    """log p over the vocabulary of a mixture, (T, V), in fp32 at least; hidden (T, K, E), log_prior (T, K)."""
    if forced() == "reference":
        return _reference(hidden, weight, bias, log_prior, form)
    found: Tensor = _MixedLogProb.apply(hidden.flatten(0, 1), log_prior, weight, bias, form)
    return found


def _reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, log_prior: Tensor | None, form: Form) -> Tensor:
    if log_prior is None:
        hidden, log_prior = hidden[:, None], hidden.new_zeros(len(hidden), 1, dtype=torch.float32)
    return reference.log_prob(hidden, log_prior, weight, bias, form.normalize, form.epsilon)


def flat(hidden: Tensor, targets: Tensor) -> Tensor:
    """The ids (T,) of targets (B, N), one for each of hidden (B, N, E); InputError unless they stand at the same places."""
    if targets.shape != hidden.shape[:-1]:
        raise InputError(
            f"targets {tuple(targets.shape)}: one for each hidden state, of which there are {tuple(hidden.shape[:-1])}"
        )
    return targets.flatten()


def counted(hidden: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """The ids (T,) of targets (B, N), and how much each counts in a weighted mean, w_t / sum(w) (T,); without weights 1 / T.

    Raises InputError for shapes that differ, for weights that require a gradient (they would not get it), and for label
    smoothing that is no share.
    """
    ids, dtype = flat(hidden, targets), torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if not 0 <= label_smoothing < 1:
        raise InputError(f"label_smoothing: at least 0 and below 1, given {label_smoothing}")
    if weights is None:
        return ids, torch.full(ids.shape, 1 / max(1, len(ids)), device=ids.device, dtype=dtype)
    if weights.shape != targets.shape:
        raise InputError(f"weights {tuple(weights.shape)} must have the shape of targets {tuple(targets.shape)}")
    if weights.requires_grad:
        raise InputError("weights of a loss take no gradient; pass weights.detach(), or weigh the nll of each token")
    scale = weights.flatten().to(dtype)
    return ids, scale / scale.sum().clamp_min(torch.finfo(dtype).tiny)
