"""The vocabulary layer's training loss, forward and backward, against what PyTorch offers: time and memory.

    python benchmarks/output_loss.py [--mixtures 1 10] [--rounds 9] [--threads 1] [--json FILE]

Losses: `fullrank.bench.output_losses`. `linear_cross_entropy` is chunked as torch chooses, and with 256 rows a chunk; of a
mixture of K softmaxes times are relative to cross_entropy of one softmax, and "the whole layer" is ours from one hidden state a
token: latents, prior and their gradients too.

Memory is the growth of the resident high-water mark in a fresh process, over inputs and parameters; gradients are included
(that of W alone takes 4 V d bytes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import fullrank as fr
from fullrank.bench.candidates import Settings
from fullrank.bench.harness import interleave
from fullrank.bench.machine import peak_growth_mib
from fullrank.bench.output_losses import Loss, Size, case, chunked, logarithms, ours, probabilities, stock
from script import memory_mib, options, save

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
    parser = options(__doc__)
    parser.add_argument("--mixtures", type=int, nargs="+", metavar="K", help="only sizes with so many softmaxes")
    parser.add_argument(
        "--memory", nargs=5, metavar=("LOSS", "T", "K", "V", "D"), help="print the memory of one loss, in MiB"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory:
        name, *numbers = given.memory
        named(Size(8, int(numbers[1]), 64, 16), name)()  # what a first call allocates once and for all
        print(peak_growth_mib(named(Size(*map(int, numbers)), name)))
        return
    results: dict[str, Any] = {}
    for size in (size for size in SIZES if given.mixtures is None or size.mixtures in given.mixtures):
        timings, peak = interleave(
            {name: named(size, name) for name in candidates(size)}, REFERENCE, rounds=given.rounds
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
