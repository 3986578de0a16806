"""The vocabulary layer's training loss, forward and backward, against what PyTorch offers.

One softmax (K = 1):

    cross_entropy         F.cross_entropy(F.linear(h, W, b), targets)
    linear_cross_entropy  F.linear_cross_entropy(h, W, targets, linear_bias=b), chunked
    vocabulary_loss       ours, with all weights 1/T

A mixture of K softmaxes, from hidden states (T, K, d) and the logarithm of the prior (T, K):

    probabilities         log(sum_k pi_k softmax(W h_k + b) + 1e-8), as the papers' codes have it
    logarithms            logsumexp_k(log pi_k + log_softmax(W h_k + b))
    linear_cross_entropy  logsumexp_k(log pi_k - nll_k), the nll_k of T K rows by F.linear_cross_entropy
    vocabulary_loss       ours
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.bench.candidates import BOTH, Candidate, Comparison, Pass, Settings
from fullrank.core.engine import Cluster, Components
from fullrank.kernels.vocabulary import vocabulary_loss

STOCK = "cross_entropy"
_FUNCTIONAL: Any = F  # linear_cross_entropy is younger than the oldest torch we run on


@dataclass(frozen=True)
class Size:
    tokens: int
    mixtures: int
    vocabulary: int
    width: int

    def __str__(self) -> str:
        return f"T {self.tokens:,}, K {self.mixtures}, V {self.vocabulary:,}, d {self.width}"


@dataclass(frozen=True)
class Given:
    """hidden (T, K, d), log_prior (T, K), weight (V, d), bias (V,), targets (T,)."""

    hidden: Tensor
    log_prior: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor


Loss = Callable[[Given], Tensor]


def stock(given: Given) -> Tensor:
    """One softmax; given as such, whatever K is."""
    return F.cross_entropy(F.linear(given.hidden[:, 0], given.weight, given.bias), given.targets)


def probabilities(given: Given) -> Tensor:
    each = F.linear(given.hidden, given.weight, given.bias).softmax(-1)
    return F.nll_loss(((each * given.log_prior.exp()[:, :, None]).sum(1) + 1e-8).log(), given.targets)


def logarithms(given: Given) -> Tensor:
    each = F.linear(given.hidden, given.weight, given.bias).log_softmax(-1)
    return F.nll_loss(torch.logsumexp(each + given.log_prior[:, :, None], 1), given.targets)


def chunked(rows: int | None) -> Loss:
    """`rows` to a chunk; None: as torch chooses."""

    def loss(given: Given) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        tokens, mixtures = given.log_prior.shape
        hidden, targets = given.hidden.flatten(0, 1), given.targets.repeat_interleave(mixtures)
        rest = {"linear_bias": given.bias, "options": options}
        if mixtures == 1:
            one: Tensor = _FUNCTIONAL.linear_cross_entropy(hidden, given.weight, targets, **rest)
            return one
        each = _FUNCTIONAL.linear_cross_entropy(hidden, given.weight, targets, reduction="none", **rest)
        return -torch.logsumexp(given.log_prior - each.view(tokens, mixtures), 1).mean()

    return loss


def ours(given: Given) -> Tensor:
    tokens, mixtures = given.log_prior.shape
    scale = torch.full((tokens,), 1 / tokens, device=given.hidden.device)
    log_prior = None if mixtures == 1 else given.log_prior
    components = Components(given.hidden, log_prior, (Cluster(given.weight, given.bias),))
    return vocabulary_loss(components, given.targets, scale, 0.0)[0]


def case(size: Size, loss: Loss, settings: Settings) -> Pass:
    """One forward and backward pass of `loss`, under autocast where the dtype is narrow."""
    if loss is stock:  # what it reads stands alone, so that its backward pass fills no zeros for other components
        size = dataclasses.replace(size, mixtures=1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.mixtures, size.width, generator=generator)
    leaves = {
        "hidden": hidden if size.mixtures == 1 else hidden.tanh_(),
        "log_prior": torch.randn(size.tokens, size.mixtures, generator=generator).log_softmax(1),
        "weight": torch.randn(size.vocabulary, size.width, generator=generator).mul_(0.05),
        "bias": torch.zeros(size.vocabulary),
    }
    leaves = {name: leaf.to(settings.where).requires_grad_() for name, leaf in leaves.items()}
    targets = torch.randint(size.vocabulary, (size.tokens,), generator=generator).to(settings.where)
    given = Given(**leaves, targets=targets)

    def forward() -> Tensor:
        with settings.autocast():
            return loss(given)

    return Pass(forward, leaves, None, True)


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    """`length` tokens, V = 10,000, d = 200: one softmax, and ten."""
    return [_comparison(settings, Size(length, mixtures, 10_000, 200)) for mixtures in (1, 10)]


def _comparison(settings: Settings, size: Size) -> Comparison:
    absent = "" if hasattr(F, "linear_cross_entropy") else f"not in torch {torch.__version__}"
    logits = 4 * size.tokens * size.mixtures * size.vocabulary  # bytes

    def candidate(name: str, loss: Loss, against: tuple[str, ...] = (), absent: str = "", kept: int = 0) -> Candidate:
        make, single = functools.partial(case, size, loss, settings), loss is stock or size.mixtures == 1
        return Candidate(name, make, "one softmax" if single else "mixture", against, absent, takes=kept * logits)

    rows = "" if size.mixtures == 1 else f", {size.mixtures} rows a token"
    linear = candidate(f"linear_cross_entropy{rows}", chunked(256), absent=absent)
    one = candidate(STOCK, stock, kept=2 if size.mixtures == 1 else 0)
    if size.mixtures == 1:
        return _of(size, candidate("softmax loss", ours, (STOCK, linear.name)), one, linear)
    peers = ("probabilities", "logarithms", linear.name, STOCK)
    return _of(
        size,
        candidate(f"mixture of {size.mixtures} softmaxes", ours, peers),
        candidate("probabilities", probabilities, kept=2),
        candidate("logarithms", logarithms, kept=3),
        linear,
        one,
    )


def _of(size: Size, *candidates: Candidate) -> Comparison:
    return Comparison(str(size), size.tokens, BOTH, candidates)
