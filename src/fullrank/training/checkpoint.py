"""Checkpoints on disk: each is complete or absent, at whatever moment the process dies.

    checkpoints/step-00000120/  model.safetensors      the weights to use (averaged ones when averaging), by state_dict name
                                training.safetensors   for resuming: optimizer, trained weights, carry
                                checkpoint.json        plain values and checksums
    checkpoints/last, best, previous                   links to such folders
    checkpoints/kept/step-00000120/                    weights of the last evaluations (`train.keep_checkpoints`)
    checkpoints/average/                               a mean of kept weights, {"step": 360, "averaged": [120, 240, 360]}

A checkpoint is written to a temporary folder, forced to the disk, renamed, and only then do the links move, each in one atomic
step; folders without a link are removed last. Should `last` be damaged, training resumes from `previous`. Kept weights are a
hard link where the disk can do that. checkpoint.json seals the others and the run around them (`fullrank.seal`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fullrank.core.errors import InputError, RunError
from fullrank.files import no_room
from fullrank.forward import load_tensors
from fullrank.seal import LINKS, DamagedError, Record, read_record, seal_file, sync, write_record
from fullrank.training.distributed import all_gather, barrier, full_tensor, rank

WEIGHTS, TRAINING = "model.safetensors", "training.safetensors"
KEPT = "kept"


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint: weights by state_dict name, other tensors by dotted name, plain JSON values.

    run: the seal of the run (`seal.seal_run`).
    """

    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    state: dict[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)


# -- saving ------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path, snapshot: Snapshot, *, step: int, best: bool, keep_weights: int | None = None
) -> None:
    """Write `snapshot` into `folder` (a run's `checkpoints`) and make it `last`, and `best` if asked for.

    keep_weights: keep the weights too, and at most so many of the kept ones.
    RunError if the disk does not take it: then the checkpoints that were there are unchanged.
    """
    weights, training = _gather_tensors(snapshot.weights), _gather_tensors(snapshot.training)
    if rank() == 0:
        snapshot = replace(snapshot, weights=weights, training=training)
        try:
            _write_checkpoint(folder, snapshot, step, best, keep_weights)
        except (OSError, SafetensorError) as error:
            _remove_unlinked(folder)
            why, last = "no space left on the disk" if no_room(error) else error, _read_link(folder, "last")
            intact = f"last ({last}) is intact" if last else "there is no earlier checkpoint"
            raise RunError(
                f"the checkpoint of step {step} could not be written to {folder}: {why}; {intact}. Make room and run the same "
                "command again to go on"
            ) from error
    barrier()


def _gather_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of whole tensors on the CPU of the first process; the others help to gather them and get none."""
    copies = {}
    for name, tensor in tensors.items():
        complete = full_tensor(tensor.detach())
        if rank() == 0:
            copies[name] = complete.to("cpu", copy=True).contiguous()
    return copies


def _write_checkpoint(folder: Path, snapshot: Snapshot, step: int, best: bool, keep_weights: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _remove_unlinked(folder)  # of a process that was killed
    target = folder / f"step-{step:08d}"
    with _replace_folder(folder, target) as fresh:
        write_tensors(fresh / WEIGHTS, snapshot.weights)
        write_tensors(fresh / TRAINING, snapshot.training)
        write_record(fresh, (WEIGHTS, TRAINING), snapshot.state, snapshot.run)
    # before `last`: a run resumed from the former `last` repeats this step, one resumed from the new one does not
    if keep_weights is not None:
        _keep_weights(folder, target, step=step, number=keep_weights, run=snapshot.run)
    if last := _read_link(folder, "last"):
        _link(folder, "previous", last)
    _link(folder, "last", target.name)
    if best:
        _link(folder, "best", target.name)
    _remove_unlinked(folder)


def _keep_weights(folder: Path, checkpoint: Path, *, step: int, number: int, run: Mapping[str, Any]) -> None:
    """Keep the weights of the checkpoint of `step`, and of those kept before it the last `number` - 1.

    Weights kept later than `step` are removed, for that step comes again.
    """
    target = folder / KEPT / checkpoint.name
    target.parent.mkdir(exist_ok=True)
    with _replace_folder(folder, target) as fresh:
        _link_or_copy(checkpoint / WEIGHTS, fresh / WEIGHTS)
        write_record(fresh, (WEIGHTS,), {"step": step}, run)
    kept = list_kept_checkpoints(folder)
    staying = [earlier for earlier in kept if earlier <= step][-number:]
    for other in set(kept) - set(staying):
        _remove(folder, kept[other])


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of `tensors` and force it to the disk."""
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    sync(path)


