"""Two processes on two cores against one process on one core: tokens per second of the same training, in turn.

    python benchmarks/processes.py --rounds 3 --json docs/results/processes.json

A model of width 512 is trained on the built-in text by `fullrank train`, plain and with Mixhead B: by one process on one
core, then by two on two, each with half of every batch. A ratio is that of the tokens per second of result.json (training
alone, without the first step) of the same round; median and range of the rounds are printed. The machine should be idle:
processes wait for each other, so that what disturbs one core disturbs both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import environment

KINDS = {"plain": "none", "Mixhead B": "position_wise"}
WAYS = {"one": (1, "ddp"), "two, DDP": (2, "ddp"), "two, FSDP2": (2, "fsdp")}


def settings(mix: str, steps: int) -> dict[str, Any]:
    """The configuration of a training whose evaluation takes no time."""
    return {
        "model": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "attention": {"mix": mix}},
        "data": {"name": "builtin", "tokens": "bpe"},
        "train": {"steps": steps, "batch_size": 8, "segment_length": 128, "threads": 1, "log_every_steps": steps},
        "eval": {"every_steps": steps, "max_tokens": 256},
    }


def tokens_per_second(config: Path, folder: Path, way: str, cores: list[int]) -> float:
    """Tokens per second of a training in so many processes, on as many cores."""
    processes, sharding = WAYS[way]
    command = [sys.executable, "-m", "fullrank", "train", str(config), f"train.sharding={sharding}", "--out", str(folder),
               "--procs", str(processes), "--quiet"]  # fmt: skip
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores[:processes])
    try:
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    finally:
        os.sched_setaffinity(0, own)
    if done.returncode:
        sys.exit(done.stderr)
    return float(json.loads((folder / "result.json").read_text())["tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="processes-") as place:
        for kind, mix in KINDS.items():
            config = Path(place) / f"{mix}.json"
            config.write_text(json.dumps(settings(mix, given.steps)))
            rounds = [
                {
                    way: tokens_per_second(config, Path(place) / f"{mix}-{number}-{i}", way, cores)
                    for i, way in enumerate(WAYS)
                }
                for number in range(given.rounds)
            ]
            for way in list(WAYS)[1:]:
                ratios = [one[way] / one["one"] for one in rounds]
                middle = statistics.median(ratios)
                print(f"{kind}: {way} over one {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
                found[f"{kind}, {way}"] = {"median": middle, "rounds": ratios}
            found[f"{kind}, tokens per second"] = rounds
    if given.json is not None:
        given.json.write_text(json.dumps({"figures": found, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
