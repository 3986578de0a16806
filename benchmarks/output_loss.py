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

`fullrank bench mos` compares them. As a script this file looks closer, at time and memory:

    python benchmarks/output_loss.py [--mixtures 1 10] [--rounds 9] [--threads 1] [--json FILE]

`linear_cross_entropy` is chunked as torch chooses, and with 256 rows a chunk. Times of a mixture are relative to
cross_entropy of one softmax; "the whole layer" is ours from one hidden state a token: latents, prior and their gradients too.
Memory is the growth of the resident high-water mark in a fresh process, over inputs and parameters, gradients included
(that of W alone takes 4 V d bytes).
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fullrank as fr
from candidates import BOTH, Candidate, Comparison, Pass, Settings
from closer import memory_mib, parse, save, table
from fullrank.core.engine import Cluster, Components
from fullrank.kernels.vocabulary import vocabulary_loss
from timing import Peak, Timing

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
class Operands:
    """hidden (T, K, d), log_prior (T, K), weight (V, d), bias (V,), targets (T,)."""

    hidden: Tensor
    log_prior: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor


Loss = Callable[[Operands], Tensor]


def stock(operands: Operands) -> Tensor:
    """One softmax of the first component, whatever K is."""
    return F.cross_entropy(F.linear(operands.hidden[:, 0], operands.weight, operands.bias), operands.targets)


def probabilities(operands: Operands) -> Tensor:
    each = F.linear(operands.hidden, operands.weight, operands.bias).softmax(-1)
    return F.nll_loss(((each * operands.log_prior.exp()[:, :, None]).sum(1) + 1e-8).log(), operands.targets)


def logarithms(operands: Operands) -> Tensor:
    each = F.linear(operands.hidden, operands.weight, operands.bias).log_softmax(-1)
    return F.nll_loss(torch.logsumexp(each + operands.log_prior[:, :, None], 1), operands.targets)


def chunked(rows: int | None) -> Loss:
    """F.linear_cross_entropy with `rows` a chunk; None: as torch chooses."""

    def loss(operands: Operands) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        tokens, mixtures = operands.log_prior.shape
        hidden, targets = operands.hidden.flatten(0, 1), operands.targets.repeat_interleave(mixtures)
        common = {"linear_bias": operands.bias, "options": options}
        if mixtures == 1:
            one: Tensor = _FUNCTIONAL.linear_cross_entropy(hidden, operands.weight, targets, **common)
            return one
        each = _FUNCTIONAL.linear_cross_entropy(hidden, operands.weight, targets, reduction="none", **common)
        return -torch.logsumexp(operands.log_prior - each.view(tokens, mixtures), 1).mean()

    return loss


def ours(operands: Operands) -> Tensor:
    tokens, mixtures = operands.log_prior.shape
    scale = torch.full((tokens,), 1 / tokens, device=operands.hidden.device)
    log_prior = None if mixtures == 1 else operands.log_prior
    components = Components(operands.hidden, log_prior, (Cluster(operands.weight, operands.bias),))
    return vocabulary_loss(components, operands.targets, scale, 0.0)[0]


def case(size: Size, loss: Loss, settings: Settings) -> Pass:
    """One forward and backward pass of `loss`, under autocast where the dtype is narrow."""
    if loss is stock:  # its operands hold one component, so that its backward pass fills no zeros for others
        size = dataclasses.replace(size, mixtures=1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.mixtures, size.width, generator=generator)
    leaves = {
        "hidden": hidden if size.mixtures == 1 else hidden.tanh_(),
        "log_prior": torch.randn(size.tokens, size.mixtures, generator=generator).log_softmax(1),
        "weight": torch.randn(size.vocabulary, size.width, generator=generator).mul_(0.05),
        "bias": torch.zeros(size.vocabulary),
    }
    leaves = {name: leaf.to(settings.torch_device).requires_grad_() for name, leaf in leaves.items()}
    targets = torch.randint(size.vocabulary, (size.tokens,), generator=generator).to(settings.torch_device)
    operands = Operands(**leaves, targets=targets)

    def forward() -> Tensor:
        with settings.autocast():
            return loss(operands)

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
        return _compared(size, candidate("softmax loss", ours, (STOCK, linear.name)), one, linear)
    peers = ("probabilities", "logarithms", linear.name, STOCK)
    return _compared(
        size,
        candidate(f"mixture of {size.mixtures} softmaxes", ours, peers),
        candidate("probabilities", probabilities, kept=2),
        candidate("logarithms", logarithms, kept=3),
        linear,
        one,
    )