# -- folders and links that change in one step -------------------------------------------------------------------------


@contextmanager
def _replace_folder(folder: Path, target: Path) -> Iterator[Path]:
    """A new folder, which takes the place of `target` when the block is over; both inside `folder`."""
    fresh = folder / f".writing-{target.parent.name}-{target.name}"
    shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
    fresh.mkdir()
    yield fresh
    _remove(folder, target)
    os.replace(fresh, target)
    sync(target.parent)


def _remove(folder: Path, path: Path) -> None:
    """Remove the folder `path`: renamed at once, deleted after that, so that no half of it is ever seen."""
    if path.exists():
        gone = folder / f".writing-gone-{path.name}"
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _remove_unlinked(folder: Path) -> None:
    """Remove checkpoints without a link and what is half written; what cannot be removed is left to the next call."""
    linked = {_read_link(folder, name) for name in LINKS}
    for path in (*folder.glob("step-*"), *folder.glob(".writing-*")):
        if path.name not in linked:
            shutil.rmtree(path, ignore_errors=True)
    for link in folder.glob(".link-*"):
        link.unlink()


def _read_link(folder: Path, name: str) -> str | None:
    link = folder / name
    return os.readlink(link) if link.is_symlink() else None


def _link(folder: Path, name: str, target: str) -> None:
    """Let `name` point to `target`, in one atomic step; a folder of that name is a link that a copy of the run followed."""
    if not (folder / name).is_symlink():
        shutil.rmtree(folder / name, ignore_errors=True)
    fresh = folder / f".link-{name}"
    fresh.unlink(missing_ok=True)
    os.symlink(target, fresh, target_is_directory=True)
    os.replace(fresh, folder / name)
    sync(folder)


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file another name; a copy on a disk that has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(target)


# -- loading -----------------------------------------------------------------------------------------------------------


def load_checkpoint(folder: Path, notice: Callable[[str], None]) -> Snapshot | None:
    """The newest checkpoint in `folder` whose files match their checksums; None without any checkpoint.

    If `last` is damaged and another one is good, `notice` is called, and that one is `last` from now on.
    InputError if there are checkpoints and none is good.
    """
    name = all_gather(_find_newest(folder, notice) if rank() == 0 else None)[0]
    return None if name is None else read_checkpoint(folder / name)


def _find_newest(folder: Path, notice: Callable[[str], None]) -> str | None:
    last = _read_link(folder, "last")
    names = sorted((path.name for path in folder.glob("step-*")), reverse=True)
    damages: list[str] = []
    for name in dict.fromkeys([last, *names] if last is not None else names):
        try:
            state = verify_checkpoint(folder / name).state
        except DamagedError as damage:
            damages.append(f"{folder / ('last' if name == last else name)} is damaged: {damage}")
            continue
        if name != last:
            _link(folder, "last", name)
        if state["best_step"] == state["step"]:  # a kill between the two links, or `last` was damaged
            _link(folder, "best", name)
        if damages:
            notice(f"{damages[0]}; going on from the checkpoint before it, {folder / name}")
        else:
            _remove_unlinked(folder)
        return name
    if damages:
        raise InputError(f"{damages[0]}; delete {folder} or start again with --out")
    return None


