"""Corpora larger than memory: memory and time of preparing one and of training on it, beside a small one.

    python benchmarks/large_corpus.py --folder /tmp/large --json research/measured/large_corpus.json

Makes two texts of Zipf-distributed words (seeded), 2 GB and 200 MB, with a million types; prepares each in a process of its own
with as many processes as there are cores, and the small one with a single core, too; then trains the same small model on both,
in turn. Needs Linux and, for the full size, 16 GB on the disk; the folder is removed at the end.

Memory is the most that the process and its children held at once of their own: Pss_Anon of /proc/PID/smaps_rollup, summed over
the tree twice a second. Anonymous pages that forked processes share are counted once; pages of files (libraries, and
token ids in the memory map) are not counted, because the system can drop them. `mapped` is the most of these, Pss_File.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from machine import describe_machine

CASES: dict[str, dict[str, Any]] = {
    "words": {"tokens": "word", "max_vocabulary": 20_000},
    "bytes": {"tokens": "byte"},
    "words, all types": {"tokens": "word"},  # is prepared only: a model of so many words is another question
}
MODEL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
SPLITS = ("train", "valid", "test")
WORDS_IN_A_LINE, WORDS_AT_ONCE = 25, 1 << 17
MIB = 1 << 20


def make_text(path: Path, size: int, types: int, seed: int) -> None:
    """At least `size` bytes: the word of rank r is drawn in proportion to 1 / (r + 2.7)."""
    draw = np.random.default_rng(seed)
    letters = draw.integers(ord("a"), ord("z") + 1, (types, 5), dtype=np.uint8)
    words = np.array([f"{bytes(row).decode()}{rank:x}" for rank, row in enumerate(letters)], dtype=object)
    border = np.cumsum(1 / (np.arange(types) + 2.7))
    with path.open("w", encoding="ascii") as file:
        while file.tell() < size:
            chosen = words[np.searchsorted(border, draw.random(WORDS_AT_ONCE) * border[-1])].tolist()
            lines = (" ".join(chosen[i : i + WORDS_IN_A_LINE]) for i in range(0, len(chosen), WORDS_IN_A_LINE))
            file.write("\n".join(lines) + "\n")


@dataclass
class Measured:
    """A command that has ended: its output, wall-clock seconds, and the most memory of its process tree, in MiB."""

    output: str
    seconds: float
    own_mib: float
    mapped_mib: float
    processes: int


def tree(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for pid in found:
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
        except OSError:  # it has ended
            continue
    return found


def memory_of(pid: int) -> dict[str, int]:
    """kB of /proc/PID/smaps_rollup by name."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return {}
    return {name: int(value.split()[0]) for name, _, value in (row.partition(":") for row in rows)}


