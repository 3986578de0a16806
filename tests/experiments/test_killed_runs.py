"""Each kind of task killed and resumed, one of them twice: a kill at any moment changes nothing of the result.

`make faults` does the same to more kinds of runs, at random moments.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import forked
from research.small_runs import KINDS, outcome

MEMORY = "memory, Skip-Retain, cross-head"


def kill_when(folder: Path, lines: int, *words: object) -> None:
    """Start a training, and kill it when so many lines of metrics and a checkpoint are there."""
    process = forked.start("train", *words, "--quiet")
    end, metrics = time.monotonic() + 200, folder / "metrics.jsonl"
    while process.is_alive() and time.monotonic() < end:
        written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if written >= lines and (folder / "checkpoints" / "last").exists():
            break
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -9
    assert not (folder / "result.json").exists()


def finish(*words: object) -> None:
    """Train to the end, in a process as the killed one is: the last digits may vary with what a process did before."""
    process = forked.start("train", *words, "--quiet")
    process.join()
    assert process.exitcode == 0


FULL = ("translation", "muon, averaging", "masked", "muon")


@pytest.mark.parametrize(
    "name", [MEMORY, *(pytest.param(name, marks=pytest.mark.full) for name in ("fine-tuning", *FULL))]
)
def test_a_killed_run_ends_as_one_never_killed(name: str, tmp_path: Path) -> None:
    if name == "fine-tuning":
        pytest.importorskip("transformers")
    file = KINDS[name].write(tmp_path)
    finish(file, "--out", tmp_path / "whole")
    killed = tmp_path / "killed"
    kill_when(killed, 5, file, "--out", killed)
    if name == MEMORY:
        kill_when(killed, 9, killed)
    finish(killed)
    assert outcome(killed) == outcome(tmp_path / "whole")


@pytest.mark.full
def test_a_killed_distillation_ends_as_one_never_killed(tmp_path: Path) -> None:
    """Both have a memory, which the next batch needs."""
    file, teacher = KINDS[MEMORY].write(tmp_path), tmp_path / "teacher"
    finish(file, "--out", teacher)
    taught = f"train.parts={{distill: {{run: {teacher}}}}}"
    finish(file, taught, "--out", tmp_path / "whole")
    killed = tmp_path / "killed"
    kill_when(killed, 5, file, taught, "--out", killed)
    finish(killed)
    assert outcome(killed) == outcome(tmp_path / "whole") != outcome(teacher)
