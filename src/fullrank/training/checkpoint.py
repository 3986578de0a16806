"""The state of a training under way, everything that the next step depends on, and checkpoints, which hold it on disk.

Each checkpoint is complete or absent, at whatever moment the process dies.

    checkpoints/step-00000120/  model.safetensors      the weights to use (averaged ones when averaging), by state_dict name
                                training.safetensors   for resuming: `optimizer.<parameter>|<entry>`, `carry.<name>`,
                                                       `own.<parameter>` (the weights being trained, when the model file
                                                       holds averages, and those that only training has), `window.nll`
                                checkpoint.json        plain values and checksums
    checkpoints/last, best, previous                   links to such folders
    checkpoints/kept/step-00000120/                    weights of the last evaluations (`train.keep_checkpoints`)
    checkpoints/average/                               a mean of kept weights, {"step": 360, "averaged": [120, 240, 360]}

A checkpoint is written to a temporary folder, forced to the disk, renamed, and only then do the links move, each in one atomic
step; folders without a link are removed last. Should `last` be damaged, training resumes from `previous`.
checkpoint.json seals the others and the run around them (`fullrank.seal`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from fullrank.config.run import TrainConfig
from fullrank.core.errors import InputError, RunError, one_line
from fullrank.files import no_room, sync
from fullrank.forward import load_tensors
from fullrank.seal import LINKS, DamagedError, Record, read_record, seal_file, write_record
from fullrank.training.device import (
    all_gather,
    barrier,
    distribute_like,
    full_tensor,
    gather_rows,
    rank,
    synchronize,
    take_rows,
)
from fullrank.training.optimizer import Schedule
from fullrank.training.values import Carry, Counters, TimedSteps


class WeightAverage:
    """The mean of a model's parameters, to be evaluated and saved in their place (`train.averaging: swa`).

    With p_s the parameters after update s, after update t

        a_t = mean of p_s,  first < s <= t          first = `swa_start` x planned steps

    It is a running mean, a += (p - a) / count. Buffers are not averaged: they stay as training left them.
    """

    def __init__(self, model: nn.Module, options: TrainConfig, total_steps: int) -> None:
        self.first = round(options.swa_start * total_steps) if options.averaging == "swa" else math.inf
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.count = 0  # updates averaged so far
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters after update `step`."""
        if step <= self.first:
            return
        self.count += 1
        if self.count == 1:
            self._copy_parameters()
        else:
            torch._foreach_lerp_(list(self.averages.values()), list(self.parameters.values()), 1 / self.count)

    def _copy_parameters(self) -> None:
        self.averages = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Run the block with the averages in the model; after it the model has its own parameters again, bit for bit."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the averages and the parameters of the model, if there are averages."""
        for name, average in self.averages.items():
            trained = self.parameters[name].detach().clone()
            self.parameters[name].copy_(average)
            average.copy_(trained)

    @torch.no_grad()
    def restore(self, count: int, trained: dict[str, Tensor]) -> None:
        """Restore an average of `count` updates: the model holds it, `trained` has its parameters at that step, by name."""
        self.count = count
        if count:
            self._copy_parameters()
        for name in self.parameters if count else trained:
            self.parameters[name].copy_(trained[name])


