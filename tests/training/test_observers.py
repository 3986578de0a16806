from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from training_toy import evaluate_scored, train

from fullrank.core.errors import InputError, RunError
from fullrank.training import make_observers
from fullrank.training.observers import (
    JsonLines,
    LiveLine,
    PlainLines,
    Status,
    TensorBoard,
    WandB,
    metrics_line,
    timing_line,
)


def test_status_says_loss_perplexity_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    status = Status()
    status.start(step=100, total_steps=2000)
    status.advance(101, 1010)
    now[0] += 10
    status.advance(121, 1210)
    status.record({"split": "train", "nll": 5.1, "ppl": 164.0})
    status.record({"split": "valid", "nll": 5.2, "ppl": 181.3})
    status.record({"seconds": 1.0})
    assert status.describe() == "step 121/2000  ETA 15:40  loss 5.100  ppl 164.0  valid ppl 181.3  20 tok/s"


def test_status_says_scores_and_no_more_steps_than_planned() -> None:
    status = Status()
    status.start(step=0, total_steps=727)
    status.advance(728, 10)
    status.record({"step": 5, "split": "valid", "nll": 2.0, "ppl": 7.4, "tokens": 9, "bleu": 31.249, "chrf": 55.0})
    assert status.describe() == "step 728/728  valid ppl 7.4  BLEU 31.2  chrF 55.0"


def test_plain_lines_come_with_every_evaluation_and_now_and_then(tmp_path: Path) -> None:
    stream = io.StringIO()
    train(tmp_path, steps=10, observers=[PlainLines("plain", every=1000.0, stream=stream)])
    found = stream.getvalue().splitlines()
    assert len(found) == 2
    assert re.fullmatch(
        r"plain: step 5/10  ETA 0:00  loss \d\.\d{3}  ppl \d+\.\d  valid ppl \d+\.\d  [\d,]+ tok/s", found[0]
    )
    stream = io.StringIO()
    train(tmp_path / "often", steps=10, observers=[PlainLines("plain", every=0.0, stream=stream)])
    assert len(stream.getvalue().splitlines()) == 12


@pytest.mark.parametrize("width", [30, 60, 80, 200])
@pytest.mark.parametrize("label", ["plain", "a-name-that-is-long-" * 6])
def test_the_live_line_is_one_line_at_any_width(width: int, label: str) -> None:
    live = LiveLine(label)
    live.console.width = width
    live.start(step=0, total_steps=2000)
    live.record({"split": "train", "nll": 5.1, "phase": "first"})
    live.record({"split": "valid", "nll": 5.2, "bleu": 21.3, "chrf": 40.1})
    for step in range(3):
        live.advance(step, 64 * step)
    lines = live.console.render_lines(live.progress.get_renderable(), pad=False)
    live.finish()
    assert len(lines) == 1
    text = "".join(segment.text for segment in lines[0]).rstrip()
    assert len(text) <= width
    assert width < 60 or ("step 2/2000" in text and "ETA" in text)


def test_where_stderr_is_no_terminal_there_are_plain_lines() -> None:
    assert [type(observer) for observer in make_observers(Path("x"))] == [PlainLines]
    assert make_observers(Path("x"), quiet=True) == []


class Recorder:
    def __init__(self, *args: Any, **options: Any) -> None:
        self.made = (args, options)
        self.calls: list[Any] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls += [(name, value, step) for name, value in values.items()]

    def close(self) -> None:
        self.closed = True

    finish = close


def test_tensorboard_gets_every_line_and_forgets_what_lies_beyond_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    [board] = make_observers(tmp_path, track=["tensorboard"], quiet=True)
    assert isinstance(board, TensorBoard)
    train(tmp_path, steps=10, observers=[board], evaluate=evaluate_scored)
    assert board.writer.made == ((str(tmp_path / "tensorboard"),), {"purge_step": 1})
    names = {name for name, _, _ in board.writer.calls}
    assert {"train/nll", "train/ppl", "train/lr", "valid/nll", "valid/bleu", "timing/tokens_per_second"} <= names
    assert {step for name, _, step in board.writer.calls if name == "valid/ppl"} == {5, 10}
    assert board.writer.closed
    [again] = make_observers(tmp_path, track=["tensorboard"], quiet=True)
    train(tmp_path, steps=12, observers=[again])
    assert again.writer.made[1] == {"purge_step": 11}  # type: ignore[attr-defined]


def test_wandb_resumes_under_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("wandb")
    module.init = Recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    runs = []
    for steps in (10, 12):
        [observer] = make_observers(tmp_path / "run", track=["wandb"], config={"seed": 1}, quiet=True)
        assert isinstance(observer, WandB)
        train(tmp_path / "run", steps=steps, observers=[observer])
        runs.append(observer.run)
    first, second = (run.made[1] for run in runs)
    assert first["id"] == second["id"] != ""
    assert (first["name"], first["resume"], first["config"]) == ("run", "allow", {"seed": 1})
    assert ("valid/ppl", 5) in [(name, step) for name, _, step in runs[0].calls]
    assert all(step > 10 for _, _, step in runs[1].calls)
    assert runs[1].closed


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_tracker_is_said_with_the_command_to_install_it(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"train.track: {name} is not installed: pip install 'fullrank\[track\]'"):
        make_observers(tmp_path, track=[name], quiet=True)
    with pytest.raises(InputError, match="'aim' is not available; known: tensorboard, wandb"):
        make_observers(tmp_path, track=["aim"], quiet=True)
    assert os.listdir(tmp_path) == []


def test_lines_are_as_the_interface_says() -> None:
    line = metrics_line(step=120, split="train", nll=math.log(164.0), tokens=76800, lr=0.001)
    assert (
        json.dumps(line)
        == '{"step": 120, "split": "train", "nll": 5.09986643, "ppl": 164.0, "tokens": 76800, "lr": 0.001}'
    )
    assert "lr" not in metrics_line(step=1, split="valid", nll=1.0, tokens=1)
    scored = metrics_line(step=1, split="valid", nll=1.0, tokens=1, scores={"bleu": 31.23456789012}, phase="a")
    assert list(scored) == ["step", "split", "nll", "ppl", "tokens", "bleu", "phase"]
    assert scored["bleu"] == 31.2345679
    with pytest.raises(ValueError, match="a score may not be called ppl"):
        metrics_line(step=1, split="valid", nll=1.0, tokens=1, scores={"ppl": 3.0})
    assert math.isfinite(metrics_line(step=1, split="valid", nll=1e6, tokens=1)["ppl"])
    assert timing_line(step=120, seconds=31.20004, tokens_per_second=2500.04, peak_memory_mib=512.31) == {
        "step": 120, "seconds": 31.2, "tokens_per_second": 2500.0, "peak_memory_mib": 512.3,
    }  # fmt: skip


def test_a_file_is_cut_where_the_checkpoint_says_or_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    file = JsonLines(path)
    file.write({"a": 1})
    length = file.sync()
    file.write({"a": 2})
    file.close()
    path.write_text(path.read_text() + '{"a": ' + "3" * 10_000)
    JsonLines(path).close()
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    again = JsonLines(path, keep=length)
    again.write({"a": 4})
    assert again.sync() == len(path.read_text())
    again.close()
    assert path.read_text() == '{"a": 1}\n{"a": 4}\n'
    empty = JsonLines(path, keep=0)
    empty.close()
    assert path.read_text() == ""
    assert empty.missing == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_a_run_error(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "lines.jsonl")
    file.close()
    file._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(RunError, match=r"No space left on device.*last checkpoint is intact"):
        file.write({"a": 1})
    file.close()
