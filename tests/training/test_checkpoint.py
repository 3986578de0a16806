"""Whatever happens while a checkpoint is written, the one before it is there; and damage is noticed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from training_toy import Told, Toy, evaluate, train

from fullrank.core.errors import InputError, RunError
from fullrank.training import load_weights
from fullrank.training.checkpoint import Damaged, Snapshot, load_checkpoint, read_checkpoint, save_checkpoint
from fullrank.training.kept import kept_checkpoints, mean_weights
from fullrank.training.sealed import separate


def snapshot(step: int) -> Snapshot:
    """A checkpoint whose every part tells its step."""
    value = torch.full((3,), float(step))
    return Snapshot({"w": value}, {"optimizer.w": value + 0.5}, {"step": step, "best_step": step, "pi": 0.1 + 0.2})


def check(found: Snapshot | None, *steps: int) -> None:
    assert found is not None
    assert found.state["step"] in steps
    wanted = snapshot(found.state["step"])
    assert torch.equal(found.weights["w"], wanted.weights["w"])
    assert torch.equal(found.training["optimizer.w"], wanted.training["optimizer.w"])
    assert found.state == wanted.state


def refuse(text: str) -> None:
    raise AssertionError(text)


class Death(BaseException):
    """Stands for a SIGKILL: nothing catches it."""


def breaking_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[int]:
    """The `number`-th call that reaches for the disk raises `error`; returns a list that holds how many were made."""
    calls = [0]

    def breaking(call: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise error
            return call(*args, **options)

        return wrapped

    reach = [(os, "replace"), (os, "fsync"), (os, "symlink"), (safetensors.torch, "save_file")]
    reach += [(shutil, "copyfile")]
    if isinstance(error, Death):  # where removing fails, it does so quietly
        reach.append((shutil, "rmtree"))
    for module, name in reach:
        monkeypatch.setattr(module, name, breaking(getattr(module, name)))
    return calls


@pytest.mark.parametrize("error", [Death(), OSError(errno.ENOSPC, "No space left on device")])
def test_no_moment_of_writing_loses_the_checkpoint_before(error: BaseException, tmp_path: Path) -> None:
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        save_checkpoint(folder, snapshot(1), step=1, best=True)
        save_checkpoint(folder, snapshot(2), step=2, best=False)
        with pytest.MonkeyPatch.context() as patch:
            calls = breaking_at(patch, number, error)
            with contextlib.suppress(Death if isinstance(error, Death) else RunError):
                save_checkpoint(folder, snapshot(3), step=3, best=True)
        found = load_checkpoint(folder, refuse)
        check(found, 2, 3)
        # a run resumed from step 3 does not come by again: then the best must be known already
        check(read_checkpoint(folder / "best"), *([3] if found and found.state["step"] == 3 else [1, 3]))
        save_checkpoint(folder, snapshot(3), step=3, best=True)  # the run comes by again
        check(load_checkpoint(folder, refuse), 3)
        check(read_checkpoint(folder / "best"), 3)
        save_checkpoint(folder, snapshot(4), step=4, best=False)
        check(load_checkpoint(folder, refuse), 4)
        check(read_checkpoint(folder / "previous"), 3)
        assert len(list(folder.glob("step-*"))) == 2, "what no link points to is removed"
        assert not list(folder.glob(".*")), "nothing temporary stays"
        if calls[0] < number:
            break
    assert number > 10


def check_kept(folder: Path, *allowed: list[int]) -> None:
    """The steps whose weights are kept are one of `allowed`, and each is whole: its weights tell its step."""
    kept = kept_checkpoints(folder)
    assert list(kept) in allowed
    for step, path in kept.items():
        assert torch.equal(mean_weights([path])["w"], snapshot(step).weights["w"])
        assert not (path / "training.safetensors").exists()


def no_links(*args: Any, **options: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize(
    ("error", "links"), [(Death(), True), (OSError(errno.ENOSPC, "No space left on device"), False)]
)
def test_no_moment_of_writing_leaves_kept_weights_half_written(
    error: BaseException, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 to 3 are kept, 4 replaces the first of them; the run goes on from the checkpoint that is there."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        for step in (1, 2, 3):
            save_checkpoint(folder, snapshot(step), step=step, best=False, keep_weights=3)
        with pytest.MonkeyPatch.context() as patch:
            calls = breaking_at(patch, number, error)
            with contextlib.suppress(Death if isinstance(error, Death) else RunError):
                save_checkpoint(folder, snapshot(4), step=4, best=False, keep_weights=3)
        check_kept(folder, [1, 2, 3], [1, 2, 3, 4], [2, 3, 4])
        found = load_checkpoint(folder, refuse)
        check(found, 3, 4)
        if found and found.state["step"] == 4:  # the run does not come by again
            check_kept(folder, [2, 3, 4])
        else:
            save_checkpoint(folder, snapshot(4), step=4, best=False, keep_weights=3)
            check_kept(folder, [2, 3, 4])
        save_checkpoint(folder, snapshot(5), step=5, best=False)
        check_kept(folder, [2, 3, 4])
        assert not list(folder.glob(".*")), "nothing temporary stays"
        assert len(list(folder.glob("step-*"))) == 2
        if calls[0] < number:
            break
    assert number > 15


def test_removing_kept_weights_leaves_no_half_of_them_in_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).exists():
            next(Path(path).iterdir()).unlink()
            raise Death

    for step in (1, 2, 3):
        save_checkpoint(tmp_path, snapshot(step), step=step, best=False, keep_weights=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(Death):
            save_checkpoint(tmp_path, snapshot(4), step=4, best=False, keep_weights=2)
    check_kept(tmp_path, [3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(Death):  # in the place of the same step
            save_checkpoint(tmp_path, snapshot(4), step=4, best=False, keep_weights=2)
    check_kept(tmp_path, [3], [3, 4])


def test_going_back_forgets_what_was_kept_later(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 2):
        save_checkpoint(tmp_path, snapshot(step), step=step, best=False, keep_weights=3)
    check_kept(tmp_path, [2])
    save_checkpoint(tmp_path, snapshot(3), step=3, best=False, keep_weights=3)
    check_kept(tmp_path, [2, 3])


def test_weights_that_are_kept_take_no_room_of_their_own_while_the_checkpoint_is_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, snapshot(1), step=1, best=False, keep_weights=2)
    kept = kept_checkpoints(tmp_path)[1] / "model.safetensors"
    assert os.path.samefile(tmp_path / "last" / "model.safetensors", kept)
    for step in (2, 3, 4):
        save_checkpoint(tmp_path, snapshot(step), step=step, best=False, keep_weights=2)
    check_kept(tmp_path, [3, 4])


@pytest.mark.parametrize("first", [True, False])
def test_no_space_is_one_clear_message(first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not first:
        save_checkpoint(tmp_path, snapshot(1), step=1, best=True)

    def full(*args: Any, **options: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    kept = "there is no earlier checkpoint" if first else r"last \(step-00000001\) is intact"
    with pytest.raises(RunError, match=rf"checkpoint of step 2 could not .* no space left on the disk .*{kept}"):
        save_checkpoint(tmp_path, snapshot(2), step=2, best=False)
    assert not list(tmp_path.glob(".writing*"))


def test_no_space_while_training_leaves_a_run_that_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = train(tmp_path / "whole", steps=10)
    with pytest.MonkeyPatch.context() as patch:
        breaking_at(patch, 40, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(RunError, match="no space left"):
            train(tmp_path / "full", steps=10, save_every_steps=2)
    model, result = train(tmp_path / "full", steps=10, save_every_steps=2)
    assert result.resumed_from
    assert torch.equal(model.inner.weight, whole.inner.weight)
    assert (tmp_path / "full" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "checkpoint.json"])
def test_damage_is_noticed_and_the_one_before_used(damage: Any, name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, snapshot(1), step=1, best=True)
    save_checkpoint(tmp_path, snapshot(2), step=2, best=True)
    damage(tmp_path / "last" / name)
    with pytest.raises(Damaged, match=name):
        read_checkpoint(tmp_path / "last")
    told: list[str] = []
    check(load_checkpoint(tmp_path, told.append), 1)
    assert f"{tmp_path}/last is damaged: {name}" in told[0]
    assert f"going on from the checkpoint before it, {tmp_path}/step-00000001" in told[0]
    check(read_checkpoint(tmp_path / "best"), 1)
    check(load_checkpoint(tmp_path, refuse), 1)


def test_nothing_good_left_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none", refuse) is None
    save_checkpoint(tmp_path, snapshot(1), step=1, best=True)
    cut(tmp_path / "last" / "training.safetensors")
    with pytest.raises(
        InputError, match=r"last is damaged: training.safetensors has \d+ bytes .*delete .* or start again with --out"
    ):
        load_checkpoint(tmp_path, refuse)
    shutil.copytree(tmp_path, tmp_path / "run" / "checkpoints", symlinks=True, ignore=shutil.ignore_patterns("run"))
    with pytest.raises(InputError, match="delete"):
        train(tmp_path / "run", steps=5)


def test_a_changed_number_in_the_plain_values_is_noticed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, snapshot(7), step=7, best=True)
    plain = tmp_path / "last" / "checkpoint.json"
    plain.write_text(plain.read_text().replace('"step": 7', '"step": 8', 1))
    with pytest.raises(Damaged, match="checksum"):
        read_checkpoint(tmp_path / "last")


def test_a_run_copied_with_its_links_followed_goes_on(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=10, averaging="ema")
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False)
    whole, _ = train(tmp_path / "run", steps=20, averaging="ema")
    model, result = train(tmp_path / "copy", steps=20, averaging="ema")
    assert result.resumed_from == 10
    assert torch.equal(model.inner.weight, whole.inner.weight)
    for link in ("last", "best", "previous"):
        assert (tmp_path / "copy" / "checkpoints" / link).is_symlink()


@pytest.mark.parametrize("averaging", ["none", "ema"])
def test_the_weights_are_a_plain_file_by_the_names_of_the_model(averaging: str, tmp_path: Path) -> None:
    """Tied tensors and buffers included, and what is in it is what was evaluated."""
    told = Told()
    model, result = train(tmp_path, steps=10, averaging=averaging, observers=[told])
    last = safetensors.torch.load_file(tmp_path / "checkpoints" / "last" / "model.safetensors")
    assert last.keys() == model.state_dict().keys()
    assert all(torch.equal(last[name], tensor) for name, tensor in model.state_dict().items())
    assert last["seen"] > 0
    assert torch.equal(last["output.weight"], last["embedding.weight"])
    best = Toy()
    load_weights(best, tmp_path / "checkpoints" / "best")
    found = evaluate(best.eval())
    assert found.nll / found.tokens == result.best_nll


def test_weights_that_do_not_fit_name_the_tensor(tmp_path: Path) -> None:
    train(tmp_path, steps=1)
    best = tmp_path / "checkpoints" / "best"
    with pytest.raises(InputError, match=r"does not fit the model: the checkpoint has no 'bias'"):
        load_weights(nn.Linear(2, 2), best)
    model = Toy()
    model.inner = nn.Linear(6, 4)
    with pytest.raises(InputError, match=r"'inner.bias' is \(6,\) there and \(4,\) here; check the model section"):
        load_weights(model, best)
    flip(best / "model.safetensors")
    with pytest.raises(InputError, match=r"is damaged: model.safetensors does not match its checksum"):
        load_weights(Toy(), best)


def test_what_is_written_shares_no_memory() -> None:
    base = torch.arange(12.0)
    given = {"a": base, "b": base, "c": base[2:5], "d": base.view(3, 4).T, "e": torch.zeros(0), "f": torch.zeros(0)}
    apart = separate(given)
    assert all(torch.equal(apart[name], given[name]) for name in given)
    owned = [t.untyped_storage() for t in apart.values() if t.numel()]
    assert len({storage.data_ptr() for storage in owned}) == 4
    assert [storage.nbytes() for storage in owned] == [48, 48, 12, 48]
