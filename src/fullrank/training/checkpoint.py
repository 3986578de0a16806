"""Checkpoints on disk: each is complete or absent, at whatever moment the process dies.

    checkpoints/step-00000120/  model.safetensors      the weights to use (averaged ones when averaging), by state_dict name
                                training.safetensors   for resuming: optimizer, own weights, carry; where several processes
                                                       train, training-00000.safetensors of the first and so on: the rows
                                                       of a tensor that each one holds, a whole one by the first
                                checkpoint.json        plain values and checksums
    checkpoints/last, best, previous                   links to such folders
    checkpoints/kept/step-00000120/                    weights of the last evaluations (`train.keep_checkpoints`)
    checkpoints/average/                               a mean of kept weights, {"step": 360, "averaged": [120, 240, 360]}

A checkpoint is written to a temporary folder, forced to the disk, renamed, and only then do the links move (a link is
replaced in one atomic step); folders without a link are removed last. `previous` is the `last` before this one: should
`last` be damaged, training resumes from there. A checkpoint that is there only because the run was stopped never becomes
`previous`, which is the same link in a run that goes through. Kept weights are a hard link to the file of the checkpoint
where the disk can do that. checkpoint.json seals the others and the run around them (`fullrank.seal`). Tensors are in
safetensors files alone: a checkpoint that names any other file, as the pickles of earlier versions, is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fullrank.core.errors import InputError, RunError, one_line
from fullrank.files import no_room, out_of_memory
from fullrank.seal import LINKS, PLAIN, DamagedError, Record, read_record, seal_file, sync, write_record
from fullrank.training.distributed import (
    Place,
    barrier,
    count,
    gathered,
    parted,
    rank,
    rows_held,
    undivided,
    whole,
)

WEIGHTS, TRAINING = "model.safetensors", "training"
_FILES = re.compile(r"model\.safetensors|training(-\d{5})?\.safetensors")
KEPT = "kept"
STOPPED = "stopped"  # in the state of a checkpoint that is there only because the run was stopped


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint: weights by state_dict name, other tensors by dotted name, plain JSON values.

    run: the seal of the run (`seal.seal_run`).
    """

    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    state: dict[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)


# -- saving and loading ----------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path, snapshot: Snapshot, *, step: int, best: bool, keep_weights: int | None = None
) -> Path:
    """Write `snapshot` into `folder` (a run's `checkpoints`) and make it `last`, and `best` if asked for.

    keep_weights: keep the weights too, and at most so many of the kept ones.
    RunError if the disk does not take it: then the checkpoints that were there are unchanged.
    """
    temporary = folder / f".writing-{step:08d}"
    snapshot = replace(snapshot, weights={name: whole(tensor) for name, tensor in snapshot.weights.items()})
    try:
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".writing-*"):
                shutil.rmtree(leftover)
            temporary.mkdir()
        barrier()  # until the first process has made the folder
        _write_training(temporary, snapshot.training)
        if rank() > 0:
            barrier()  # until the first process has written the rest
            return Path(os.readlink(folder / "last"))
        write_tensors(temporary / WEIGHTS, snapshot.weights)
        files = sorted(file.name for file in temporary.glob(f"{TRAINING}*"))
        write_record(temporary, (WEIGHTS, *files), snapshot.state, snapshot.run)
        _remove_unlinked(folder)  # of a process that was killed before it could link this step
        target = _free_name(folder, step)
        os.replace(temporary, target)
        sync(folder)
        former = _linked(folder, "last")
        if former is not None and not _was_stopped(folder / former):
            _link(folder, "previous", former)
        # before `last`: a run resumed from the former `last` repeats this step, one resumed from the new one does not
        if keep_weights is not None:
            _keep_weights(folder, target, step=step, number=keep_weights, run=snapshot.run)
        if best:
            _link(folder, "best", target.name)
        _link(folder, "last", target.name)
    except (OSError, SafetensorError) as error:
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        raise RunError(_why_not_saved(folder, snapshot, step, error)) from error
    _remove_unlinked(folder)
    barrier()
    return target


def _remove_unlinked(folder: Path) -> None:
    """Remove checkpoints without a link, and what a process that was killed left half done."""
    linked = {_linked(folder, name) for name in LINKS}
    for path in folder.glob("step-*"):
        if path.name not in linked:
            shutil.rmtree(path, ignore_errors=True)  # if that fails, the next checkpoint tries again
    for link in folder.glob(".link-*"):
        link.unlink()


