"""Checkpoints: an interrupted write keeps the one before it, and damage is noticed."""

import contextlib
import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file
from training_toy import Death, Objective, Recorder, Toy, outcome, train

from fullrank.core.errors import InputError, RunError
from fullrank.seal import DamagedError
from fullrank.training.checkpoint import (
    Snapshot,
    list_kept_checkpoints,
    load_checkpoint,
    load_weights,
    mean_weights,
    read_checkpoint,
    save_checkpoint,
    verify_checkpoint,
    write_mean,
)
from fullrank.training.values import EvaluationResult


def snapshot(step, best_step=None):
    """A checkpoint whose every part tells its step, which is the best step so far where `best_step` is not given."""
    value = torch.full((3,), float(step))
    return Snapshot(
        {"w": value}, {"optimizer.w": value + 0.5}, {"step": step, "best_step": best_step or step, "pi": 0.1 + 0.2}
    )


def check(checkpoint, *steps):
    assert checkpoint.state["step"] in steps
    expected = snapshot(checkpoint.state["step"], checkpoint.state["best_step"])
    assert torch.equal(checkpoint.weights["w"], expected.weights["w"])
    assert torch.equal(checkpoint.training["optimizer.w"], expected.training["optimizer.w"])
    assert checkpoint.state == expected.state


def refuse(text):
    raise AssertionError(text)


def breaking_at(monkeypatch, number, error):
    """Let the `number`-th call that writes to the disk raise `error`; return a list whose one entry counts the calls."""
    calls = [0]

    def breaking(call):
        def wrapped(*args, **options):
            calls[0] += 1
            if calls[0] == number:
                raise error
            return call(*args, **options)

        return wrapped

    writers = [(os, "replace"), (os, "fsync"), (os, "symlink"), (safetensors.torch, "save_file"), (shutil, "copyfile")]
    if isinstance(error, Death):  # an error of the disk in a removal is ignored
        writers.append((shutil, "rmtree"))
    for module, name in writers:
        monkeypatch.setattr(module, name, breaking(getattr(module, name)))
    return calls


def check_kept(folder, *allowed):
    """The steps whose weights are kept are one of `allowed`, and each is whole: its weights tell its step."""
    paths = list_kept_checkpoints(folder)
    assert list(paths) in allowed
    for step, path in paths.items():
        assert torch.equal(mean_weights([path])["w"], snapshot(step).weights["w"])
        assert not (path / "training.safetensors").exists()


