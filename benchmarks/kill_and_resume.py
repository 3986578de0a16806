"""Does a run that is killed and resumed end as one that never was?

    python benchmarks/kill_and_resume.py benchmarks/recipes/two-phases-enwik8.yaml --from DATA --at 70,230,380 --out runs/kill

Trains CONFIG once in peace and once killed by SIGKILL as soon as each of the given steps is in `metrics.jsonl`, and compares
every file that a run promises to be a function of its configuration and seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROMISED = (
    "metrics.jsonl",
    "checkpoints/best/model.safetensors",
    "checkpoints/last/model.safetensors",
    "checkpoints/last/training.safetensors",
)


def train(config: Path, folder: Path, overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", "fullrank", "train", str(config), *overrides, "--out", str(folder), "--quiet"]


def last_line(folder: Path) -> dict[str, object]:
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    try:
        found: dict[str, object] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"step": 0, "phase": None}
    return found


def kill_at(command: list[str], folder: Path, step: int) -> dict[str, object]:
    """Start or resume the run, kill it once `step` is written; what it had reached."""
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while int(str(last_line(folder)["step"])) < step and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        code = process.wait()
    reached = last_line(folder)
    return {"asked": step, "step": reached["step"], "phase": reached.get("phase"), "killed": code == -9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--from", dest="source", help="the folder that holds the corpus")
    parser.add_argument("--at", default="70,230,380", help="steps at which the run is killed")
    parser.add_argument("--out", type=Path, default=Path("runs/kill"))
    parser.add_argument("--json", type=Path, help="where to write what was found")
    given = parser.parse_args()
    overrides = [*given.overrides, *(["--from", given.source] if given.source else [])]
    whole, broken = given.out / "whole", given.out / "broken"
    for folder in (whole, broken):
        shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(train(given.config, whole, overrides), check=True)
    command = train(given.config, broken, overrides)
    kills = [kill_at(command, broken, int(step)) for step in given.at.split(",")]
    subprocess.run([sys.executable, "-m", "fullrank", "train", str(broken), "--quiet"], check=True)
    digests = {
        name: [hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (whole, broken)]
        for name in PROMISED
    }
    result = json.loads((whole / "result.json").read_text(encoding="utf-8"))
    found = {
        "config": str(given.config),
        "kills": kills,
        "identical": {name: a == b for name, (a, b) in digests.items()},
        "sha256": {name: a for name, (a, _) in digests.items()},
        **{key: result[key] for key in ("seed", "steps", "ms_per_step", "final", "protocol", "environment")},
        "corpus": {key: value for key, value in result["corpus"].items() if key != "details"},  # these name local paths
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    if not all(found["identical"].values()) or not all(kill["killed"] for kill in kills):
        sys.exit("the runs differ, or a kill came after the end")


if __name__ == "__main__":
    main()
