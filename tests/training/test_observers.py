import io
import json
import math
import sys
import types

from rich.console import Console
from training_toy import evaluate_scored, train

from fullrank.training.observers import JsonLines, Progress, make_observers, metrics_line


class Recorder:
    def __init__(self, *args, **options):
        self.arguments = (args, options)
        self.calls = []
        self.closed = False

    def log(self, values, step):
        self.calls += [(name, value, step) for name, value in values.items()]

    def finish(self):
        self.closed = True

    def add_scalar(self, name, value, step):
        self.calls.append((name, value, step))

    def close(self):
        self.closed = True


def test_tensorboard_gets_every_line_and_forgets_what_lies_beyond_the_checkpoint(tmp_path, monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Recorder
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    [board] = make_observers(tmp_path, track=["tensorboard"], quiet=True)
    train(tmp_path, steps=10, observers=[board], evaluate=evaluate_scored)
    assert board.writer.arguments == ((str(tmp_path / "tensorboard"),), {"purge_step": 1})
    names = {name for name, _, _ in board.writer.calls}
    assert {"train/nll", "train/ppl", "train/lr", "valid/nll", "valid/bleu", "timing/tokens_per_second"} <= names
    assert {step for name, _, step in board.writer.calls if name == "valid/ppl"} == {5, 10}
    assert board.writer.closed
    [again] = make_observers(tmp_path, track=["tensorboard"], quiet=True)
    train(tmp_path, steps=12, observers=[again])
    assert again.writer.arguments[1] == {"purge_step": 11}


def test_wandb_resumes_under_the_same_name(tmp_path, monkeypatch):
    module = types.ModuleType("wandb")
    module.init = Recorder
    monkeypatch.setitem(sys.modules, "wandb", module)
    runs = []
    for steps in (10, 12):
        [observer] = make_observers(tmp_path / "run", track=["wandb"], config={"seed": 1}, quiet=True)
        train(tmp_path / "run", steps=steps, observers=[observer])
        runs.append(observer.run)
    first, second = (run.arguments[1] for run in runs)
    assert first["id"] == second["id"] != ""
    assert (first["name"], first["resume"], first["config"]) == ("run", "allow", {"seed": 1})
    assert ("valid/ppl", 5) in [(name, step) for name, _, step in runs[0].calls]
    assert all(step > 10 for _, _, step in runs[1].calls)
    assert runs[1].closed


def test_progress_says_loss_perplexity_speed_scores_and_time_left():
    now = [100.0]
    stream = io.StringIO()
    progress = Progress("plain", console=Console(file=stream, get_time=lambda: now[0]))
    progress.start(step=100, total_steps=2000)
    progress.advance(101)
    now[0] += 10
    progress.advance(121)
    progress.record({"step": 121, "seconds": 10.0, "tokens_per_second": 20.0, "peak_memory_mib": 1.0})
    progress.record({"split": "train", "nll": 5.1, "ppl": 164.0})
    progress.record({"step": 5, "split": "valid", "nll": 5.2, "ppl": 181.3, "tokens": 9, "bleu": 31.249})
    assert stream.getvalue() == (
        "plain: step 121/2000  ETA 0:15:40  loss 5.100  ppl 164.0  valid ppl 181.3  bleu 31.2  20 tok/s\n"
    )


def test_names_of_a_run_and_a_phase_are_no_markup():
    stream = io.StringIO()
    progress = Progress("a[bold][/b]", console=Console(file=stream, force_terminal=True, width=100))
    progress.start(step=0, total_steps=10)
    progress.record({"split": "train", "nll": 1.0, "phase": "[c]"})
    progress.advance(1)
    progress.finish()
    assert all(name in stream.getvalue() for name in ("a[bold][/b]", "phase [c]"))


def test_lines_are_as_the_interface_says():
    line = metrics_line(step=120, split="train", nll=math.log(164.0), tokens=76800, lr=0.001)
    assert (
        json.dumps(line)
        == '{"step": 120, "split": "train", "nll": 5.09986643, "ppl": 164.0, "tokens": 76800, "lr": 0.001}'
    )
    assert math.isfinite(metrics_line(step=1, split="valid", nll=1e6, tokens=1)["ppl"])


def test_a_file_is_cut_where_the_checkpoint_says_or_after_the_last_whole_line(tmp_path):
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