class RunningLoss:
    """Nats and tokens since the last line of metrics, and the first step whose loss was not a finite number.

    The sums stay where the model computes, so that no step waits for a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nll = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0
        self._bad = torch.zeros((), dtype=torch.int64, device=device)  # 0: none

    def add(self, step: int, loss: Tensor, nll: Tensor, tokens: int) -> None:
        """Add an update.

        Args:
            step: number of the update.
            loss: its loss, a scalar, which is checked to be finite.
            nll: nats summed over its tokens, a scalar.
            tokens: their number.
        """
        self.nll += nll.detach()
        self.tokens += tokens
        self._bad = torch.where((self._bad > 0) | torch.isfinite(loss), self._bad, step)

    def bad_step(self) -> int | None:
        """Return the first step whose loss was not a finite number, or None; waits for the device."""
        return int(self._bad.item()) or None

    def take_mean(self) -> float:
        """Return the mean in nats per token, and start the sums again from zero."""
        mean = float(self.nll) / self.tokens
        self.nll = torch.zeros_like(self.nll)
        self.tokens = 0
        return mean


@dataclass
class Clock:
    """Seconds of wall clock, and of training alone by phase, without the first step after each start and in each phase."""

    device: torch.device
    counters: Counters
    is_first: bool = True

    def __post_init__(self) -> None:
        self.interval_start = time.perf_counter()
        self.last_lap = self.counters.sum_timed()

    def step(self, tokens: int) -> None:
        """Count a step on `tokens` tokens."""
        if self.is_first:
            self.resume()
            self.is_first = False
        else:
            timed = self.counters.timed.setdefault(self.phase, TimedSteps())
            timed.steps += 1
            timed.tokens += tokens

    @property
    def phase(self) -> str:
        """The name under which steps are timed."""
        return self.counters.phase or "train"

    def pause(self) -> None:
        """Stop the time of training; the counters now hold all of it, so a checkpoint may be written."""
        seconds = self.resume()
        if self.phase in self.counters.timed and not self.is_first:
            self.counters.timed[self.phase].seconds += seconds

    def resume(self) -> float:
        """Begin another interval and return the seconds of the last one, which count as wall clock only."""
        synchronize(self.device)
        now = time.perf_counter()
        seconds = now - self.interval_start
        self.counters.seconds += seconds
        self.interval_start = now
        return seconds

    def begin_phase(self) -> None:
        """Begin another phase with the next step; to be called before the counters name that phase."""
        self.pause()
        self.is_first = True

    def lap(self) -> float:
        """Return the tokens per second since the last lap, 0 if unknown."""
        self.pause()
        before = self.last_lap
        self.last_lap = self.counters.sum_timed()
        seconds = self.last_lap.seconds - before.seconds
        return (self.last_lap.tokens - before.tokens) / seconds if seconds > 0 else 0.0


class TrainingState:
    """Everything that changes while training: the base of `Training`, which makes it."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    average: WeightAverage
    running: RunningLoss
    counters: Counters
    carry: Carry

    def capture(self) -> Snapshot:
        """Take a snapshot of everything as it is now; tensors are not copied, and the model holds the averages (`apply`)."""
        average = self.average
        weights = dict(self.model.state_dict())
        training = {"window.nll": self.running.nll}
        for name, parameter in self.model.named_parameters():
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    training[f"optimizer.{name}|{entry}"] = torch.as_tensor(value)
        for name, tensor in self.carry.items():
            training[f"carry.{name}"] = gather_rows(tensor)
        for name, parameter in average.parameters.items():
            if average.count or name not in weights:
                training[f"own.{name}"] = average.averages.get(name, parameter)  # the two are exchanged in `apply`
        counters = self.counters
        counters.window_tokens = self.running.tokens
        counters.averaged = average.count
        counters.schedule = self.schedule.state()
        return Snapshot(weights, training, dataclasses.asdict(counters))

    def restore(self, snapshot: Snapshot, path: Path) -> None:
        """Go back to `snapshot`; InputError, naming `path`, if it belongs to another model or configuration."""
        current = self.model.state_dict()
        weights = {name: distribute_like(tensor, current.get(name)) for name, tensor in snapshot.weights.items()}
        load_tensors(self.model, weights, path)
        tensors: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)  # by the first word of their names
        for name, tensor in snapshot.training.items():
            kind, _, entry_name = name.partition(".")
            part = take_rows(tensor) if kind == "carry" else self._distribute(entry_name, tensor)
            tensors[kind][entry_name] = part.to(self.running.device)
        try:
            timed = {name: TimedSteps(**steps) for name, steps in snapshot.state["timed"].items()}
            counters = self.counters = Counters(**{**snapshot.state, "timed": timed})
            self.running.tokens = counters.window_tokens
            self.average.restore(counters.averaged, tensors["own"])
            parameters = dict(self.model.named_parameters())
            for key, tensor in tensors["optimizer"].items():
                name, _, entry = key.rpartition("|")
                self.optimizer.state[parameters[name]][entry] = tensor
            self.schedule.restore(counters.schedule)
            self.carry = tensors["carry"]
            self.running.nll = tensors["window"]["nll"].reshape(())
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise InputError(
                f"{path} does not fit the train section of config.yaml: {one_line(error)}; set it back or start again "
                "with --out"
            ) from error

    def _distribute(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part that this process holds of a tensor; name: `<parameter>`, `<parameter>|<entry>`, or another."""
        parameter = self.average.parameters.get(name.partition("|")[0])
        is_alike = parameter is not None and parameter.shape == tensor.shape
        return distribute_like(tensor, parameter if is_alike else None)


# -- checkpoints on disk -----------------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"
TRAINING = "training.safetensors"
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


def save_checkpoint(folder: Path, snapshot: Snapshot, keep_weights: int | None = None) -> None:
    """Write a snapshot and make it `last`, and `best` if its step is the best so far.

    All processes call it, as it gathers their parts of tensors; the first one writes.

    Args:
        folder: `checkpoints` of a run.
        snapshot: what is written.
        keep_weights: keep the weights too, and at most so many of the kept ones; None: do not.

    Raises:
        RunError: the disk does not take it. The checkpoints that were there are unchanged.
    """
    weights = _gather_tensors(snapshot.weights)
    training = _gather_tensors(snapshot.training)
    if rank() == 0:
        with _explain_failure(folder, f"the checkpoint of step {snapshot.state['step']}"):
            _write_checkpoint(folder, replace(snapshot, weights=weights, training=training), keep_weights)
    barrier()


@contextmanager
def _explain_failure(folder: Path, content: str) -> Iterator[None]:
    """Run the block, which writes `content`; raise RunError where the disk fails."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        _remove_unlinked(folder)
        why = "no space left on the disk" if no_room(error) else error
        last = _read_link(folder, "last")
        intact = f"last ({last}) is intact" if last else "there is no earlier checkpoint"
        raise RunError(
            f"{content} could not be written to {folder}: {why}; {intact}. Make room and run the same command again to go on"
        ) from error


def _gather_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy whole tensors to the CPU of the first process; the others help to gather them and get none."""
    copies = {}
    for name, tensor in tensors.items():
        complete = full_tensor(tensor.detach())
        if rank() == 0:
            copies[name] = complete.to("cpu", copy=True).contiguous()
    return copies


def _write_checkpoint(folder: Path, snapshot: Snapshot, keep_weights: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _remove_unlinked(folder)  # of a process that was killed
    step = snapshot.state["step"]
    target = folder / f"step-{step:08d}"
    with _replace_folder(folder, target) as fresh:
        write_tensors(fresh / WEIGHTS, snapshot.weights)
        write_tensors(fresh / TRAINING, snapshot.training)
        write_record(fresh, (WEIGHTS, TRAINING), snapshot.state, snapshot.run)
    # before `last`: a run resumed from the former `last` repeats this step, one resumed from the new one does not
    if keep_weights is not None:
        _keep_weights(target, step=step, number=keep_weights, run=snapshot.run)
    if last := _read_link(folder, "last"):
        _link(folder, "previous", last)
    _link(folder, "last", target.name)
    if snapshot.state["best_step"] == step:
        _link(folder, "best", target.name)
    _remove_unlinked(folder)


def _keep_weights(checkpoint: Path, *, step: int, number: int, run: Mapping[str, Any]) -> None:
    """Keep the weights of the checkpoint of `step`, and of those kept before it the last `number` - 1.

    Weights kept later than `step` are removed, for that step comes again.
    """
    folder = checkpoint.parent
    target = folder / KEPT / checkpoint.name
    target.parent.mkdir(exist_ok=True)
    with _replace_folder(folder, target) as fresh:
        shutil.copyfile(checkpoint / WEIGHTS, fresh / WEIGHTS)
        sync(fresh / WEIGHTS)
        write_record(fresh, (WEIGHTS,), {"step": step}, run)
    checkpoints = list_kept_checkpoints(folder)
    staying = [earlier for earlier in checkpoints if earlier <= step][-number:]
    for other in set(checkpoints) - set(staying):
        _remove(folder, checkpoints[other])


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of `tensors` and force it to the disk."""
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    sync(path)


# -- folders and links that change in one step -------------------------------------------------------------------------


@contextmanager
def _replace_folder(folder: Path, target: Path) -> Iterator[Path]:
    """Run the block with a new folder, which takes the place of `target` when the block is over; both inside `folder`."""
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


# -- loading -----------------------------------------------------------------------------------------------------------


def load_checkpoint(folder: Path, notice: Callable[[str], None]) -> Snapshot | None:
    """Load the newest checkpoint in `folder` whose files match their checksums; None without any checkpoint.

    If `last` is damaged and another one is good, `notice` is called, and that one is `last` from now on.
    Raises InputError if there are checkpoints and none is good.
    """
    name = all_gather(_find_newest(folder, notice) if rank() == 0 else None)[0]
    return None if name is None else read_checkpoint(folder / name)


def _find_newest(folder: Path, notice: Callable[[str], None]) -> str | None:
    last = _read_link(folder, "last")
    names = sorted((path.name for path in folder.glob("step-*")), reverse=True)
    damages: list[str] = []
    for name in dict.fromkeys([last, *names] if last is not None else names):
        try:
            state = verify_checkpoint(folder / ("last" if name == last else name)).state
        except DamagedError as damage:
            damages.append(str(damage))
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
    """Read the checkpoint in the folder `path`. Its tensors may be views of the files."""
    _, run, state = read_record(path)
    weights = safetensors.torch.load_file(path / WEIGHTS)
    training = safetensors.torch.load_file(path / TRAINING)
    return Snapshot(weights, training, state, run)


def verify_checkpoint(path: Path) -> Record:
    """Check a checkpoint and return its record; DamagedError says which of its files is not what was written."""
    record = read_record(path)
    for name, seal in record.files.items():
        try:
            current = seal_file(path / name)
        except (OSError, ValueError) as error:
            raise DamagedError(path, f"{name} cannot be read ({error})") from error
        if current != seal:
            raise DamagedError(path, f"{name} does not match its checksum")
    return record


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint folder (`checkpoints/best`); InputError if they are damaged or do not fit."""
    load_tensors(model, _read_weights(path), path)


def _read_weights(path: Path) -> dict[str, Tensor]:
    verify_checkpoint(path)
    weights: dict[str, Tensor] = safetensors.torch.load_file(path / WEIGHTS)
    return weights


# -- the mean of kept weights ------------------------------------------------------------------------------------------


def list_kept_checkpoints(folder: Path) -> dict[int, Path]:
    """List the folders of kept weights in `folder` (a run's `checkpoints`) by their steps, the oldest first."""
    return {int(path.name.removeprefix("step-")): path for path in sorted((folder / KEPT).glob("step-*"))}


def mean_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Compute the mean of each tensor over the checkpoint folders `paths`.

    It is added up in fp64; an integer tensor is the last path's. Raises InputError if one is damaged.
    """
    total: dict[str, Tensor] = {}
    for path in paths:
        weights = _read_weights(path)
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                total[name] = total.get(name, 0) + tensor.double()
    for name, tensor in total.items():
        mean = tensor / len(paths)
        weights[name] = mean.to(weights[name].dtype)
    return weights


def write_mean(folder: Path, weights: dict[str, Tensor], steps: Sequence[int], run: Mapping[str, Any]) -> Path:
    """Write the mean of kept weights, in place of an earlier mean.

    Args:
        folder: `checkpoints` of a run.
        weights: the mean of each tensor, by name.
        steps: those of the kept weights, ascending.
        run: what the record says about the run (`seal.seal_run`).

    Returns:
        The folder `average`.

    Raises:
        RunError: the disk does not take it. The checkpoints that were there are unchanged.
    """
    target = folder / "average"
    with _explain_failure(folder, "the average"), _replace_folder(folder, target) as fresh:
        write_tensors(fresh / WEIGHTS, weights)
        write_record(fresh, (WEIGHTS,), {"step": steps[-1], "averaged": list(steps)}, run)
    return target
