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
from pathlib import Path
from typing import Any

from machine import describe_machine

KINDS = {"plain": "none", "Mixhead B": "position_wise"}
WAYS = {"one": (1, "ddp"), "two trainings": (1, "ddp"), "DDP": (2, "ddp"), "FSDP2": (2, "fsdp")}
BATCHES = {"16 x 256": (16, 256, 5), "8 x 128": (8, 128, 12)}  # texts, tokens of each, steps
CASES = [("plain", "16 x 256"), ("Mixhead B", "16 x 256"), ("plain", "8 x 128")]


def settings(kind: str, batch: str) -> dict[str, Any]:
    """The configuration of a training whose evaluation takes no time."""
    texts, tokens, steps = BATCHES[batch]
    return {
        "model": {
            "hidden_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "attention": {"mix": KINDS[kind]},
        },
        "data": {"name": "builtin", "tokens": "bpe"},
        "train": {
            "steps": steps,
            "batch_size": texts,
            "segment_length": tokens,
            "threads": 1,
            "log_every_steps": steps,
        },
        "eval": {"every_steps": steps, "max_tokens": 256},
    }


def started(config: Path, folder: Path, way: str, cores: list[int]) -> subprocess.Popen[str]:
    """A training in so many processes, on these cores."""
    processes, sharding = WAYS[way]
    command = [sys.executable, "-m", "fullrank", "train", str(config), f"train.sharding={sharding}", "--out", str(folder),
               "--procs", str(processes), "--quiet"]  # fmt: skip
    return subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def tokens_per_second(config: Path, folder: Path, way: str, cores: list[int]) -> float:
    """Tokens per second of a training; of two trainings their sum."""
    apart = [[core] for core in cores] if way == "two trainings" else [cores[: WAYS[way][0]]]
    running = [started(config, folder / str(number), way, own) for number, own in enumerate(apart)]
    for one in running:
        said = one.communicate()[1]
        if one.returncode:
            sys.exit(said)
    results = [json.loads((folder / str(number) / "result.json").read_text()) for number in range(len(apart))]
    return sum(float(result["tokens_per_second"]) for result in results)


def compared(kind: str, batch: str, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each way: its tokens per second, and their ratio to those of one process in the same round."""
    rows = []
    for way in WAYS:
        ratios = [one[way] / one["one"] for one in rounds]
        speed, middle = statistics.median(one[way] for one in rounds), statistics.median(ratios)
        row = {
            "model": kind,
            "batch": batch,
            "rounds": len(rounds),
            "processes": way,
            "tokens_per_second": round(speed),
        }
        spread = {"over_one": middle, "lowest": min(ratios), "highest": max(ratios)}
        rows.append(row | {name: round(ratio, 3) for name, ratio in spread.items()})
        print(f"{kind}, {batch} tokens, {way}: {speed:,.0f} tokens/s, {middle:.2f} of one", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two cores are needed")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="processes-") as place:
        for kind, batch in CASES:
            folder = Path(place) / f"{kind}-{batch}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(settings(kind, batch)))
            rounds = [
                {way: tokens_per_second(folder / "config.json", folder / f"{number}-{way}", way, cores) for way in WAYS}
                for number in range(given.rounds)
            ]
            rows += compared(kind, batch, rounds)
            if given.json is not None:
                content = {"results": rows, "environment": describe_machine()}
                given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
