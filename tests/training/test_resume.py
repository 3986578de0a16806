"""A run that was stopped or killed ends as one never stopped: metrics and weights, byte for byte.

It is killed before every batch in test_phases.py, at every write to the disk in test_checkpoint.py, and by SIGKILL in
test_killed_runs.py.
"""

import json
import os
import signal

import pytest
import torch
from training_toy import Death, Recorder, at_call, die, evaluate_scored, outcome, train

from fullrank.config.run import PhaseConfig, PlateauConfig
from fullrank.core.errors import Interrupted, RunError

PAUSES = (3, 3, 5, 16, 33)
PHASES = [
    PhaseConfig(name="a", skip="linear", epochs=3.5, plateau=PlateauConfig(ppl=1e9, steps=10)),  # ends on the plateau
    PhaseConfig(name="b", steps=21),
    PhaseConfig(name="c", skip="uniform", p=0.2),
]
CASES = {
    "sgd": {"optimizer": "sgd", "momentum": 0.5, "schedule": "plateau", "gradient_accumulation_steps": 2, "learning_rate": 0.5,
            "epochs": 12.5, "eval_options": {"every_epochs": 0.4}},
    "nag": {"optimizer": "nag", "momentum": 0.9, "averaging": "swa", "swa_start": 0.1, "steps": 60, "save_every_steps": 3},
    "adam": {"optimizer": "adam", "averaging": "swa", "swa_start": 0.3, "schedule": "cosine", "tokens": 800,
             "weight_decay": 0.1},
    "phases": {"steps": 70, "save_every_steps": 2, "phases": PHASES, "averaging": "swa", "swa_start": 0.1},
    "adamw": {"optimizer": "adamw", "schedule": "inverse_sqrt", "warmup_steps": 9, "max_grad_norm": 0.5, "precision": "bf16",
              "steps": 60, "weight_decay": 0.1},
    "bleu": {"evaluate": evaluate_scored, "eval_options": {"every_steps": 4, "metric": "bleu"}, "schedule": "plateau",
             "plateau_patience": 1, "patience": 12, "steps": 60, "save_every_steps": 3, "keep_checkpoints": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("phases", "bleu") else pytest.mark.full) for name in CASES]
)
def test_paused_on_the_way(name, tmp_path):
    """Pauses with and without an evaluation, one of them twice, change nothing; schedules follow the planned steps."""
    options = dict(CASES[name])
    train(tmp_path / "whole", **options)
    for until in PAUSES:
        _, paused = train(tmp_path / "paused", **options, until=until)
        assert paused.step == until
        last = json.loads((tmp_path / "paused" / "checkpoints" / "last" / "checkpoint.json").read_text())
        assert last["content"]["state"]["step"] == until
    train(tmp_path / "paused", **options)
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_resumes_exactly(tmp_path):
    options = {"steps": 24, "save_every_steps": 5, "device": "cuda", "max_grad_norm": 1.0}
    options |= {"averaging": "swa", "swa_start": 0.1}
    train(tmp_path / "whole", **options)
    with pytest.raises(Death):
        train(tmp_path / "killed", **options, objective=at_call(14, die))
    recorder = Recorder()
    train(tmp_path / "killed", **options, observers=[recorder])
    assert recorder.began == (10, 24)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("number", [1, 5, 6, 23])
def test_metrics_beyond_the_checkpoint_are_cut(number, tmp_path):
    """Death between a line and the next checkpoint: the line is written again, not twice."""
    options = {"steps": 24, "log_every_steps": 1, "save_every_steps": 6, "eval_options": {"every_steps": 24}}
    train(tmp_path / "whole", **options)
    with pytest.raises(Death):
        train(tmp_path / "killed", **options, objective=at_call(number, die))
    for name in ("metrics.jsonl", "timing.jsonl"):
        with open(tmp_path / "killed" / name, "a") as file:
            file.write('{"step": 99, "s')
    recorder = Recorder()
    train(tmp_path / "killed", **options, observers=[recorder])
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    assert recorder.began[0] == (number - 1) // 6 * 6
    timing = [json.loads(line) for line in (tmp_path / "killed" / "timing.jsonl").read_text().splitlines()]
    assert timing[-1]["step"] == 24
    assert all(set(line) == {"step", "seconds", "tokens_per_second", "peak_memory_mib"} for line in timing)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(number, tmp_path):
    options = {"steps": 12, "eval_options": {"every_steps": 6}, "averaging": "swa", "swa_start": 0.1}
    train(tmp_path / "whole", **options)
    former = signal.getsignal(number)
    send = at_call(3, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match=rf"stopped by {number.name} after step 3 of 12.*saved in {tmp_path}"):
        train(tmp_path / "stopped", **options, objective=send)
    assert signal.getsignal(number) == former
    recorder = Recorder()
    train(tmp_path / "stopped", **options, observers=[recorder])
    assert recorder.began[0] == 3, "in the middle of a line of metrics"
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_lost_lines_are_reported(tmp_path):
    train(tmp_path, steps=12, until=7)
    (tmp_path / "metrics.jsonl").unlink()
    recorder = Recorder()
    train(tmp_path, steps=12, observers=[recorder])
    assert "its lines before step 7 are lost" in recorder.notices[0]


def test_a_run_folder_belongs_to_one_process(tmp_path):
    def train_again():
        with pytest.raises(RunError, match="another process is training there"):
            train(tmp_path, steps=5)

    train(tmp_path, steps=5, objective=at_call(2, train_again))