def measured(arguments: list[str], cores: set[int]) -> Measured:
    """Run `fullrank` with these arguments on these cores."""
    began = time.monotonic()
    command = ["taskset", "-c", ",".join(map(str, sorted(cores))), sys.executable, "-m", "fullrank", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        own = mapped = processes = 0
        while process.poll() is None:
            each = [memory for pid in tree(process.pid) if (memory := memory_of(pid))]
            own = max(own, sum(memory["Pss_Anon"] for memory in each))
            mapped = max(mapped, sum(memory["Pss_File"] for memory in each))
            processes = max(processes, len(each))
            time.sleep(0.5)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        sys.exit(f"{command} failed")
    return Measured(output, time.monotonic() - began, own / 1024, mapped / 1024, processes)


def prepare(case: str, text: Path, cache: Path, cores: set[int]) -> dict[str, Any]:
    settings = [f"data.{key}={value}" for key, value in CASES[case].items()]
    files = [f"data.{split}={text / split}.txt" for split in SPLITS]
    found = measured(["data", "prepare", "text", *files, *settings, "--to", str(cache), "--json"], cores)
    described = json.loads(found.output)
    size = sum((text / f"{split}.txt").stat().st_size for split in SPLITS)
    return {
        "corpus": f"{size / 1e6:,.0f} MB",
        "cores": len(cores),
        "processes": found.processes,
        "seconds": round(found.seconds, 1),
        "mb_per_second": round(size / 1e6 / found.seconds, 1),
        "own_mib": round(found.own_mib),
        "tokens": described["tokens"]["train"],
        "vocabulary": described["vocabulary"],
    }


def train(case: str, text: Path, cache: Path, run: Path, steps: int, cores: set[int]) -> Measured:
    """Train the model on shuffled blocks of the prepared text, whose memory map is read at random."""
    config = {
        "model": MODEL,
        "data": {"name": "text", "cache": str(cache), **{split: str(text / f"{split}.txt") for split in SPLITS}}
        | CASES[case],
        "train": {
            "steps": steps, "batch_size": 16, "segment_length": 64, "order": "shuffled", "threads": 1, "warmup_steps": 10,
        },
        "eval": {"batch_size": 16, "max_tokens": 20_000},
    }  # fmt: skip
    path = run.with_suffix(".json")
    path.write_text(json.dumps(config), encoding="utf-8")
    shutil.rmtree(run, ignore_errors=True)
    return measured(["train", str(path), "--out", str(run), "--quiet"], cores)


def main() -> None:
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
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    try:
        for name, size in (("large", given.large), ("small", given.small)):
            (given.folder / name).mkdir()
            for split, part in (("train", int(size)), ("valid", 1 << 20), ("test", 1 << 20)):
                make_text(given.folder / name / f"{split}.txt", part, given.types, seed=SPLITS.index(split))
        results: dict[str, Any] = {}
        for case in given.cases:
            results[case] = one_case(case, given)
            if given.json:
                save(given, results)
    finally:
        shutil.rmtree(given.folder)


def save(given: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write what was measured so far, and how."""
    settings = {key: getattr(given, key) for key in ("types", "steps", "rounds")}
    whole = {
        "what": (__doc__ or "").split("\n")[0],
        "memory": "Pss_Anon of the process tree",
        **settings,
        "model": MODEL,
    }
    document = {**whole, "results": results, "environment": describe_machine()}
    given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def one_case(case: str, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one kind of tokens."""
    all_cores = os.sched_getaffinity(0)
    one = {min(all_cores)}
    texts = {name: given.folder / name for name in ("large", "small")}
    cache = given.folder / "cache"
    preparing = [
        prepare(case, texts["small"], given.folder / "again", one),
        *(prepare(case, text, cache, all_cores) for text in texts.values()),
    ]
    for row in preparing:
        print(case, row, flush=True)
    training = []
    if "all" not in case:
        runs: dict[str, list[tuple[Measured, float]]] = {name: [] for name in texts}
        for _ in range(given.rounds):
            for name, text in texts.items():
                run = given.folder / f"run-{name}"
                found = train(case, text, cache, run, given.steps, one)
                speed = json.loads((run / "result.json").read_text(encoding="utf-8"))["tokens_per_second"]
                runs[name].append((found, speed))
        for name, some in runs.items():
            speeds = [speed for _, speed in some]
            row = {
                "corpus": preparing[1 if name == "large" else 2]["corpus"],
                "own_mib": round(max(found.own_mib for found, _ in some)),
                "mapped_mib": round(max(found.mapped_mib for found, _ in some)),
                "tokens_per_second": round(statistics.median(speeds)),
                "lowest": round(min(speeds)),
                "highest": round(max(speeds)),
            }
            ratios = [a / b for (_, a), (_, b) in zip(some, runs["small"], strict=True)]
            training.append(row | {"over_small": round(statistics.median(ratios), 3)})
            print(case, training[-1], flush=True)
    for folder in (cache, given.folder / "again"):
        shutil.rmtree(folder)
    return {"preparing": preparing, "training": training}


if __name__ == "__main__":
    main()
