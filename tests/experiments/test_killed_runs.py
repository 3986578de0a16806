"""Each kind of task killed and resumed, one of them twice: a kill at any moment changes nothing of the result."""

import time

import pytest

import forked
from small_runs import KINDS, outcome
from tiny_causal import tiny_causal, write_text

MEMORY = "memory, Skip-Retain, cross-head"


def kill_when(folder, lines, *words, verb="train"):
    """Start a training, and kill it when so many lines of metrics and a checkpoint are there."""
    process = forked.start(verb, *words, "--quiet")
    end = time.monotonic() + 200
    metrics = folder / "metrics.jsonl"
    while process.is_alive() and time.monotonic() < end:
        written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if written >= lines and (folder / "checkpoints" / "last").exists():
            break
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -9
    assert not (folder / "result.json").exists()


def finish(*words, verb="train"):
    """Train to the end, in a process as the killed one is: the last digits may vary with what a process did before."""
    process = forked.start(verb, *words, "--quiet")
    process.join()
    assert process.exitcode == 0


FULL = ("translation", "muon, averaging", "masked", "muon")


@pytest.mark.parametrize(
    "name", [MEMORY, *(pytest.param(name, marks=pytest.mark.full) for name in ("fine-tuning", *FULL))]
)
def test_a_killed_run_ends_as_one_never_killed(name, tmp_path):
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
def test_a_killed_distillation_ends_as_one_never_killed(tmp_path):
    """Teacher and student have a memory, which the next batch needs."""
    file = KINDS[MEMORY].write(tmp_path)
    teacher = tmp_path / "teacher"
    finish(file, "--out", teacher)
    part = "--import", "examples.little_data"
    taught = f"train.parts={{distill: {{run: {teacher}}}}}"
    finish(file, taught, *part, "--out", tmp_path / "whole")
    killed = tmp_path / "killed"
    kill_when(killed, 5, file, taught, *part, "--out", killed)
    finish(killed, *part)
    assert outcome(killed) == outcome(tmp_path / "whole") != outcome(teacher)


@pytest.mark.full
@pytest.mark.parametrize("adapter", [(), ("--peft", "lora")], ids=["whole", "adapter"])
def test_a_killed_fine_tuning_on_a_text_ends_as_one_never_killed(adapter, tmp_path):
    """Killed in the plain arm, then in the injected one: the same command resumes the first, its run folder the second."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    text = write_text(tmp_path / "book.txt")
    model = tiny_causal(tmp_path / "gpt2", text)
    settings = (
        "model.attention.mix=position_wise", f"data.cache={tmp_path / 'cache'}", "train.batch_size=4", "train.steps=60",
        "train.segment_length=24", "train.log_every_steps=1", "train.save_every_steps=7", "train.device=cpu",
        "train.check=false", "eval.every_steps=20",
    )  # fmt: skip
    command = (model, "--text", text, *adapter, *settings)
    unbroken = tmp_path / "whole"
    killed = tmp_path / "killed"
    finish(*command, "--out", unbroken, verb="finetune")
    plain, injected = sorted(folder.name for folder in unbroken.iterdir() if folder.is_dir())
    kill_when(killed / plain, 11, *command, "--out", killed, verb="finetune")
    kill_when(killed / injected, 23, *command, "--out", killed, verb="finetune")
    finish(killed / injected, verb="finetune")
    for arm in (plain, injected):
        expected = outcome(unbroken / arm)
        assert len(expected) > 5
        assert outcome(killed / arm) == expected
