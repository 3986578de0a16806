"""Causal multi-linear attention, forward and backward, against the masked tensor of all pairs of every query.

    python benchmarks/multilinear.py [--rounds 9] [--threads 1] [--json FILE]

    naive fp32          T = (Q g o K) V^T (B, N, N, N), masked, times W (N^2, E), with autograd
    einsum fp32         the same by torch.einsum, as the equation reads
    multilinear fp32    ours
    naive bf16, multilinear bf16    the same under autocast
    length-free fp32    ours, with W(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr, S = 8: no N^2 parameters, another function

Sizes: B texts of N tokens, rank R, width E. Memory is the growth of the resident high-water mark in a fresh process, over
inputs and parameters; gradients are included (that of W alone takes 4 N^2 E bytes).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.attention.kernels.multilinear import multilinear
from fullrank.attention.kernels.multilinear_decayed import decayed_multilinear
from harness import interleave, memory_mib, peak_growth_mib, save

REFERENCE = "naive fp32"
SCALES = 8


@dataclass(frozen=True)
class Size:
    batch: int
    tokens: int
    rank: int
    width: int

    def __str__(self) -> str:
        return f"B {self.batch}, N {self.tokens}, R {self.rank}, E {self.width}"


SIZES = [
    *(Size(batch, 32, 40, 256) for batch in (1, 8, 60)),
    *(Size(batch, 80, 40, 256) for batch in (1, 8)),
    *(Size(batch, 128, 40, 256) for batch in (1, 4)),
    *(Size(batch, 256, 40, 256) for batch in (1, 4)),
]


@dataclass(frozen=True)
class Given:
    """query, keys, values (B, N, R), cores (2, R), weight (N, N, E)."""

    query: Tensor
    keys: Tensor
    values: Tensor
    cores: Tensor
    weight: Tensor


def _visible(tokens: int) -> Tensor:
    index = torch.arange(tokens)
    return torch.maximum(index[:, None], index) <= index[:, None, None]  # (N, N, N)


def naive(given: Given) -> Tensor:
    batch, tokens, _ = given.query.shape
    pairs = (given.query * given.cores.mean(0))[:, :, None] * given.keys[:, None]  # (B, N, N, R)
    found = (pairs.flatten(1, 2) @ given.values.transpose(1, 2)).view(batch, tokens, tokens, tokens)
    return (found * _visible(tokens)).flatten(2) @ given.weight.flatten(0, 1)


def einsum(given: Given) -> Tensor:
    found = torch.einsum("bir,bjr,bmr->bijm", given.query * given.cores.mean(0), given.keys, given.values)
    return torch.einsum("bijm,jme->bie", found * _visible(given.query.shape[1]), given.weight)


def ours(given: Given) -> Tensor:
    return multilinear(given.query, given.keys, given.values, given.cores, given.weight)


CANDIDATES: dict[str, tuple[Callable[[Given], Tensor], bool]] = {
    "naive fp32": (naive, False),
    "einsum fp32": (einsum, False),
    "multilinear fp32": (ours, False),
    "naive bf16": (naive, True),
    "multilinear bf16": (ours, True),
}
LENGTH_FREE = "length-free fp32"


def case(size: Size, name: str) -> Callable[[], None]:
    """One forward and backward pass of `name`."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values, cotangent = (
        torch.randn(size.batch, size.tokens, last, generator=generator) * last**-0.5
        for last in (size.rank, size.rank, size.rank, size.width)
    )
    cores = torch.rand(2, size.rank, generator=generator)
    leaves = [query, keys, values, cores]
    if name == LENGTH_FREE:
        decays = torch.linspace(-2, -0.01, SCALES)
        leaves += [decays.clone(), decays.clone(), torch.randn(SCALES, size.rank, size.width, generator=generator)]
    else:
        leaves.append(torch.randn(size.tokens, size.tokens, size.width, generator=generator) / size.tokens)
    for leaf in leaves:
        leaf.requires_grad_()

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        if name == LENGTH_FREE:
            query, keys, values, cores, to_keys, to_values, weight = leaves
            out, _ = decayed_multilinear(query, keys, values, cores, (to_keys, to_values), weight)
        else:
            function, bf16 = CANDIDATES[name]
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                out = function(Given(*leaves))
        out.backward(cotangent.to(out.dtype))

    return run


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--json", type=Path)
    options.add_argument("--tokens", type=int, nargs="+", metavar="N", help="only sizes with so many tokens")
    options.add_argument(
        "--memory", nargs=5, metavar=("NAME", "B", "N", "R", "E"), help="print the memory of one pass, in MiB"
    )
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory:
        name, *numbers = given.memory
        case(Size(1, 8, 8, 16), name)()  # what a first call allocates once and for all
        print(peak_growth_mib(case(Size(*map(int, numbers)), name)))
        return
    results: dict[str, Any] = {}
    for size in (size for size in SIZES if given.tokens is None or size.tokens in given.tokens):
        names = [*CANDIDATES, LENGTH_FREE]
        timings, peak = interleave({name: case(size, name) for name in names}, REFERENCE, rounds=given.rounds)
        print(f"{size}; peak fp32 {peak.fp32:.0f}, bf16 {peak.bf16:.0f} GFLOP/s")
        print(f"  {'':<20} {'ms':>8}  time / {REFERENCE} [quartiles]  peak memory MiB")
        rows = []
        for timing in timings:
            memory = memory_mib(__file__, timing.name, *dataclasses.astuple(size))
            rows.append({**dataclasses.asdict(timing), "memory_mib": memory})
            figures = f"{timing.ratio:8.3f} [{timing.low:.3f}, {timing.high:.3f}] {memory:16.0f}"
            print(f"  {timing.name:<20} {1000 * timing.seconds:8.2f}  {figures}", flush=True)
        results[str(size)] = {"peak_gflop_per_second": dataclasses.asdict(peak), "candidates": rows}
    save(
        given.json,
        {"what": "multi-linear attention, forward and backward", "rounds": given.rounds, "results": results},
    )


if __name__ == "__main__":
    main()
