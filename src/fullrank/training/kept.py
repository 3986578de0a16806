"""The weights of the last evaluations, kept to be averaged (`train.keep_checkpoints`), and their mean.

    checkpoints/kept/step-00000120/   model.safetensors   the weights of the checkpoint of that step
                                      checkpoint.json     {"step": 120} and the checksums
    checkpoints/average/              the same, of a mean: {"step": 360, "averaged": [120, 240, 360]}

Each is written beside its place, forced to the disk and renamed, and renamed again before it is removed. Kept weights are
another name of the file of the checkpoint where the disk can do that, so a checkpoint takes its room once.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from fullrank.core.errors import InputError, RunError
from fullrank.training.sealed import WEIGHTS, Damaged, read_plain, read_tensors, sync, write_plain, write_tensors

KEPT = "kept"
_RESERVED = ("last", "best", "previous", KEPT)


def keep(folder: Path, checkpoint: Path, *, step: int, number: int) -> None:
    """Keep the weights of the checkpoint of `step`, and of those kept before it the last `number` - 1.

    A run that went back and comes by again writes the same again; what was kept later than `step` goes, its time comes again.
    """
    fresh = folder / f".writing-kept-{step:08d}"
    fresh.mkdir()
    try:
        os.link(checkpoint / WEIGHTS, fresh / WEIGHTS)
    except OSError:  # not every disk has links
        shutil.copyfile(checkpoint / WEIGHTS, fresh / WEIGHTS)
        sync(fresh / WEIGHTS)
    write_plain(fresh, (WEIGHTS,), {"step": step})
    place = folder / KEPT / f"step-{step:08d}"
    place.parent.mkdir(exist_ok=True)
    _take_away(folder, place)
    os.replace(fresh, place)
    sync(place.parent)
    kept = kept_checkpoints(folder)
    now = [at for at in kept if at <= step]
    for at in set(kept) - set(now[-number:]):
        _take_away(folder, kept[at])


def kept_checkpoints(folder: Path) -> dict[int, Path]:
    """The folders of kept weights in `folder` (a run's `checkpoints`) by their steps, the oldest first."""
    paths = [path for path in (folder / KEPT).glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return dict(sorted((int(path.name.removeprefix("step-")), path) for path in paths))


def mean_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor over the checkpoint folders `paths`, added up in fp64; one that counts is the last path's.

    InputError if one is damaged, or is not of the same model as the others.
    """
    total: dict[str, Tensor] = {}
    for path in paths:
        weights = _read(path)
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


def write_mean(folder: Path, name: str, weights: dict[str, Tensor], steps: Sequence[int]) -> Path:
    """Write `weights`, the mean of those of `steps`, to `folder`/`name`, in the place of an earlier mean of that name.

    InputError if `name` cannot be used; RunError if the disk does not take it.
    """
    place = folder / name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) or name in _RESERVED or name.startswith("step-"):
        raise InputError(
            f"--out: '{name}' is not the name of an average; take letters, digits, dots, lines, and none of "
            f"{', '.join(_RESERVED)} and step-..."
        )
    if place.exists() and "averaged" not in _state(place):
        raise InputError(f"--out: {place} is there and is not an average; give another name")
    fresh = folder / f".averaging-{name}"
    try:
        shutil.rmtree(fresh, ignore_errors=True)  # of one that was killed
        fresh.mkdir()
        write_tensors(fresh / WEIGHTS, weights)
        write_plain(fresh, (WEIGHTS,), {"step": steps[-1], "averaged": list(steps)})
        _take_away(folder, place)
        os.replace(fresh, place)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise RunError(f"{place} could not be written: {error}; make room and run the same command again") from error
    return place


def _read(path: Path) -> dict[str, Tensor]:
    try:
        files, _ = read_plain(path)
        return read_tensors(path / WEIGHTS, files.get(WEIGHTS, {}))
    except Damaged as damage:
        raise InputError(f"{path} is damaged: {damage}; average fewer (--last), or train again") from damage


def _state(path: Path) -> dict[str, object]:
    try:
        return read_plain(path)[1]
    except Damaged:
        return {}


def _take_away(folder: Path, path: Path) -> None:
    """Remove the folder `path`: gone from its place at once, and from the disk soon."""
    if path.exists():
        gone = folder / f".writing-gone-{path.name}"
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