def read_checkpoint(path: Path) -> Snapshot:
    """The checkpoint in the folder `path`. Its tensors may be views of the files."""
    _, run, state = read_record(path)
    weights, training = (safetensors.torch.load_file(path / name) for name in (WEIGHTS, TRAINING))
    return Snapshot(weights, training, state, run)


def verify_checkpoint(path: Path) -> Record:
    """The record of a checkpoint; DamagedError says which of its files is not what was written."""
    record = read_record(path)
    for name, seal in record.files.items():
        try:
            current = seal_file(path / name)
        except (OSError, ValueError) as error:
            raise DamagedError(f"{name} cannot be read ({error})") from error
        if current != seal:
            raise DamagedError(f"{name} does not match its checksum")
    return record


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint folder (`checkpoints/best`); InputError if they are damaged or do not fit."""
    load_tensors(model, _read_weights(path), path)


def _read_weights(path: Path) -> dict[str, Tensor]:
    _verify_or_refuse(path, "use other weights or train again")
    weights: dict[str, Tensor] = safetensors.torch.load_file(path / WEIGHTS)
    return weights


def _verify_or_refuse(path: Path, advice: str) -> Record:
    try:
        return verify_checkpoint(path)
    except DamagedError as damage:
        raise InputError(f"{path} is damaged: {damage}; {advice}") from damage


def take_over_checkpoints(source: Path, folder: Path, run: Mapping[str, Any]) -> None:
    """Make the checkpoints in `source` those of `folder` too, under the seal `run`; either folder may be deleted later.

    `last` comes last: without it nothing has been taken over. InputError if a checkpoint is damaged.
    """
    for path in sorted([*source.glob("step-*"), *source.glob(f"{KEPT}/step-*")]):
        files, _, state = _verify_or_refuse(path, f"delete {source.parent}, so that it is trained again")
        target = folder / path.relative_to(source)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in files:
            _link_or_copy(path / name, target / name)
        write_record(target, tuple(files), state, run)
    for link in ("previous", "best", "last"):
        if (linked := _read_link(source, link)) is not None:
            _link(folder, link, linked)


# -- the mean of kept weights ------------------------------------------------------------------------------------------


def list_kept_checkpoints(folder: Path) -> dict[int, Path]:
    """The folders of kept weights in `folder` (a run's `checkpoints`) by their steps, the oldest first."""
    paths = [path for path in (folder / KEPT).glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return dict(sorted((int(path.name.removeprefix("step-")), path) for path in paths))


def mean_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor over the checkpoint folders `paths`, added up in fp64; an integer tensor is the last path's.

    InputError if one is damaged, or is not of the same model as the others.
    """
    total: dict[str, Tensor] = {}
    for path in paths:
        weights = _read_weights(path)
        wide = {name: tensor.double() for name, tensor in weights.items() if tensor.is_floating_point()}
        shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (wide, total or wide)]
        if shapes[0] != shapes[1]:
            raise InputError(f"{path} and {paths[0]} are not of the same model: they hold other tensors")
        total = {name: total[name] + tensor if total else tensor for name, tensor in wide.items()}
    return weights | {name: (tensor / len(paths)).to(weights[name].dtype) for name, tensor in total.items()}


def write_mean(folder: Path, weights: dict[str, Tensor], steps: Sequence[int], run: Mapping[str, Any]) -> Path:
    """Write `weights`, the mean of those of `steps`, to `folder`/average, in place of an earlier mean; RunError as above."""
    target = folder / "average"
    try:
        with _replace_folder(folder, target) as fresh:
            write_tensors(fresh / WEIGHTS, weights)
            write_record(fresh, (WEIGHTS,), {"step": steps[-1], "averaged": list(steps)}, run)
    except (OSError, SafetensorError) as error:
        _remove_unlinked(folder)
        raise RunError(f"{folder}: the average could not be written: {error}; make room and run this again") from error
    return target
