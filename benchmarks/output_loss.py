"""The vocabulary layer's training loss, forward and backward, against what PyTorch offers: time and memory.

    python benchmarks/output_loss.py [--mixtures 1 10] [--rounds 9] [--threads 1] [--json FILE]

One softmax (K = 1):

    cross_entropy         F.cross_entropy(F.linear(h, W, b), targets)
    linear_cross_entropy  F.linear_cross_entropy(h, W, targets, linear_bias=b), chunked: as torch chooses, and 256 rows a chunk
    weighted_loss         ours, with all weights 1/T

A mixture of K softmaxes, from hidden states (T, K, d) and the logarithm of the prior (T, K); times are relative to
cross_entropy of one softmax:

    probabilities         log(sum_k pi_k softmax(W h_k + b) + 1e-8), as the papers' codes have it
    logarithms            logsumexp_k(log pi_k + log_softmax(W h_k + b))
    linear_cross_entropy  logsumexp_k(log pi_k - nll_k), the nll_k of T K rows by F.linear_cross_entropy, the two chunks again
    weighted_loss         ours
    the whole layer       ours, from one hidden state a token: latents, prior and their gradients too

Memory is the growth of the resident high-water mark in a fresh process, over inputs and parameters; gradients are included
(that of W alone takes 4 V d bytes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fullrank as fr
from fullrank.model.cross_entropy import weighted_loss
from harness import interleave, memory_mib, options, peak_growth_mib, save

REFERENCE = "cross_entropy fp32"


@dataclass(frozen=True)
class Size:
    tokens: int
    mixtures: int
    vocabulary: int
    width: int

    def __str__(self) -> str:
        return f"T {self.tokens:,}, K {self.mixtures}, V {self.vocabulary:,}, d {self.width}"


SIZES = [
    *(Size(700, 1, 10_000, 200), Size(1024, 1, 10_000, 512), Size(700, 1, 33_000, 200)),
    *(Size(700, mixtures, 10_000, 200) for mixtures in (2, 5, 10, 15)),
    Size(700, 5, 33_000, 200),
]


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
    def loss(given: Given) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        tokens, mixtures = given.log_prior.shape
        hidden, targets = given.hidden.flatten(0, 1), given.targets.repeat_interleave(mixtures)
        if mixtures == 1:
            return F.linear_cross_entropy(hidden, given.weight, targets, linear_bias=given.bias, options=options)
        each = F.linear_cross_entropy(
            hidden, given.weight, targets, linear_bias=given.bias, reduction="none", options=options
        )
        return -torch.logsumexp(given.log_prior - each.view(tokens, mixtures), 1).mean()

    return loss


def ours(given: Given) -> Tensor:
    tokens, mixtures = given.log_prior.shape
    scale = torch.full((tokens,), 1 / tokens)
    if mixtures == 1:
        return weighted_loss(given.hidden[:, 0], given.weight, given.bias, given.targets, scale)[0]
    return weighted_loss(given.hidden, given.weight, given.bias, given.targets, scale, log_prior=given.log_prior)[0]


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


def case(size: Size, name: str) -> Callable[[], None]:
    """One forward and backward pass of the loss `name`."""
    if name == LAYER:
        return layer(size)
    loss, bf16 = (ONE if size.mixtures == 1 else MIXED)[name]
    if loss is stock:  # what it reads stands alone, so that its backward pass fills no zeros for other components
        size = dataclasses.replace(size, mixtures=1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.mixtures, size.width, generator=generator)
    given = Given(
        (hidden if size.mixtures == 1 else hidden.tanh_()).requires_grad_(),
        torch.randn(size.tokens, size.mixtures, generator=generator).log_softmax(1).requires_grad_(),
        torch.randn(size.vocabulary, size.width, generator=generator).mul_(0.05).requires_grad_(),
        torch.zeros(size.vocabulary, requires_grad=True),
        torch.randint(size.vocabulary, (size.tokens,), generator=generator),
    )

    def run() -> None:
        for tensor in (given.hidden, given.log_prior, given.weight, given.bias):
            tensor.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value = loss(given)
        value.backward()

    return run


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
    parser = options(__doc__)
    parser.add_argument("--mixtures", type=int, nargs="+", metavar="K", help="only sizes with so many softmaxes")
    parser.add_argument(
        "--memory", nargs=5, metavar=("LOSS", "T", "K", "V", "D"), help="print the memory of one loss, in MiB"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory:
        name, *numbers = given.memory
        case(Size(8, int(numbers[1]), 64, 16), name)()  # what a first call allocates once and for all
        print(peak_growth_mib(case(Size(*map(int, numbers)), name)))
        return
    results: dict[str, Any] = {}
    for size in (size for size in SIZES if given.mixtures is None or size.mixtures in given.mixtures):
        timings, peak = interleave(
            {name: case(size, name) for name in candidates(size)}, REFERENCE, rounds=given.rounds
        )
        gflop = 6 * size.tokens * size.mixtures * size.vocabulary * size.width / 1e9
        print(f"{size}: {gflop:.1f} GFLOP; peak fp32 {peak.fp32:.0f}, bf16 {peak.bf16:.0f} GFLOP/s")
        print(f"  {'':<36} {'ms':>6}  time / {REFERENCE} [quartiles]  GFLOP/s  peak memory MiB")
        rows = []
        for timing in timings:
            work = gflop / size.mixtures if timing.name in (REFERENCE, "cross_entropy bf16") else gflop
            speed, memory = work / timing.seconds, memory_mib(__file__, timing.name, *dataclasses.astuple(size))
            rows.append({**dataclasses.asdict(timing), "gflop_per_second": speed, "memory_mib": memory})
            figures = f"{timing.ratio:8.3f} [{timing.low:.3f}, {timing.high:.3f}] {speed:22.0f} {memory:16.0f}"
            print(f"  {timing.name:<36} {1000 * timing.seconds:6.0f}  {figures}")
        results[str(size)] = {"peak_gflop_per_second": dataclasses.asdict(peak), "candidates": rows}
    save(
        given.json,
        {"what": "vocabulary layer and loss, forward and backward", "rounds": given.rounds, "results": results},
    )


if __name__ == "__main__":
    main()
