"""Relative attention: the kernel of this package against the published pad-and-reshape formula and the reference.

    python benchmarks/relative.py [--rounds 9] [--only training | evaluation | layouts | memory] [--json FILE]

    training    forward and backward of contiguous text with earlier keys
    evaluation  forward without gradients, also in bf16 and for one query
    layouts     forward and backward of keys with a gap, and of a window of keys; the formula, which has neither, stands
                beside them with contiguous text of the same size
    memory      how far the peak of resident memory rises during one forward and backward pass, each in a process of its own

The formula, operands and shapes: `fullrank.bench.relative`.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.bench.candidates import Pass, Settings
from fullrank.bench.harness import interleave
from fullrank.bench.machine import peak_growth_mib
from fullrank.bench.relative import PUBLISHED, Shape, operands, ours, pass_of, published
from script import save

TRAINING = [
    Shape(4, 10, 150, 0, 41),
    Shape(4, 10, 150, 150, 41),
    Shape(1, 8, 512, 0, 64),
    Shape(1, 8, 512, 512, 64),
    Shape(4, 10, 512, 512, 41),
]
EVALUATION = [
    Shape(1, 10, 64, 640, 41),
    Shape(1, 10, 128, 1600, 41),
    Shape(4, 10, 150, 150, 41),
    Shape(1, 10, 1, 640, 41),
]
LAYOUTS = [
    Shape(4, 10, 150, 150, 41, gap=50),
    Shape(4, 10, 150, 150, 41, gap=600),
    Shape(4, 10, 150, 150, 41, window=150),
    Shape(1, 8, 512, 512, 64, gap=512),
    Shape(1, 8, 512, 512, 64, window=512),
]
STAGES: dict[str, dict[str, str]] = {
    "relative": {},
    "relative, sigsoftmax": {"normalize": "sigsoftmax"},
    "relative, Mixhead A": {"mix": "position_independent"},
    "relative, Mixhead B": {"mix": "position_wise"},
}


def named(shape: Shape, name: str, backward: bool, dtype: str = "fp32") -> Pass:
    """The formula, the reference, or the kernel with the stages of that name."""
    given = operands(shape, Settings(dtype=dtype))
    if name == PUBLISHED:
        return pass_of(lambda: published(**given), given, backward)
    kernel = "reference" if name == "reference" else "auto"
    return pass_of(ours(shape, given, kernel, **STAGES.get(name, {}))[0], given, backward)


def output(shape: Shape, name: str) -> Tensor:
    return named(shape, name, False)()


def candidates(shape: Shape, backward: bool) -> dict[str, Pass]:
    """Passes by name. The formula and the reference are first compared with the kernel, where they compute the same."""
    contiguous = dataclasses.replace(shape, gap=0, window=0)
    for other in ["reference"] + ([PUBLISHED] if shape == contiguous else []):
        off = float((output(shape, "relative") - output(shape, other)).abs().max())
        assert off < 1e-4, f"{shape}: off by {off:.1e}"
    made = {PUBLISHED: named(contiguous, PUBLISHED, backward)}
    made |= {name: named(shape, name, backward) for name in ("reference", *STAGES)}
    if not backward:
        made[f"{PUBLISHED}, bf16"] = named(shape, PUBLISHED, False, "bf16")
        made["relative, bf16"] = named(shape, "relative", False, "bf16")
    if shape != contiguous:
        made["relative, all keys, no gap"] = named(contiguous, "relative", backward)
    return made


def times(shape: Shape, backward: bool, rounds: int) -> dict[str, Any]:
    print(f"{shape}: {'forward and backward' if backward else 'forward'}")
    made = candidates(shape, backward)
    timings, _ = interleave(made, PUBLISHED, rounds=rounds)
    for timing in timings:
        quartiles = f"[{1 / timing.high:.2f}, {1 / timing.low:.2f}]"
        print(f"  {timing.name:28} {1e3 * timing.seconds:8.2f} ms   {1 / timing.ratio:5.2f}x {quartiles}", flush=True)
    return {"candidates": [{**dataclasses.asdict(timing), "speed_up": 1 / timing.ratio} for timing in timings]}


def peak(shape: Shape, name: str) -> float:
    """MiB above what was there before the pass."""
    named(Shape(1, shape.heads, 8, 8, shape.size), name, True)()  # what a first call allocates once and for all
    return peak_growth_mib(named(shape, name, True))


def memory(shape: Shape) -> dict[str, Any]:
    print(f"{shape}: peak memory of forward and backward")
    found: dict[str, float] = {}
    numbers = [str(number) for number in dataclasses.astuple(shape)]
    for name in (PUBLISHED, "reference", *STAGES):
        command = [sys.executable, __file__, "--peak", name, *numbers]
        found[name] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"  {name:28} {found[name]:8.1f} MiB  {found[name] / found[PUBLISHED]:5.2f}", flush=True)
    return {"mib": found, "share": {name: size / found[PUBLISHED] for name, size in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["training", "evaluation", "layouts", "memory"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=8, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        name, *numbers = options.peak
        print(peak(Shape(*map(int, numbers)), name))
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "training": lambda: {str(shape): times(shape, True, options.rounds) for shape in TRAINING},
        "evaluation": lambda: {str(shape): times(shape, False, options.rounds) for shape in EVALUATION},
        "layouts": lambda: {str(shape): times(shape, True, options.rounds) for shape in LAYOUTS},
        "memory": lambda: {str(shape): memory(shape) for shape in TRAINING},
    }
    results = {name: part() for name, part in parts.items() if options.only in (None, name)}
    save(options.json, {"what": "relative attention", "rounds": options.rounds, "results": results})


if __name__ == "__main__":
    main()