def no_links(*args, **options):
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize(
    ("error", "links"), [(Death(), True), (OSError(errno.ENOSPC, "No space left on device"), False)]
)
def test_no_moment_of_writing_loses_the_checkpoint_before(error, links, tmp_path, monkeypatch):
    """Weights of steps 1 to 3 are kept, and those of step 4 replace the first; the run resumes from a whole checkpoint."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "begun", snapshot(step, 1), keep_weights=3)
    for number in itertools.count(1):
        folder = shutil.copytree(tmp_path / "begun", tmp_path / str(number), symlinks=True)
        with pytest.MonkeyPatch.context() as patch:
            calls = breaking_at(patch, number, error)
            with contextlib.suppress(Death if isinstance(error, Death) else RunError):
                save_checkpoint(folder, snapshot(4), keep_weights=3)
        check_kept(folder, [1, 2, 3], [1, 2, 3, 4], [2, 3, 4])
        checkpoint = load_checkpoint(folder, refuse)
        check(checkpoint, 3, 4)
        # a run resumed from step 4 does not save it again, so that its best and its kept weights have to be complete
        if checkpoint.state["step"] == 4:
            check(read_checkpoint(folder / "best"), 4)
            check_kept(folder, [2, 3, 4])
        check(read_checkpoint(folder / "best"), 1, 4)
        save_checkpoint(folder, snapshot(4), keep_weights=3)  # as a run does that is resumed from step 3
        check(load_checkpoint(folder, refuse), 4)
        check(read_checkpoint(folder / "best"), 4)
        check_kept(folder, [2, 3, 4])
        save_checkpoint(folder, snapshot(5, 4))
        check(load_checkpoint(folder, refuse), 5)
        check(read_checkpoint(folder / "previous"), 4)
        assert len(list(folder.glob("step-*"))) == 2, "what no link points to is removed"
        assert not list(folder.glob(".*")), "nothing temporary stays"
        if calls[0] < number:
            break
    assert number > 15


def test_checkpoints_are_minutes_apart_at_most_and_change_nothing(tmp_path, monkeypatch):
    """Without an evaluation before the end; a rhythm that is set holds alone."""
    now = [0.0]
    options = {"eval_options": {"every_epochs": 1e6}, "steps": 8}
    train(tmp_path / "whole", **options)
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def minutes_then_death(model):
        inner = Objective(model)

        def objective(batch, carry, position):
            now[0] += 61.0
            if position.step == 8:
                raise Death
            return inner(batch, carry, position)

        return objective

    for folder, rhythm in (("killed", {}), ("own rhythm", {"save_every_steps": 3})):
        with pytest.raises(Death):
            train(tmp_path / folder, **options, **rhythm, objective=minutes_then_death)
        last = (tmp_path / folder / "checkpoints" / "last").resolve().name
        assert last == ("step-00000005" if folder == "killed" else "step-00000006")
    train(tmp_path / "killed", **options)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def test_no_space_while_training_leaves_a_run_that_can_go_on(tmp_path, monkeypatch):
    unbroken, _ = train(tmp_path / "whole", steps=10)
    with pytest.MonkeyPatch.context() as patch:
        breaking_at(patch, 40, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(RunError, match="no space left"):
            train(tmp_path / "full", steps=10, save_every_steps=2)
    recorder = Recorder()
    model, _ = train(tmp_path / "full", steps=10, save_every_steps=2, observers=[recorder])
    assert recorder.began[0] > 0
    assert torch.equal(model.inner.weight, unbroken.inner.weight)
    assert (tmp_path / "full" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "checkpoint.json"])
def test_damage_is_noticed_and_the_one_before_used(damage, name, tmp_path):
    save_checkpoint(tmp_path, snapshot(1))
    save_checkpoint(tmp_path, snapshot(2))
    damage(tmp_path / "last" / name)
    with pytest.raises(DamagedError, match=name):
        verify_checkpoint(tmp_path / "last")
    recorder = []
    check(load_checkpoint(tmp_path, recorder.append), 1)
    assert f"{tmp_path}/last is damaged: {name}" in recorder[0]
    assert f"going on from the checkpoint before it, {tmp_path}/step-00000001" in recorder[0]
    check(read_checkpoint(tmp_path / "best"), 1)
    check(load_checkpoint(tmp_path, refuse), 1)


def test_nothing_good_left_is_an_error_that_says_what_to_do(tmp_path):
    assert load_checkpoint(tmp_path / "none", refuse) is None
    save_checkpoint(tmp_path, snapshot(1))
    cut(tmp_path / "last" / "training.safetensors")
    with pytest.raises(
        InputError, match=r"last is damaged: training.safetensors does not match .*delete .* or start again with --out"
    ):
        load_checkpoint(tmp_path, refuse)
    shutil.copytree(tmp_path, tmp_path / "run" / "checkpoints", symlinks=True, ignore=shutil.ignore_patterns("run"))
    with pytest.raises(InputError, match="delete"):
        train(tmp_path / "run", steps=5)


def test_the_weights_of_the_last_evaluations_are_kept(tmp_path):
    """Evaluations at 4, 8, 12, 16 and the end, 18; checkpoints have another rhythm, and only three are kept."""
    seen = {}

    def evaluate(model):
        seen[len(seen) + 1] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return EvaluationResult(1.0 + len(seen), 1)

    rhythm = {"every_steps": 4}
    _, result = train(
        tmp_path, steps=18, save_every_steps=5, keep_checkpoints=3, evaluate=evaluate, eval_options=rhythm
    )
    assert result.best_step == 4
    paths = list_kept_checkpoints(tmp_path / "checkpoints")
    assert list(paths) == [12, 16, 18]
    for path, weights in zip(paths.values(), (seen[3], seen[4], seen[5]), strict=True):
        assert sorted(file.name for file in path.iterdir()) == ["checkpoint.json", "model.safetensors"]
        model = Toy()
        load_weights(model, path)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_the_mean_is_numpys(tmp_path):
    """The mean of each tensor in fp64; counts are the last one's; tied tensors stay equal."""
    _, _ = train(tmp_path, steps=20, keep_checkpoints=3, eval_options={"every_steps": 4})
    paths = list(list_kept_checkpoints(tmp_path / "checkpoints").values())
    means = mean_weights(paths)
    weights = [load_file(path / "model.safetensors") for path in paths]
    for name, tensor in means.items():
        values = [tensors[name] for tensors in weights]
        mean = np.mean(values, axis=0, dtype=np.float64).astype(np.float32) if name != "seen" else values[-1]
        assert tensor.numpy().dtype == values[0].dtype
        assert np.array_equal(tensor.numpy(), mean), name
    assert len({int(tensors["seen"]) for tensors in weights}) == 3
    assert torch.equal(means["output.weight"], means["embedding.weight"])
    assert not np.array_equal(weights[0]["inner.weight"], weights[2]["inner.weight"])


def test_a_mean_is_written_whole_and_replaces_an_earlier_one(tmp_path, monkeypatch):
    average = write_mean(tmp_path, {"w": torch.zeros(2)}, [1, 2], {})
    assert write_mean(tmp_path, {"w": torch.ones(2)}, [2, 3], {}) == average == tmp_path / "average"
    assert mean_weights([average])["w"].tolist() == [1.0, 1.0]
    state = json.loads((average / "checkpoint.json").read_text())["content"]["state"]
    assert state == {"step": 3, "averaged": [2, 3]}

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(RunError, match=r"the average could not be written .*no space left on the disk.* Make room"):
        write_mean(tmp_path, {"w": torch.zeros(2)}, [1], {})
    assert mean_weights([average])["w"].tolist() == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["average"]
