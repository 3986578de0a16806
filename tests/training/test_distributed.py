"""Several processes that train one model: the same numbers as one, whatever is shared between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import together
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent


def torchrun(processes: int, *words: object, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        *map(str, words),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and each case trained by this process alone."""
    folder = tmp_path_factory.mktemp("together")
    together.write_texts(folder)
    torch.set_default_dtype(torch.float64)
    try:
        for name in together.CASES:
            together.run(folder, name, folder / name)
    finally:
        torch.set_default_dtype(torch.float32)
    return folder


def figures(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    final = json.loads((run / "result.json").read_text())["final"]
    return [line[key] for line in lines for key in ("step", "nll", "tokens")] + [one["nll"] for one in final.values()]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_several_processes_train_what_one_trains(alone: Path, processes: int, sharding: str) -> None:
    """Dropout, cross-head, skipped layers, memory, unread tails, uneven rows: parameters within 1e-10 in fp64."""
    done = torchrun(processes, HERE / "together.py", alone, sharding)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in together.CASES:
        run = alone / f"{name}-{sharding}"
        one, several = (
            load_file(folder / "checkpoints" / "last" / "model.safetensors") for folder in (alone / name, run)
        )
        assert max(float((one[key] - several[key]).abs().max()) for key in one) < 1e-10, name
        assert figures(run) == pytest.approx(figures(alone / name), abs=1e-8), name
