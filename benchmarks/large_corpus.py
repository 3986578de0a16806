"""Corpora larger than memory: memory and time of preparing one and of training on it, beside a small one.

    python benchmarks/large_corpus.py --folder /tmp/large --json research/measured/large_corpus.json

Makes two texts of Zipf-distributed words (seeded), 2 GB and 200 MB, with a million types; prepares each in a process of its own
with as many processes as there are cores, and the small one with a single core, too; then trains the same small model on both,
in turn. Needs Linux and, for the full size, 16 GB on the disk; the folder is removed at the end.

Memory is the most that the process and its children held at once of their own: Pss_Anon of /proc/PID/smaps_rollup, summed
over all processes of the command twice a second. Anonymous pages that forked processes share are counted once; pages of files
(libraries, and token ids in the memory map) are not counted, because the system can drop them. `mapped` is the most of these,
Pss_File.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from machine import write_json

ALL_TYPES = "words, all types"
CASES = {
    "words": {"tokens": "word", "max_vocabulary": 20_000},
    "bytes": {"tokens": "byte"},
    ALL_TYPES: {"tokens": "word"},  # is prepared only: a model of so many words is another question
}
MODEL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
SPLITS = ("train", "valid", "test")
WORDS_IN_A_LINE = 25
WORDS_AT_ONCE = 1 << 17
MIB = 1 << 20


def make_text(path: Path, size: int, types: int, seed: int) -> None:
    """Write at least `size` bytes: the word of rank r is drawn in proportion to 1 / (r + 2.7)."""
    draw = np.random.default_rng(seed)
    letters = draw.integers(ord("a"), ord("z") + 1, (types, 5), dtype=np.uint8)
    words = np.array([f"{bytes(row).decode()}{rank:x}" for rank, row in enumerate(letters)], dtype=object)
    border = np.cumsum(1 / (np.arange(types) + 2.7))
    with path.open("w", encoding="ascii") as file:
        while file.tell() < size:
            chosen = words[np.searchsorted(border, draw.random(WORDS_AT_ONCE) * border[-1])].tolist()
            lines = (" ".join(chosen[i : i + WORDS_IN_A_LINE]) for i in range(0, len(chosen), WORDS_IN_A_LINE))
            file.write("\n".join(lines) + "\n")


def read_memory(group: int) -> Counter[str]:
    """Sum the kB of /proc/PID/smaps_rollup over the processes of a group, by name, and count the `processes`."""
    sums = Counter()
    for folder in Path("/proc").glob("[1-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(folder.name)) == group:
                _, *rows = (folder / "smaps_rollup").read_text().splitlines()
                for row in rows:
                    name, kilobytes, _ = row.split()
                    sums[name.removesuffix(":")] += int(kilobytes)
                sums["processes"] += 1
    return sums


def run_measured(arguments: list[str], cores: set[int]) -> tuple[str, Counter[str]]:
    """Run `fullrank` with these arguments on these cores; return its output, and the most that `read_memory` read."""
    command = ["taskset", "-c", ",".join(map(str, sorted(cores))), sys.executable, "-m", "fullrank", *arguments]
    most = Counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        while process.poll() is None:
            most |= read_memory(process.pid)  # of each name the larger
            time.sleep(0.5)
        output = process.stdout.read()
    if process.returncode:
        sys.exit(f"{command} failed")
    return output, most


@dataclass(frozen=True)
class Text:
    """A text in `folder`: training on so many bytes, validation and test on a MiB each."""

    folder: Path
    size: int

    @property
    def megabytes(self) -> float:
        return (self.size + 2 * MIB) / 1e6

    def __str__(self) -> str:
        return f"{self.megabytes:,.0f} MB"

    def files(self) -> dict[str, str]:
        return {split: str(self.folder / f"{split}.txt") for split in SPLITS}

    def make(self, types: int) -> None:
        self.folder.mkdir()
        for seed, (split, path) in enumerate(self.files().items()):
            make_text(Path(path), self.size if split == "train" else MIB, types, seed)


def prepare(case: str, text: Text, cache: Path, cores: set[int]) -> dict[str, Any]:
    """Prepare a text into `cache` on these cores, and return a row of the results."""
    settings = [f"data.{key}={value}" for key, value in {**text.files(), **CASES[case]}.items()]
    began = time.monotonic()
    output, most = run_measured(["data", "prepare", "text", *settings, "--to", str(cache), "--json"], cores)
    seconds = time.monotonic() - began
    described = json.loads(output)
    row = {
        "corpus": str(text),
        "cores": len(cores),
        "processes": most["processes"],
        "seconds": round(seconds, 1),
        "mb_per_second": round(text.megabytes / seconds, 1),
        "own_mib": most["Pss_Anon"] // 1024,
        "tokens": described["tokens"]["train"],
        "vocabulary": described["vocabulary"],
    }
    print(case, row, flush=True)
    return row


def train(case: str, text: Text, cache: Path, steps: int, cores: set[int]) -> Counter[str]:
    """Train the model on shuffled blocks of the prepared text, whose memory map is read at random.

    Returns the most that `read_memory` read, and the tokens per second as `speed`.
    """
    config = {
        "model": MODEL,
        "data": {"name": "text", "cache": str(cache), **text.files(), **CASES[case]},
        "train": {
            "steps": steps,
            "batch_size": 16,
            "segment_length": 64,
            "order": "shuffled",
            "threads": 1,
            "warmup_steps": 10,
        },
        "eval": {"batch_size": 16, "max_tokens": 20_000},
    }
    path = text.folder / "config.json"
    run = text.folder / "run"
    path.write_text(json.dumps(config))
    shutil.rmtree(run, ignore_errors=True)
    _, most = run_measured(["train", str(path), "--out", str(run), "--quiet"], cores)
    result = json.loads((run / "result.json").read_text())
    most["speed"] = result["tokens_per_second"]
    return most


def train_in_turn(case: str, texts: list[Text], cache: Path, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Train on all texts in turn, on one core, and return a row for each; the last is the small one."""
    core = {min(os.sched_getaffinity(0))}
    runs = [[train(case, text, cache, steps, core) for text in texts] for _ in range(rounds)]
    small = [of_round[-1]["speed"] for of_round in runs]
    rows = []
    for text, of_text in zip(texts, zip(*runs, strict=True), strict=True):
        speeds = [run["speed"] for run in of_text]
        ratios = [speed / of_small for speed, of_small in zip(speeds, small, strict=True)]
        row = {
            "corpus": str(text),
            "own_mib": max(run["Pss_Anon"] for run in of_text) // 1024,
            "mapped_mib": max(run["Pss_File"] for run in of_text) // 1024,
            "tokens_per_second": round(statistics.median(speeds)),
            "lowest": round(min(speeds)),
            "highest": round(max(speeds)),
            "over_small": round(statistics.median(ratios), 3),
        }
        print(case, row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Make the texts, prepare them and train on them, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where texts, caches and runs are for the time being"
    )
    parser.add_argument("--large", type=float, default=2e9, help="bytes of the large text")
    parser.add_argument("--small", type=float, default=2e8, help="bytes of the small text")
    parser.add_argument("--types", type=int, default=1_000_000, help="different words")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5, help="trainings on each text, in turn")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    cores = os.sched_getaffinity(0)
    try:
        large = Text(options.folder / "large", int(options.large))
        small = Text(options.folder / "small", int(options.small))
        for text in (large, small):
            text.make(options.types)
        results = {}
        for case in options.cases:
            again = options.folder / "again"
            cache = options.folder / "cache"
            preparing = [prepare(case, small, again, {min(cores)})]
            preparing += [prepare(case, text, cache, cores) for text in (large, small)]
            training = []
            if case != ALL_TYPES:
                training = train_in_turn(case, [large, small], cache, options.steps, options.rounds)
            results[case] = {"preparing": preparing, "training": training}
            settings = {"types": options.types, "steps": options.steps, "rounds": options.rounds, "model": MODEL}
            write_json(options.json, {"memory": "Pss_Anon of the process tree", **settings, "results": results})
            for folder in (cache, again):
                shutil.rmtree(folder)
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