def _compared(size: Size, *candidates: Candidate) -> Comparison:
    return Comparison(str(size), size.tokens, BOTH, candidates)


# the closer look

REFERENCE = "cross_entropy fp32"
SIZES = [
    *(Size(700, 1, 10_000, 200), Size(1024, 1, 10_000, 512), Size(700, 1, 33_000, 200)),
    *(Size(700, mixtures, 10_000, 200) for mixtures in (2, 5, 10, 15)),
    Size(700, 5, 33_000, 200),
]


ONE: dict[str, tuple[Loss, bool]] = {
    "cross_entropy fp32": (stock, False),
    "linear_cross_entropy fp32": (chunked(None), False),
    "linear_cross_entropy fp32, 256 rows": (chunked(256), False),
    "weighted_loss fp32": (ours, False),
    "cross_entropy bf16": (stock, True),
    "weighted_loss bf16": (ours, True),
}
MIXED: dict[str, tuple[Loss, bool]] = {
    "cross_entropy fp32": (stock, False),
    "probabilities fp32": (probabilities, False),
    "logarithms fp32": (logarithms, False),
    "linear_cross_entropy fp32": (chunked(None), False),
    "linear_cross_entropy fp32, 256 rows": (chunked(256), False),
    "weighted_loss fp32": (ours, False),
    "probabilities bf16": (probabilities, True),
    "weighted_loss bf16": (ours, True),
}
LAYER = "the whole layer fp32"


def candidates(size: Size) -> list[str]:
    return list(ONE) if size.mixtures == 1 else [*MIXED, LAYER]


def named(size: Size, name: str) -> Callable[[], object]:
    """One forward and backward pass of the loss `name`."""
    if name == LAYER:
        return layer(size)
    loss, bf16 = (ONE if size.mixtures == 1 else MIXED)[name]
    return case(size, loss, Settings(dtype="bf16" if bf16 else "fp32"))


def layer(size: Size) -> Callable[[], None]:
    """`fr.MixtureOfSoftmaxes`, its loss and the gradients of everything."""
    torch.manual_seed(0)
    config = fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=size.mixtures)
    module = fr.MixtureOfSoftmaxes(config, vocab_size=size.vocabulary, hidden_size=size.width)
    hidden = torch.randn(1, size.tokens, size.width, requires_grad=True)
    targets = torch.randint(size.vocabulary, (1, size.tokens))

    def run() -> None:
        module.zero_grad()
        hidden.grad = None
        module.loss(hidden, targets)[0].backward()

    return run


def main() -> None:
    given = parse(
        __doc__,
        make=lambda numbers, name: named(Size(*numbers), name),
        tiny=lambda numbers: (8, numbers[1], 64, 16),
        mixtures={"type": int, "nargs": "+", "metavar": "K", "help": "only sizes with so many softmaxes"},
    )
    results = {}
    for size in (size for size in SIZES if given.mixtures is None or size.mixtures in given.mixtures):
        gflop = 6 * size.tokens * size.mixtures * size.vocabulary * size.width / 1e9

        def figures(timing: Timing, peak: Peak, size: Size = size, gflop: float = gflop) -> dict[str, float | None]:
            work = gflop / size.mixtures if timing.name.startswith(STOCK + " ") else gflop
            return {"gflop_per_second": work / timing.seconds, "memory_mib": memory_mib(timing.name, size)}

        passes = {name: named(size, name) for name in candidates(size)}
        results[str(size)] = table(f"{size}: {gflop:.1f} GFLOP", passes, REFERENCE, given.rounds, figures)
    save(given.json, "vocabulary layer and loss, forward and backward", given.rounds, results)


if __name__ == "__main__":
    main()
