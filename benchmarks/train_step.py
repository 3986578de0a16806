"""One training step of ours against an `nn.TransformerEncoder` language model of the same size.

    python benchmarks/train_step.py [--rounds 9] [--threads 1] [--dropout 0 0.2] [--only small] [--json FILE]

What both consist of: `fullrank.bench.training_step`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from fullrank.bench.candidates import Settings
from fullrank.bench.harness import Peak, Timing, interleave
from fullrank.bench.training_step import Ours, Peer, Size, Step
from script import options, save

REFERENCE = "fullrank fp32"
SIZES = {"small": Size(10_000, 200, 200, 4, 4, 20, 35), "large": Size(10_000, 512, 2048, 8, 6, 4, 256)}


def measure(size: Size, dropout: float, rounds: int) -> tuple[list[Timing], Peak]:
    torch.manual_seed(0)
    inputs, targets = torch.randint(size.vocabulary, (2, size.batch, size.length))
    peer, ours = Peer(size, dropout), Ours(size, dropout)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in ours.parameters())

    def step(model: nn.Module, dtype: str) -> Step:
        return Step(model, inputs, targets, Settings(dtype=dtype).autocast)

    candidates = {
        "nn.TransformerEncoder fp32": step(peer, "fp32"),
        "nn.TransformerEncoder bf16": step(peer, "bf16"),
        "fullrank fp32": step(ours, "fp32"),
        "fullrank bf16": step(ours, "bf16"),
    }
    return interleave(candidates, REFERENCE, rounds=rounds)


def summary(size: Size, timings: list[Timing], peak: Peak) -> dict[str, Any]:
    """The figures of one configuration: for each candidate also tokens/s, GFLOP/s and its share of the peak."""
    tokens, gflop = size.batch * size.length, size.gflop()
    rows = []
    for timing in timings:
        speed = gflop / timing.seconds
        share = speed / (peak.bf16 if timing.name.endswith("bf16") else peak.fp32)
        rows.append(
            {
                **dataclasses.asdict(timing),
                "tokens_per_second": tokens / timing.seconds,
                "gflop_per_second": speed,
                "share_of_peak": share,
            }
        )
    peaks = {**dataclasses.asdict(peak), "bf16_over_fp32": peak.bf16 / peak.fp32}
    found = {"size": str(size), "gflop_per_step": gflop, "peak_gflop_per_second": peaks, "candidates": rows}
    ours = next(timing for timing in timings if timing.name == REFERENCE)
    # the bf16 step cannot be shorter than its products at the bf16 peak
    found["highest_possible_bf16_speedup"] = ours.seconds * peak.bf16 / gflop
    return found


def show(title: str, found: dict[str, Any]) -> None:
    peaks = found["peak_gflop_per_second"]
    print(f"{title}: {found['size']}, {found['gflop_per_step']:.1f} GFLOP a step")
    print(f"  peak of matrix products: fp32 {peaks['fp32']:.0f}, bf16 {peaks['bf16']:.0f} GFLOP/s", end="; ")
    print(f"bf16 can be at most {found['highest_possible_bf16_speedup']:.2f} times as fast as our fp32")
    print(f"  {'':<28} {'ms':>7}  time / {REFERENCE} [quartiles]  tokens/s  share of peak")
    for row in found["candidates"]:
        quartiles = f"[{row['low']:.3f}, {row['high']:.3f}]"
        figures = f"{row['ratio']:9.3f} {quartiles}  {row['tokens_per_second']:14.0f} {row['share_of_peak']:14.0%}"
        print(f"  {row['name']:<28} {1000 * row['seconds']:7.0f}  {figures}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.2])
    parser.add_argument("--only", choices=SIZES)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    results = {}
    for name, size in SIZES.items():
        if given.only in (None, name):
            for dropout in given.dropout:
                title = f"{name}, dropout {dropout:g}"
                results[title] = summary(size, *measure(size, dropout, given.rounds))
                show(title, results[title])
    save(given.json, {"what": "one training step", "rounds": given.rounds, "results": results})


if __name__ == "__main__":
    main()
