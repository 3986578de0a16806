"""Gain of a memory on text: finished runs under several protocols of evaluation, mean and spread over seeds.

    fullrank reproduce benchmarks/recipes/memory-ptb.yaml --seeds 3 --from DATA --out runs/memory
    python benchmarks/memory_on_text.py runs/memory/* --json research/measured/memory_ptb.json

Every run is evaluated by every protocol, also by those it was not trained for.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PROTOCOLS: dict[str, list[str]] = {
    "blocks of 32": ["--memory-length", "0", "--segment-length", "32"],
    "window, 32 of context": ["--memory-length", "0", "--context", "32", "--stride", "32"],
    "memory 32": ["--memory-length", "32", "--segment-length", "32"],
    "memory 64": ["--memory-length", "64", "--segment-length", "32"],
    "memory 160": ["--memory-length", "160", "--segment-length", "32"],
    "memory 320": ["--memory-length", "320", "--segment-length", "32"],
    "memory 160, clamped at 64": ["--memory-length", "160", "--segment-length", "32", "--clamp-length", "64"],
}


def evaluate(run: Path, options: list[str], split: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fullrank", "eval", str(run), "--split", split, *options, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def spread(values: list[float]) -> dict[str, Any]:
    return {
        "seeds": [round(value, 3) for value in values],
        "mean": round(statistics.mean(values), 3),
        "deviation": round(statistics.stdev(values), 3) if len(values) > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--split", nargs="+", default=["valid", "test"])
    given = parser.parse_args()
    results = [(run, json.loads((run / "result.json").read_text(encoding="utf-8"))) for run in given.runs]
    results.sort(key=lambda pair: (pair[1]["row"], pair[1]["seed"]))
    rows: dict[str, Any] = {}
    for row in dict.fromkeys(result["row"] for _, result in results):
        mine = [(run, result) for run, result in results if result["row"] == row]
        rows[row] = {
            "parameters": mine[0][1]["parameters"]["total"],
            "tokens_seen": mine[0][1]["tokens_seen"],
            "tokens_per_second": spread([result["tokens_per_second"] for _, result in mine]),
            "perplexity": {},
        }
        for name, options in PROTOCOLS.items():
            found = {split: [evaluate(run, options, split) for run, _ in mine] for split in given.split}
            rows[row]["perplexity"][name] = {
                "protocol": found[given.split[0]][0]["protocol"],
                **{split: spread([one["perplexity"] for one in each]) for split, each in found.items()},
            }
            print(row, name, {k: v["mean"] for k, v in rows[row]["perplexity"][name].items() if k != "protocol"})
    first = results[0][1]
    document = {
        "rows": rows,
        "seeds": sorted({result["seed"] for _, result in results}),
        **{key: first[key] for key in ("recipe", "environment")},
        "corpus": {key: value for key, value in first["corpus"].items() if key != "details"},  # these name local paths
    }
    given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
