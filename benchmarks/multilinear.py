"""Causal multi-linear attention, forward and backward, against the masked tensor of all pairs of every query.

    python benchmarks/multilinear.py [--rounds 9] [--threads 1] [--tokens N ..] [--json FILE]

    naive fp32          T = (Q g o K) V^T (B, N, N, N), masked, times W (N^2, E), with autograd
    einsum fp32         the same by torch.einsum, as the equation reads
    multilinear fp32    ours
    naive bf16, multilinear bf16    the same under autocast
    length-free fp32    ours, with W(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr, S = 8: no N^2 parameters, another function

Sizes: B texts of N tokens, rank R, width E, two cores. Memory is the growth of the resident high-water mark in a fresh process,
over inputs and parameters, gradients included (4 N^2 E bytes for W alone). The largest naive form needs about 2 GiB.
`gflop_per_second`: products only, two for a multiply-add, those of what the backward pass computes again included.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fullrank.bench.candidates import Pass, Settings
from fullrank.bench.harness import interleave
from fullrank.bench.machine import peak_growth_mib
from fullrank.bench.multilinear import CORES, RANK, SCALES, SEED, WIDTH, Size, case
from fullrank.kernels.multilinear_plan import Shape, multiply_adds
from script import memory_mib, options, save

REFERENCE = "naive fp32"
BATCHES = {32: (1, 2, 4, 8, 60), 64: (1, 8), 80: (1, 8), 128: (1, 4), 256: (1, 4)}  # by tokens
SIZES = [Size(batch, tokens, RANK, WIDTH) for tokens, batches in BATCHES.items() for batch in batches]
LENGTH_FREE = "length-free fp32"
CANDIDATES = ("naive fp32", "einsum fp32", "multilinear fp32", "naive bf16", "multilinear bf16", LENGTH_FREE)
CANDIDATES_IN_WORDS = {
    "naive": "T = (Q g o K) V^T (B, N, N, N), masked, times W (N^2, E), with autograd",
    "einsum": "the same by two calls of torch.einsum",
    "multilinear": "fullrank.kernels.multilinear",
    "length-free": f"another function: W(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr, S = {SCALES}, no N^2 parameters",
    "bf16": "the same under autocast, parameters in fp32",
}


def flops(size: Size, name: str) -> int | None:
    """Of the products of a forward and a backward pass; None where it is not a product with T."""
    if name == LENGTH_FREE:
        return None
    if name.startswith("multilinear"):
        narrow = name.endswith("bf16")
        shape = Shape(size.batch, size.tokens, size.tokens, size.rank, size.width, True, False, narrow=narrow)
        return 2 * multiply_adds(shape).training
    return 6 * size.batch * size.tokens**3 * (size.rank + size.width)


def named(size: Size, name: str) -> Pass:
    """One forward and backward pass of a candidate: its form and its dtype."""
    form, _, dtype = name.rpartition(" ")
    return case(size, form, Settings(dtype=dtype))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="only sizes with so many tokens")
    parser.add_argument(
        "--memory", nargs=5, metavar=("NAME", "B", "N", "R", "E"), help="print the memory of one pass, in MiB"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory:
        name, *numbers = given.memory
        named(Size(1, 8, 8, 16), name)()  # what a first call allocates once and for all
        print(peak_growth_mib(named(Size(*map(int, numbers)), name)))
        return
    results: dict[str, Any] = {}
    for size in (size for size in SIZES if given.tokens is None or size.tokens in given.tokens):
        results[str(size)] = measured(size, given.rounds)
    save(
        given.json,
        {
            "what": "causal multi-linear attention, forward and backward",
            "rounds": given.rounds,
            "config": {"rank": RANK, "width": WIDTH, "cores": CORES, "causal": "masked", "decays": SCALES},
            "seed": SEED,
            "reference": REFERENCE,
            "candidates": CANDIDATES_IN_WORDS,
            "memory": "growth of the resident high-water mark over inputs and parameters, fresh process, with gradients",
            "results": results,
        },
    )


def measured(size: Size, rounds: int) -> dict[str, Any]:
    """All candidates at one size: time, speed-up and memory beside the reference."""
    timings, peak = interleave({name: named(size, name) for name in CANDIDATES}, REFERENCE, rounds=rounds)
    print(f"{size}; peak fp32 {peak.fp32:.0f}, bf16 {peak.bf16:.0f} GFLOP/s")
    print(f"  {'':<20} {'ms':>8}  time / {REFERENCE} [quartiles]  peak memory MiB, / {REFERENCE}")
    rows: list[dict[str, Any]] = []
    for timing in timings:
        memory = memory_mib(__file__, timing.name, *dataclasses.astuple(size))
        share = memory / rows[0]["memory_mib"] if rows else 1.0  # the reference comes first
        done = flops(size, timing.name)
        rate = None if done is None else done / timing.seconds / 1e9
        rows.append(
            {**dataclasses.asdict(timing), "speed_up": 1 / timing.ratio, "gflop_per_second": rate,
             "memory_mib": memory, "memory_share": share}
        )  # fmt: skip
        figures = f"{timing.ratio:8.3f} [{timing.low:.3f}, {timing.high:.3f}] {memory:16.0f} {share:8.3f}"
        print(f"  {timing.name:<20} {1000 * timing.seconds:8.2f}  {figures}", flush=True)
    return {"peak_gflop_per_second": dataclasses.asdict(peak), "candidates": rows}


if __name__ == "__main__":
    main()
