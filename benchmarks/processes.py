"""Two processes on two cores against one process on one core: tokens per second of the same training, in turn.

    python benchmarks/processes.py --rounds 3 --json research/measured/processes.json

A model of width 512 is trained on the built-in text by `fullrank train`, plain and with Mixhead B: by one process on one
core, then by two on two, each with half of every batch. Two trainings that know nothing of each other, side by side, say how
much of two cores this machine gives at all. A ratio is that of the tokens per second of result.json (training alone, without
the first step) of the same round; median and range of the rounds are printed. The machine should be idle: processes wait for
each other, so that what disturbs one core disturbs both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import write_json

WAYS = {  # processes, sharding
    "one": (1, "ddp"),
    "two trainings": (1, "ddp"),
    "DDP": (2, "ddp"),
    "FSDP2": (2, "fsdp"),
}


@dataclass(frozen=True)
class Case:
    """A model, and a batch of texts of so many tokens."""

    model: str
    mix: str
    texts: int
    tokens: int
    steps: int

    @property
    def batch(self) -> str:
        return f"{self.texts} x {self.tokens}"

    def make_config(self) -> dict[str, Any]:
        """Make the configuration of a training whose evaluation takes no time."""
        return {
            "model": {
                "hidden_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "attention": {"mix": self.mix},
            },
            "data": {"name": "builtin", "tokens": "bpe"},
            "train": {
                "steps": self.steps,
                "batch_size": self.texts,
                "segment_length": self.tokens,
                "threads": 1,
                "log_every_steps": self.steps,
            },
            "eval": {"every_steps": self.steps, "max_tokens": 256},
        }


CASES = (
    Case("plain", "none", 16, 256, 5),
    Case("Mixhead B", "position_wise", 16, 256, 5),
    Case("plain", "none", 8, 128, 12),
)


def start(config: Path, folder: Path, way: str, cores: list[int]) -> subprocess.Popen[str]:
    """Start a training in so many processes, on these cores."""
    processes, sharding = WAYS[way]
    on_cores = ["taskset", "-c", ",".join(map(str, cores))]
    train = [sys.executable, "-m", "fullrank", "train", str(config), f"train.sharding={sharding}"]
    options = ["--out", str(folder), "--procs", str(processes), "--quiet"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*on_cores, *train, *options],
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def measure_speed(config: Path, folder: Path, way: str, cores: list[int]) -> float:
    """Measure the tokens per second of a training; of two trainings their sum."""
    apart = [[core] for core in cores] if way == "two trainings" else [cores[: WAYS[way][0]]]
    folders = [folder / str(number) for number in range(len(apart))]
    running = [start(config, each, way, subset) for each, subset in zip(folders, apart, strict=True)]
    for process in running:
        _, said = process.communicate()
        if process.returncode:
            sys.exit(said)
    results = [json.loads((each / "result.json").read_text()) for each in folders]
    return sum(float(result["tokens_per_second"]) for result in results)


def compare(case: Case, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Compare the ways: a row for each, its tokens per second and their ratio to those of one process in the same round."""
    rows = []
    for way in WAYS:
        speed = statistics.median(each[way] for each in rounds)
        ratios = [each[way] / each["one"] for each in rounds]
        middle = statistics.median(ratios)
        row = {
            "model": case.model,
            "batch": case.batch,
            "rounds": len(rounds),
            "processes": way,
            "tokens_per_second": round(speed),
            "over_one": round(middle, 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
        }
        rows.append(row)
        print(f"{case.model}, {case.batch} tokens, {way}: {speed:,.0f} tokens/s, {middle:.2f} of one", flush=True)
    return rows


def main() -> None:
    """Train every case in every way, as often as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two cores are needed")
    rows = []
    with tempfile.TemporaryDirectory(prefix="processes-") as place:
        for number, case in enumerate(CASES):
            folder = Path(place, str(number))
            folder.mkdir()
            config = folder / "config.json"
            config.write_text(json.dumps(case.make_config()))
            rounds = []
            for count in range(options.rounds):
                speeds = {way: measure_speed(config, folder / f"{count}-{way}", way, cores) for way in WAYS}
                rounds.append(speeds)
            rows += compare(case, rounds)
            write_json(options.json, {"results": rows})


if __name__ == "__main__":
    main()
