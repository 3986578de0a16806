"""The softmax layer's training loss, forward and backward, against what PyTorch offers: time and memory.

    python benchmarks/output_loss.py [--rounds 9] [--threads 1] [--json FILE]

    cross_entropy         F.cross_entropy(F.linear(h, W, b), targets)
    linear_cross_entropy  F.linear_cross_entropy(h, W, targets, linear_bias=b), chunked: as torch chooses, and 256 rows a chunk
    weighted_loss         ours, with all weights 1/T

Memory is the growth of the resident high-water mark in a fresh process, over inputs and parameters; gradients are included
(that of W alone takes 4 V d bytes).
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.model.cross_entropy import weighted_loss
from harness import interleave, peak_growth_mib, save

REFERENCE = "cross_entropy fp32"


@dataclass(frozen=True)
class Size:
    tokens: int
    vocabulary: int
    width: int

    def __str__(self) -> str:
        return f"T {self.tokens:,}, V {self.vocabulary:,}, d {self.width}"


SIZES = [Size(700, 10_000, 200), Size(1024, 10_000, 512), Size(700, 33_000, 200)]

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def stock(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), targets)


def chunked(rows: int | None) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, options=options)

    return loss


def ours(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    count = targets.numel()
    return weighted_loss(hidden, weight, bias, targets, torch.full((count,), 1 / count))[0]


LOSSES: dict[str, tuple[Loss, bool]] = {
    "cross_entropy fp32": (stock, False),
    "linear_cross_entropy fp32": (chunked(None), False),
    "linear_cross_entropy fp32, 256 rows": (chunked(256), False),
    "weighted_loss fp32": (ours, False),
    "cross_entropy bf16": (stock, True),
    "weighted_loss bf16": (ours, True),
}


def case(size: Size, name: str) -> Callable[[], None]:
    """One forward and backward pass of the loss `name`."""
    loss, bf16 = LOSSES[name]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.width, generator=generator).requires_grad_()
    weight = torch.randn(size.vocabulary, size.width, generator=generator).mul_(0.05).requires_grad_()
    bias = torch.zeros(size.vocabulary, requires_grad=True)
    targets = torch.randint(size.vocabulary, (size.tokens,), generator=generator)

    def run() -> None:
        hidden.grad = weight.grad = bias.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value = loss(hidden, weight, bias, targets)
        value.backward()

    return run


def memory_mib(size: Size, name: str) -> float:
    """Measured by this script in a process of its own."""
    numbers = [str(number) for number in dataclasses.astuple(size)]
    command = [sys.executable, __file__, "--memory", name, *numbers, "--threads", str(torch.get_num_threads())]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--json", type=Path)
    options.add_argument(
        "--memory", nargs=4, metavar=("LOSS", "T", "V", "D"), help="print the memory of one loss, in MiB"
    )
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory:
        name, *numbers = given.memory
        case(Size(8, 64, 16), name)()  # what a first call allocates once and for all
        print(peak_growth_mib(case(Size(*map(int, numbers)), name)))
        return
    results: dict[str, Any] = {}
    for size in SIZES:
        timings, peak = interleave({name: case(size, name) for name in LOSSES}, REFERENCE, rounds=given.rounds)
        gflop = 6 * size.tokens * size.vocabulary * size.width / 1e9
        print(f"{size}: {gflop:.1f} GFLOP; peak fp32 {peak.fp32:.0f}, bf16 {peak.bf16:.0f} GFLOP/s")
        print(f"  {'':<36} {'ms':>6}  time / {REFERENCE} [quartiles]  GFLOP/s  peak memory MiB")
        rows = []
        for timing in timings:
            speed, memory = gflop / timing.seconds, memory_mib(size, timing.name)
            rows.append({**dataclasses.asdict(timing), "gflop_per_second": speed, "memory_mib": memory})
            figures = f"{timing.ratio:8.3f} [{timing.low:.3f}, {timing.high:.3f}] {speed:22.0f} {memory:16.0f}"
            print(f"  {timing.name:<36} {1000 * timing.seconds:6.0f}  {figures}")
        results[str(size)] = {"peak_gflop_per_second": dataclasses.asdict(peak), "candidates": rows}
    save(
        given.json, {"what": "softmax layer and loss, forward and backward", "rounds": given.rounds, "results": results}
    )


if __name__ == "__main__":
    main()
