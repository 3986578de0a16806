"""Checkpoints on disk: whole or not there, whatever moment the process dies at.

    checkpoints/step-00000120/  model.safetensors      the weights to use (averaged ones when averaging), by state_dict name
                                training.safetensors   what else resuming needs: optimizer, own weights, random states, carry
                                checkpoint.json        plain values and the checksums of all three
    checkpoints/last, best, previous                   links to such folders
    checkpoints/kept/step-00000120/                    weights that `train.keep_checkpoints` keeps (`kept`)

A checkpoint is written to a temporary folder, forced to the disk, renamed, and only then do the links move (a link is
replaced in one atomic step); folders without a link go last. `previous` is what `last` was: should `last` be damaged,
training goes on from there. No pickle anywhere.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from fullrank.core.errors import InputError, RunError
from fullrank.training.kept import keep
from fullrank.training.sealed import WEIGHTS, read_plain, read_tensors, sync, write_plain, write_tensors
from fullrank.training.sealed import Damaged as Damaged

_LINKS = ("last", "best", "previous")
_TRAINING = "training.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint: weights by state_dict name, other tensors by dotted name, plain JSON values."""

    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path, snapshot: Snapshot, *, step: int, best: bool, keep_weights: int | None = None
) -> Path:
    """Write `snapshot` into `folder` (a run's `checkpoints`), and make it `last`, and `best` too if said so.

    keep_weights: the weights are kept (see `kept`), with those of so many checkpoints at most.
    RunError if the disk does not take it: then the checkpoints that were there are as before.
    """
    temporary = folder / f".writing-{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder)
        _write(temporary, snapshot)
        target = _free_name(folder, step)
        os.replace(temporary, target)
        sync(folder)
        former = _linked(folder, "last")
        if former is not None:
            _link(folder, "previous", former)
        # before `last`: a run resumed from the former `last` comes by here again, from this one it does not
        if keep_weights is not None:
            keep(folder, target, step=step, number=keep_weights)
        if best:
            _link(folder, "best", target.name)
        _link(folder, "last", target.name)
    except (OSError, SafetensorError) as error:
        for left in folder.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)
        raise RunError(_why_not_saved(folder, snapshot, step, error)) from error
    _prune(folder)
    return target


def load_checkpoint(folder: Path, notice: Callable[[str], None]) -> Snapshot | None:
    """The newest good checkpoint in `folder`, `last` first; None if there is none at all.

    If `last` is damaged and another one is good, `notice` is told, and that one is `last` from now on.
    InputError if checkpoints are there and none is good.
    """
    if not folder.is_dir():
        return None
    _adopt_copies(folder)
    last = _linked(folder, "last")
    found = sorted((path.name for path in folder.glob("step-*")), reverse=True)
    candidates = ([last] if last else []) + [name for name in found if name != last]
    reasons: list[str] = []
    for name in candidates:
        try:
            snapshot = read_checkpoint(folder / name)
        except Damaged as damage:
            reasons.append(f"{folder / ('last' if name == last else name)} is damaged: {damage}")
            continue
        if name != last:
            _link(folder, "last", name)
            if snapshot.state.get("best_step") == snapshot.state.get("step"):
                _link(folder, "best", name)
        if reasons:
            notice(f"{reasons[0]}; going on from the checkpoint before it, {folder / name}")
        return snapshot
    if reasons:
        raise InputError(f"{reasons[0]}; delete {folder} or start again with --out")
    return None


def read_checkpoint(path: Path) -> Snapshot:
    """The checkpoint in the folder `path`, every checksum verified; Damaged says what is wrong with it."""
    files, state = read_plain(path)
    weights, training = (read_tensors(path / name, files.get(name, {})) for name in (WEIGHTS, _TRAINING))
    return Snapshot(weights, training, state)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint folder (`checkpoints/best`); InputError if they are damaged or do not fit."""
    try:
        files, _ = read_plain(path)
        weights = read_tensors(path / WEIGHTS, files.get(WEIGHTS, {}))
    except Damaged as damage:
        raise InputError(f"{path} is damaged: {damage}; use another checkpoint or train again") from damage
    put_weights(model, weights, path)


def put_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """`model.load_state_dict`, strictly; InputError names the first tensor of `path` that does not fit."""
    own = model.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        if name not in own or name not in weights:
            where = "model" if name not in own else "checkpoint"
            raise InputError(
                f"{path} does not fit the model: the {where} has no '{name}'; check the model section of config.yaml"
            )
        if own[name].shape != weights[name].shape:
            raise InputError(
                f"{path} does not fit the model: '{name}' is {tuple(weights[name].shape)} there and "
                f"{tuple(own[name].shape)} here; check the model section of config.yaml"
            )
    model.load_state_dict(weights)


def _write(path: Path, snapshot: Snapshot) -> None:
    path.mkdir()
    write_tensors(path / WEIGHTS, snapshot.weights)
    write_tensors(path / _TRAINING, snapshot.training)
    write_plain(path, (WEIGHTS, _TRAINING), snapshot.state)


def _free_name(folder: Path, step: int) -> Path:
    """A folder name for this step that is not taken, not even by a leftover that a link may point to."""
    path, again = folder / f"step-{step:08d}", 1
    while path.exists():
        again += 1
        path = folder / f"step-{step:08d}-{again}"
    return path


def _linked(folder: Path, name: str) -> str | None:
    link = folder / name
    return os.readlink(link) if link.is_symlink() else None


def _link(folder: Path, name: str, target: str) -> None:
    """Let `name` point to `target`, from one moment to the next."""
    fresh = folder / f".link-{name}"
    fresh.unlink(missing_ok=True)
    os.symlink(target, fresh)
    os.replace(fresh, folder / name)
    sync(folder)


def _adopt_copies(folder: Path) -> None:
    """In a run folder that was copied with its links followed, make folders called `last` ... links again."""
    for name in _LINKS:
        path = folder / name
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            step = int(read_plain(path)[1]["step"])
        except Damaged:
            step = 0
        target = _free_name(folder, step)
        os.replace(path, target)
        _link(folder, name, target.name)


def _clear_leftovers(folder: Path) -> None:
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path)


def _prune(folder: Path) -> None:
    """Remove checkpoints no link points to; what cannot be removed now is tried again next time."""
    kept = {_linked(folder, name) for name in _LINKS}
    for path in folder.glob("step-*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _why_not_saved(folder: Path, snapshot: Snapshot, step: int, error: Exception) -> str:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or str(error).endswith(
        ("(os error 28)", "(os error 122)")
    )
    size = sum(t.nbytes for tensors in (snapshot.weights, snapshot.training) for t in tensors.values()) / 2**20
    what = f"no space left on the disk (it takes about {max(size, 0.1):.1f} MiB)" if full else f"{error}"
    former = _linked(folder, "last")
    kept = f"{folder / 'last'} ({former}) is intact" if former else "there is no earlier checkpoint"
    return (
        f"the checkpoint of step {step} could not be written to {folder}: {what}; {kept}. "
        "Make room and run the same command again to go on"
    )
