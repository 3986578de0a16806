"""The closer looks of the scripts in this folder: their options, timed tables, memory in a fresh process, JSON."""

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from machine import environment, peak_growth_mib
from timing import PROTOCOL, Peak, Run, Timing, interleave, rounded

Numbers = tuple[int, ...]  # a size, field by field
Figures = Callable[[Timing, Peak], dict[str, float | None]]


def parse(
    description: str | None,
    *,
    make: Callable[[Numbers, str], Run] | None = None,
    tiny: Callable[[Numbers], Numbers] | None = None,
    **more: dict[str, Any],
) -> argparse.Namespace:
    """Read --rounds, --threads, --json, and `more` options of the script.

    make: a pass of a size and a candidate; then `--memory NAME SIZE` prints the memory of one such pass (`memory_mib`), after
    a pass of the `tiny` size, which allocates what is allocated once and for all.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    if make:
        parser.add_argument(
            "--memory", nargs="+", metavar=("NAME", "SIZE"), help="print the memory of one pass, in MiB"
        )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if make and tiny and given.memory:
        numbers = tuple(map(int, given.memory[1:]))
        make(tiny(numbers), given.memory[0])()
        print(peak_growth_mib(make(numbers, given.memory[0])))
        sys.exit()
    return given


def memory_mib(name: str, size: Any) -> float:
    """Peak memory of one pass of the candidate `name` of this script, in a fresh process with as many threads."""
    words = [
        sys.executable,
        sys.argv[0],
        "--threads",
        torch.get_num_threads(),
        "--memory",
        name,
        *dataclasses.astuple(size),
    ]
    return float(subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True).stdout)


def table(
    title: str,
    candidates: Mapping[str, Run],
    reference: str,
    rounds: int,
    figures: Figures = lambda timing, peak: {},
    *,
    warm_up: int = 2,
) -> dict[str, Any]:
    """Time the candidates interleaved and print a line for each; `figures`: further columns."""
    timings, peak = interleave(candidates, reference, rounds=rounds, warm_up=warm_up)
    print(f"{title}\n  peak of matrix products: fp32 {peak.fp32:.0f}, bf16 {peak.bf16:.0f} GFLOP/s")
    rows = []
    for timing in timings:
        further = figures(timing, peak)
        if not rows:
            keys = "".join(f"  {key.replace('_', ' '):>10}" for key in further)
            print(f"  {'':<36} {'ms':>8}  time / {reference} [quartiles]{keys}")
        rows.append({**dataclasses.asdict(timing), "speed_up": 1 / timing.ratio, **further})
        columns = "".join(
            f"  {'' if value is None else f'{value:,.4g}':>{max(10, len(key))}}" for key, value in further.items()
        )
        quartiles = f"{timing.ratio:8.3f} [{timing.low:.3f}, {timing.high:.3f}]"
        print(
            f"  {timing.name:<36} {1000 * timing.seconds:8.2f} {quartiles:>{len(reference) + 19}}{columns}", flush=True
        )
    return {"peak_gflop_per_second": dataclasses.asdict(peak), "candidates": rows}


def save(path: Path | None, what: str, rounds: int, results: Mapping[str, Any], **more: Any) -> None:
    """Write the results, the protocol and the environment as JSON to `path`, if given."""
    if path is None:
        return
    content = {"what": what, "rounds": rounds, **more, "results": results}
    whole = {**content, "protocol": PROTOCOL, "environment": environment()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(whole), indent=2) + "\n", encoding="utf-8")
