"""Several processes that train one model: the same numbers as one, whatever is shared between them."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import together
import torch
from safetensors.torch import load_file

import forked
from run_files import read_metrics, read_result

HERE = Path(__file__).parent
EVERYDAY = {
    "ddp": ["plain", "everything", "mixture", "masked", "translation"],
    "fsdp": ["everything", "little", "bf16"],
}
forked.preload("torch.distributed.fsdp", "torch.distributed.tensor", "fullrank.data.tokenizers")


def run_together(processes, folder, sharding, names):
    """Train the cases by processes that meet at a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        forked.call(together.train_as, rank, processes, port, folder, sharding, names) for rank in range(processes)
    ]
    for rank, process in enumerate(started):
        process.join(300)
        assert process.exitcode == 0, (folder / f"process-{rank}.log").read_text()[-3000:]


def torchrun(processes, *words, restarts=0, **variables):
    options = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    environment.setdefault("LOGLEVEL", "CRITICAL")
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with texts, and what `train_alone` made there."""
    folder = tmp_path_factory.mktemp("together")
    together.write_texts(folder)
    return folder


def train_alone(folder, name):
    """The run of a case by this process alone, trained once."""
    if not (folder / name).is_dir():
        run_in_fp64(folder, name, folder / name)
    return folder / name


def run_in_fp64(folder, name, out, **options):
    torch.set_default_dtype(torch.float64)
    try:
        together.run(folder, name, out, **options)
    finally:
        torch.set_default_dtype(torch.float32)


def weights(run):
    """The file of the last weights of a run; fine-tuning keeps its model and no checkpoint."""
    return next(
        file
        for folder in (run / "model", run / "checkpoints" / "last")
        if (file := folder / "model.safetensors").is_file()
    )


def figures(run):
    lines = read_metrics(run)
    final = read_result(run)["final"]
    ends = [evaluated["loss" if "loss" in evaluated else "nll"] for evaluated in final.values()]
    return [line[key] for line in lines for key in ("step", "nll", "tokens")] + ends


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_several_processes_train_what_one_trains(alone, processes, sharding):
    """Dropout, cross-head, skipped layers, memory, unread tails, uneven rows: within 1e-10, an encoder in fp32 within 1e-5."""
    cases = dict.fromkeys(together.CASES, (1e-10, 1e-8))
    if sharding == "ddp":
        cases |= dict.fromkeys(together.TUNED, (1e-5, 1e-5))  # a pretrained encoder is loaded in fp32
    else:
        cases |= dict.fromkeys(together.NARROW, (2e-3, 0.02))  # of parameters that move by 0.06
    names = EVERYDAY[sharding] if processes == 2 else list(cases)
    run_together(processes, alone, sharding, names)
    for name in names:
        close, near = cases[name]
        run = alone / f"{name}-{sharding}"
        single = train_alone(alone, name)
        expected, trained = (load_file(weights(folder)) for folder in (single, run))
        assert max(float((expected[key] - trained[key]).abs().max()) for key in expected) < close, name
        assert figures(run) == pytest.approx(figures(single), abs=near), name


def rewound(run, copy):
    """A copy of a finished run as it was at the checkpoint before the last one."""
    shutil.copytree(run, copy, symlinks=True)
    (copy / "result.json").unlink()
    checkpoints = copy / "checkpoints"
    (checkpoints / "last").unlink()
    (checkpoints / "last").symlink_to(os.readlink(checkpoints / "previous"))
    return copy


def last_weights(run):
    return (run / "checkpoints" / "last" / "model.safetensors").read_bytes()


@pytest.mark.full
def test_resumed_by_as_many_processes_and_by_one(alone):
    """By as many processes to the byte; by another number of them with the same batches and draws, so to 1e-10."""
    run_together(2, alone, "fsdp", ["everything"])
    run = alone / "everything-fsdp"
    unbroken = alone / "everything-whole"
    parts = rewound(run, alone / "everything-parts")
    run.rename(unbroken)
    parts.rename(run)
    by_one = rewound(unbroken, alone / "everything-one")
    run_together(2, alone, "fsdp", ["everything"])
    assert last_weights(run) == last_weights(unbroken)
    assert (run / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    run_in_fp64(alone, "everything", by_one, sharding="fsdp")
    resumed, expected = (load_file(weights(folder)) for folder in (by_one, unbroken))
    assert max(float((resumed[key] - expected[key]).abs().max()) for key in resumed) < 1e-10
    assert (by_one / "checkpoints" / "last" / "training.safetensors").is_file()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "message"), [("refuses", "the second process refuses"), ("hangs", "did nothing for 5 seconds")]
)
def test_a_process_that_fails_ends_the_others_with_its_message(alone, kind, message):
    patience = "5" if kind == "hangs" else "60"
    process = torchrun(2, HERE / "together.py", alone, "ddp", "plain", FAILURE=kind, FULLRANK_TIMEOUT=patience)
    assert process.returncode != 0
    messages = [line for line in process.stderr.splitlines() if line.startswith("fullrank: ")]
    assert len(messages) == 1
    assert message in messages[0]


@pytest.mark.full
def test_torchrun_starts_killed_processes_again(alone):
    """The remaining process reports that the other is gone; the restarted ones go on from the last checkpoint."""
    run = alone / "plain-killed"
    process = torchrun(2, HERE / "together.py", alone, "ddp", "plain", restarts=1, FAILURE="killed")
    assert process.returncode == 0, process.stderr[-3000:]
    messages = [line for line in process.stderr.splitlines() if line.startswith("fullrank: ")]
    assert len(messages) == 1
    assert "fullrank: process 0 of 2 waited for another one, which is gone" in messages[0]
    single = train_alone(alone, "plain")
    assert figures(run) == pytest.approx(figures(single), abs=1e-8)
    expected, trained = (load_file(weights(folder)) for folder in (single, run))
    assert max(float((expected[key] - trained[key]).abs().max()) for key in expected) < 1e-10


def test_blocks_computed_again_change_nothing(alone, tmp_path):
    run_in_fp64(alone, "everything", tmp_path / "again", activation_checkpointing=True)
    assert last_weights(tmp_path / "again") == last_weights(train_alone(alone, "everything"))