def _was_stopped(path: Path) -> bool:
    try:
        return STOPPED in read_record(path).state
    except DamagedError:
        return False


def _write_training(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the rows that this process holds into a file of its own; OSError in all processes if one of them cannot."""
    rows, failure = {name: rows_held(tensor) for name, tensor in tensors.items()}, None
    name = f"{TRAINING}.safetensors" if count() == 1 else f"{TRAINING}-{rank():05d}.safetensors"
    try:
        write_tensors(folder / name, {key: tensor for key, tensor in rows.items() if tensor is not None})
    except (OSError, SafetensorError) as error:
        failure = error if isinstance(error, OSError) else OSError(str(error))
    for failed in filter(None, gathered(failure)):
        raise failed


def load_checkpoint(folder: Path, notice: Callable[[str], None], place: Place = undivided) -> Snapshot | None:
    """The newest good checkpoint in `folder`, `last` first; None if there is none at all.

    place: the parts of tensors that each of several processes holds; the first one looks for the checkpoint.
    If `last` is damaged and another one is good, `notice` is called, and that one is `last` from now on.
    InputError if there are checkpoints and none is good.
    """
    if rank() > 0:
        found = gathered(None)[0]
        return None if found is None else read_checkpoint(folder / found, place)
    snapshot, name = _newest(folder, notice) if folder.is_dir() else (None, None)
    gathered(name)
    if count() > 1 and name is not None:
        return read_checkpoint(folder / name, place)
    return snapshot


def _newest(folder: Path, notice: Callable[[str], None]) -> tuple[Snapshot | None, str | None]:
    """The newest good checkpoint and its name; for several processes, which read it together, without its tensors."""
    _restore_links(folder)
    last, best = _linked(folder, "last"), _linked(folder, "best")
    names = sorted((path.name for path in folder.glob("step-*")), reverse=True)
    if last is not None:
        # a later `best` is the checkpoint of a process that was killed before it could move its last link
        names = [best, last, *names] if best is not None and best > last else [last, *names]
    reasons: list[str] = []
    for name in dict.fromkeys(names):
        try:
            snapshot = read_checkpoint(folder / name) if count() == 1 else _verified(folder / name)
        except DamagedError as damage:
            reasons.append(f"{folder / ('last' if name == last else name)} is damaged: {damage}")
            continue
        if name != last:
            _link(folder, "last", name)
            if snapshot.state.get("best_step") == snapshot.state.get("step"):
                _link(folder, "best", name)
        if reasons:
            notice(f"{reasons[0]}; going on from the checkpoint before it, {folder / name}")
        else:
            _remove_unlinked(folder)
        return snapshot, name
    if reasons:
        raise InputError(f"{reasons[0]}; delete {folder} or start again with --out")
    return None, None


def _verified(path: Path) -> Snapshot:
    """The checkpoint in the folder `path` without its tensors, every checksum verified; DamagedError as `read_checkpoint`."""
    files, run, state = _record(path)
    for name, seal in files.items():
        _check_seal(path / name, seal)
    return Snapshot({}, {}, state, run)


def _record(path: Path) -> Record:
    """The record of a checkpoint; DamagedError if it names a file that no checkpoint of this version has."""
    record = read_record(path)
    for name in record.files:
        if not _FILES.fullmatch(name):
            raise DamagedError(
                f"{PLAIN} names {name!r}: not a safetensors file of a checkpoint, and nothing else is read"
            )
    return record


def read_checkpoint(path: Path, place: Place = undivided) -> Snapshot:
    """The checkpoint in the folder `path`, every checksum verified; DamagedError says what is wrong with it."""
    files, run, state = _record(path)
    parts = sorted(name for name in files if name.startswith(TRAINING))
    weights = read_tensors(path / WEIGHTS, files.get(WEIGHTS, {}))
    for name in parts:
        _check_seal(path / name, files[name])
    try:
        return Snapshot(weights, _read_training([path / name for name in parts], place), state, run)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DamagedError(f"{', '.join(parts)} cannot be read ({one_line(error)})") from error


def _read_training(files: Sequence[Path], place: Place) -> dict[str, Tensor]:
    """The tensors of such files, one at a time; rows of several files are joined, and a process keeps those it holds."""
    with contextlib.ExitStack() as opened:
        parts = [opened.enter_context(safetensors.safe_open(file, "pt")) for file in files]
        holders: dict[str, list[Any]] = {}
        for part in parts:
            for name in part.keys():  # noqa: SIM118  it is no mapping
                holders.setdefault(name, []).append(part)
        tensors = {}
        for name, several in holders.items():
            rows = [part.get_tensor(name) for part in several]
            tensor = torch.cat(rows) if len(rows) > 1 else rows[0].clone()  # copies: they may be views of the file
            tensors[name] = parted(tensor, place(name, tensor.shape))
        return tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint folder (`checkpoints/best`); InputError if they are damaged or do not fit."""
    put_weights(model, _read_weights(path, "use another checkpoint or train again"), path)


def put_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """`model.load_state_dict`, strictly; InputError names the first tensor of `path` that does not fit."""
    own = model.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        if name not in own or name not in weights:
            why = f"the {'model' if name not in own else 'checkpoint'} has no '{name}'"
        elif own[name].shape != weights[name].shape:
            why = f"'{name}' is {tuple(weights[name].shape)} there and {tuple(own[name].shape)} here"
        elif own[name].dtype != weights[name].dtype:
            why = f"'{name}' is {weights[name].dtype} there and {own[name].dtype} here"
        else:
            continue
        raise InputError(f"{path} does not fit the model: {why}; check the model section of config.yaml")
    model.load_state_dict(weights)


def _read_weights(path: Path, advice: str) -> dict[str, Tensor]:
    try:
        return read_tensors(path / WEIGHTS, read_record(path).files.get(WEIGHTS, {}))
    except DamagedError as damage:
        raise InputError(f"{path} is damaged: {damage}; {advice}") from damage


def _why_not_saved(folder: Path, snapshot: Snapshot, step: int, error: Exception) -> str:
    why, former = str(error), _linked(folder, "last")
    if no_room(error):
        size = sum(t.nbytes for tensors in (snapshot.weights, snapshot.training) for t in tensors.values()) / 2**20
        why = f"no space left on the disk (it takes about {max(size, 0.1):.1f} MiB)"
    kept = f"{folder / 'last'} ({former}) is intact" if former else "there is no earlier checkpoint"
    return (
        f"the checkpoint of step {step} could not be written to {folder}: {why}; {kept}. "
        "Make room and run the same command again to go on"
    )


# -- links and names -------------------------------------------------------------------------------------------------


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
    """Let `name` point to `target`, in one atomic step."""
    fresh = folder / f".link-{name}"
    fresh.unlink(missing_ok=True)
    os.symlink(target, fresh, target_is_directory=True)
    if os.name == "nt":  # which replaces no link to a folder
        (folder / name).unlink(missing_ok=True)
    os.replace(fresh, folder / name)
    sync(folder)


def _restore_links(folder: Path) -> None:
    """Make folders called `last` ... links again, in a run folder that was copied with its links followed."""
    for name in LINKS:
        path = folder / name
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            step = int(read_record(path).state["step"])
        except DamagedError:
            step = 0
        target = _free_name(folder, step)
        os.replace(path, target)
        _link(folder, name, target.name)


# -- kept weights and their mean -------------------------------------------------------------------------------------


def _keep_weights(folder: Path, checkpoint: Path, *, step: int, number: int, run: Mapping[str, Any]) -> None:
    """Keep the weights of the checkpoint of `step`, and of those kept before it the last `number` - 1.

    A resumed run that repeats a step writes the same again; weights kept later than `step` are removed, for that step
    comes again.
    """
    fresh = folder / f".writing-kept-{step:08d}"
    fresh.mkdir()
    _same_file(checkpoint / WEIGHTS, fresh / WEIGHTS)
    write_record(fresh, (WEIGHTS,), {"step": step}, run)
    target = folder / KEPT / f"step-{step:08d}"
    target.parent.mkdir(exist_ok=True)
    _replace(folder, fresh, target)
    kept = kept_checkpoints(folder)
    up_to_now = [earlier for earlier in kept if earlier <= step]
    for other in set(kept) - set(up_to_now[-number:]):
        _remove(folder, kept[other])


def _same_file(path: Path, name: Path) -> None:
    """Give the file `path` another name; a copy on a disk that has no links."""
    try:
        os.link(path, name)
    except OSError:
        shutil.copyfile(path, name)
        sync(name)


def take_over_checkpoints(source: Path, folder: Path, run: Mapping[str, Any], *, goes_on: bool = False) -> None:
    """Make the checkpoints in `source` those of `folder` too, under the seal `run`; either folder may be deleted later.

    goes_on: a training that had stopped early is no longer stopped, and its patience begins anew.
    `last` comes last: without it nothing has been taken over. InputError if a checkpoint is damaged.
    """
    for path in sorted([*source.glob("step-*"), *source.glob(f"{KEPT}/step-*")]):
        target = folder / path.relative_to(source)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        try:
            files, _, state = _record(path)
            for name in files:
                _same_file(path / name, target / name)
            if goes_on and state.get("stopped_early"):
                state = {**state, "stopped_early": False, "finished": False, "since_best": 0}
            write_record(target, tuple(files), state, run)
            if read_record(target).files != files:
                raise DamagedError("a file does not match its checksum")
        except DamagedError as damage:
            raise InputError(
                f"{path} is damaged: {damage}; delete {source.parent}, so that it is trained again"
            ) from damage
    for link in ("previous", "best", "last"):
        if (linked := _linked(source, link)) is not None:
            _link(folder, link, linked)


def kept_checkpoints(folder: Path) -> dict[int, Path]:
    """The folders of kept weights in `folder` (a run's `checkpoints`) by their steps, the oldest first."""
    paths = [path for path in (folder / KEPT).glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return dict(sorted((int(path.name.removeprefix("step-")), path) for path in paths))


def mean_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor over the checkpoint folders `paths`, added up in fp64; an integer tensor is the last path's.

    InputError if one is damaged, or is not of the same model as the others.
    """
    total: dict[str, Tensor] = {}
    for path in paths:
        weights = _read_weights(path, "average fewer (--last), or train again")
        if total and {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in total.items()}:
            raise InputError(f"{path} and {paths[0]} are not of the same model: they hold other tensors")
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                total[name] = tensor
            elif name in total:
                total[name] += tensor
            else:
                total[name] = tensor.double()
    return {
        name: (value / len(paths)).to(weights[name].dtype) if value.is_floating_point() else value
        for name, value in total.items()
    }


def write_mean(
    folder: Path, name: str, weights: dict[str, Tensor], steps: Sequence[int], run: Mapping[str, Any] | None = None
) -> Path:
    """Write `weights`, the mean of those of `steps`, to `folder`/`name`; an earlier mean of that name is replaced.

    InputError if `name` cannot be used; RunError if the disk does not take it.
    """
    target, reserved = folder / name, (*LINKS, KEPT)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) or name in reserved or name.startswith("step-"):
        raise InputError(
            f"--out: '{name}' is not the name of an average; take letters, digits, dots, lines, and none of "
            f"{', '.join(reserved)} and step-..."
        )
    try:
        is_mean = "averaged" in read_record(target).state
    except DamagedError:
        is_mean = False
    if target.exists() and not is_mean:
        raise InputError(f"--out: {target} is there and is not an average; give another name")
    fresh = folder / f".averaging-{name}"
    try:
        shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
        fresh.mkdir()
        write_tensors(fresh / WEIGHTS, weights)
        write_record(fresh, (WEIGHTS,), {"step": steps[-1], "averaged": list(steps)}, run)
        _replace(folder, fresh, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise RunError(f"{target} could not be written: {error}; make room and run the same command again") from error
    return target


def _replace(folder: Path, fresh: Path, target: Path) -> None:
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


# -- files with checksums --------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of `tensors` and force it to the disk."""
    safetensors.torch.save_file(separate(tensors), path, metadata={"format": "pt"})
    sync(path)


def read_tensors(path: Path, seal: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, copied into memory; DamagedError if size or checksum differ from `seal`."""
    _check_seal(path, seal)
    try:  # copies: the loaded tensors may be views of the file
        return {key: value.clone() for key, value in safetensors.torch.load_file(path).items()}
    except (OSError, SafetensorError) as error:
        if out_of_memory(error):
            raise
        raise DamagedError(f"{path.name} cannot be read ({error})") from error


def _check_seal(path: Path, seal: dict[str, Any]) -> None:
    """DamagedError if size or checksum of a file differ from `seal`."""
    try:
        now = seal_file(path)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path.name} cannot be read ({error})") from error
    if now["bytes"] != seal.get("bytes"):
        raise DamagedError(f"{path.name} has {now['bytes']} bytes instead of {seal.get('bytes')}")
    if now["sha256"] != seal.get("sha256"):
        raise DamagedError(f"{path.name} does not match its checksum")


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, contiguous, none sharing memory with another (tied parameters are written twice)."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        apart[name] = plain
    return apart
