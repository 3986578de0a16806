"""A few tokens of a vocabulary layer at once: from their logits the nll and its gradients (equations: cross_entropy.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Form:
    """What stands between logits and loss: the normaliser `softmax` or `sigsoftmax`, and `epsilon`, added to p."""

    normalize: str = "softmax"
    epsilon: float = 0.0


PLAIN = Form()


class Target(NamedTuple):
    """What q is: (1 - smoothing) [v = ids] + smoothing spread_v, where `spread` (V,) sums to one; None: 1 / V each."""

    ids: Tensor
    smoothing: float = 0.0
    spread: Tensor | None = None

    def at(self, tokens: slice) -> Target:
        return self._replace(ids=self.ids[tokens])


class Found(NamedTuple):
    """Of a block of tokens.

    loss, nll (C,): with and without label smoothing.  gradient (C K, V), of `loss` with respect to z, to be multiplied by
    `share` (C, K); None: by one.  prior (C, K): with respect to log pi.
    """

    loss: Tensor
    nll: Tensor
    gradient: Tensor
    share: Tensor | None
    prior: Tensor | None


def _softmax_and_nll(z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """softmax (R, V), nll (R,) and logsumexp (R,) of z (R, V), from one pass of exponentials.

    The largest probability is 1 / sum_v exp(z_v - max), at least 1/V: unlike that of an improbable target it never
    underflows, and -log of it is what the logsumexp is above the largest z.
    """
    top, target = z.amax(1), z.gather(1, ids[:, None]).squeeze(1)
    probability = torch.softmax(z, dim=1)
    above = -probability.amax(1).log()
    return probability, (top - target) + above, top + above


def one(z: Tensor, target: Target) -> Found:
    """A single softmax: d loss / d z = softmax(z) - q."""
    ids, e, spread = target
    gradient, nll, total = _softmax_and_nll(z, ids)
    loss = nll
    if e:
        loss = (1 - e) * nll + e * (total - (z.mean(1) if spread is None else z @ spread))
        gradient.sub_(e / z.shape[1] if spread is None else e * spread)
    gradient.scatter_add_(1, ids[:, None], gradient.new_full((1, 1), e - 1).expand(len(ids), 1))
    return Found(loss, nll, gradient, None, None)


def mixed(z: Tensor, target: Target, log_prior: Tensor, epsilon: float) -> Found:
    """A mixture where only the target counts: K cross entropies, weighted by how much each explains of it."""
    tokens, mixtures = log_prior.shape
    ids = target.ids.repeat_interleave(mixtures)
    gradient, each, _ = _softmax_and_nll(z, ids)
    joint = log_prior - each.view(tokens, mixtures)
    total = _with_epsilon(torch.logsumexp(joint, dim=1), epsilon)
    share = torch.exp(joint - total[:, None])
    gradient.scatter_add_(1, ids[:, None], gradient.new_full((1, 1), -1.0).expand(len(ids), 1))
    return Found(-total, -total, gradient, share, -share)


def mixed_log_prob(z: Tensor, log_prior: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """log p (C, V) and the logarithms of its summands, log pi_k softmax(z_k)_v (C, K, V)."""
    joint = torch.log_softmax(z, dim=1).view(*log_prior.shape, -1).add_(log_prior[:, :, None])
    return _with_epsilon(torch.logsumexp(joint, dim=1), epsilon), joint


def coupled(z: Tensor, log_prior: Tensor, q: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """log p (C, V), and the gradients of -sum_v q_v log p(v) with respect to z (C K, V) and log pi (C, K); q (C, V)."""
    log_prob, joint = mixed_log_prob(z, log_prior, epsilon)
    explained = torch.exp(joint - log_prob[:, None]).mul_(q[:, None])  # q_v gamma_kv
    share = explained.sum(2)
    gradient = joint.sub_(log_prior[:, :, None]).exp_().mul_(share[:, :, None]).sub_(explained)
    return log_prob, gradient.view_as(z), -share


def smoothed(z: Tensor, target: Target, log_prior: Tensor, epsilon: float) -> Found:
    """A mixture with label smoothing."""
    ids, e, spread = target
    even = z.new_full((1, z.shape[1]), e / z.shape[1]) if spread is None else e * spread[None]
    q = even.repeat(len(ids), 1).scatter_add_(1, ids[:, None], z.new_full((1, 1), 1 - e).expand(len(ids), 1))
    log_prob, gradient, prior = coupled(z, log_prior, q, epsilon)
    loss, nll = -(q * log_prob).sum(1), -log_prob.gather(1, ids[:, None]).squeeze(1)
    return Found(loss, nll, gradient, None, prior)


def _with_epsilon(log_prob: Tensor, epsilon: float) -> Tensor:
    return torch.logaddexp(log_prob, log_prob.new_full((), math.log(epsilon))) if epsilon else log_prob


def normalized(logits: Tensor, form: Form, slope: bool) -> tuple[Tensor, Tensor | None]:
    """z, and d z / d s where it is not one and `slope` is wanted; spoils `logits`."""
    if form.normalize == "softmax":
        return logits, None
    steep = torch.sigmoid(-logits).add_(1) if slope else None
    return logits.add_(F.logsigmoid(logits)), steep
