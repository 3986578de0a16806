"""The state of a training under way, which a checkpoint saves: everything the next step depends on.

Names in `training.safetensors`: `optimizer.<parameter>|<entry>`, `own.<parameter>` (the weights being trained, when the
model file holds averages, and those that only training has), `carry.<name>`, `window.nll`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullrank.config.training import TrainConfig
from fullrank.core.errors import ConfigError, InputError, one_line
from fullrank.core.section import read_value
from fullrank.forward import load_tensors
from fullrank.training.checkpoint import Snapshot
from fullrank.training.device import synchronize
from fullrank.training.distributed import distribute_like, gather_rows, take_rows
from fullrank.training.optimizer import Schedule
from fullrank.training.values import Carry, Counters, TimedSteps


class WeightAverage:
    """The mean of a model's parameters, to be evaluated and saved in their place (`train.averaging: swa`).

    With p_s the parameters after update s, after update t

        a_t = mean of p_s,  first < s <= t          first = `swa_start` x planned steps

    It is a running mean, a += (p - a) / count. Buffers are not averaged: they stay as training left them.
    """

    def __init__(self, model: nn.Module, options: TrainConfig, total_steps: int) -> None:
        self.first = round(options.swa_start * total_steps) if options.averaging == "swa" else None
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.count = 0  # updates averaged so far
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters after update `step`."""
        if self.first is None or step <= self.first:
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
        """The model holds the averages inside the block, and its own parameters, bit for bit, after it."""
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
        """Add update `step`: its loss, nats summed over its tokens, and their number."""
        self.nll += nll.detach()
        self.tokens += tokens
        self._bad = torch.where((self._bad > 0) | torch.isfinite(loss), self._bad, step)

    def bad_step(self) -> int | None:
        """The first step whose loss was not a finite number; waits for the device."""
        return int(self._bad.item()) or None

    def take_mean(self) -> float:
        """The mean in nats per token; the sums start again from zero."""
        mean = float(self.nll) / self.tokens
        self.nll = torch.zeros_like(self.nll)
        self.tokens = 0
        return mean


class Clock:
    """Seconds of wall clock, and of training alone, by phase; the first step of a part and of a phase is left out."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self.device, self.counters = device, counters
        self.interval_start = time.perf_counter()
        self.is_first = True
        self.steps = self.tokens = 0  # of the interval
        self.last_lap = counters.sum_timed()

    def step(self, tokens: int) -> None:
        """Count a step on `tokens` tokens."""
        if self.is_first:
            self.resume()
            self.is_first = False
        else:
            self.steps += 1
            self.tokens += tokens

    def pause(self) -> None:
        """Stop the time of training; the counters now hold all of it, so a checkpoint may be written."""
        counters, seconds = self.counters, self.resume()
        if self.steps:
            phase = counters.timed.setdefault(counters.phase or "train", TimedSteps())
            phase.seconds += seconds
            phase.steps += self.steps
            phase.tokens += self.tokens
        self.steps = self.tokens = 0

    def resume(self) -> float:
        """Begin another interval; the seconds of the last one, returned, count as wall clock only."""
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
        """Tokens per second since the last lap, 0 if unknown."""
        self.pause()
        before, self.last_lap = self.last_lap, self.counters.sum_timed()
        seconds = self.last_lap.seconds - before.seconds
        return (self.last_lap.tokens - before.tokens) / seconds if seconds > 0 else 0.0


@dataclass
class TrainingState:
    """Everything that changes while training."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    average: WeightAverage
    running: RunningLoss
    counters: Counters = field(default_factory=Counters)
    carry: Carry = field(default_factory=dict)

    def capture(self) -> Snapshot:
        """A snapshot of everything as it is now; tensors are not copied."""
        average, weights, training = self.average, dict(self.model.state_dict()), {"window.nll": self.running.nll}
        names = _list_names(self.model, self.optimizer)
        for index, entries in self.optimizer.state_dict()["state"].items():
            for entry, value in entries.items():
                if value is not None:
                    training[f"optimizer.{names[index]}|{entry}"] = torch.as_tensor(value)
        for name, tensor in self.carry.items():
            training[f"carry.{name}"] = gather_rows(tensor)
        for name, parameter in average.parameters.items():
            if average.count or name not in weights:
                training[f"own.{name}"] = parameter
        if average.count:
            means = {id(parameter): average.averages[name] for name, parameter in average.parameters.items()}
            for alias, parameter in self.model.named_parameters(remove_duplicate=False):
                if alias in weights:
                    weights[alias] = means[id(parameter)]
        counters = self.counters
        counters.window_tokens, counters.averaged = self.running.tokens, average.count
        counters.schedule = self.schedule.state()
        return Snapshot(weights, training, dataclasses.asdict(counters))

    def restore(self, snapshot: Snapshot, path: Path) -> None:
        """Go back to `snapshot`; InputError, naming `path`, if it belongs to another model or configuration."""
        try:
            counters = read_value(Counters, snapshot.state, "state")
        except ConfigError as error:
            raise InputError(f"{path}: damaged ({one_line(error)}); start again with --out") from error
        current = self.model.state_dict()
        weights = {name: distribute_like(tensor, current.get(name)) for name, tensor in snapshot.weights.items()}
        load_tensors(self.model, weights, path)
        parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in snapshot.training.items():
            kind, _, rest = name.partition(".")
            parts[kind][rest] = take_rows(tensor) if kind == "carry" else self._distribute(rest, tensor)
        device = self.running.device
        self.counters, self.running.tokens = counters, counters.window_tokens
        try:
            self.average.restore(counters.averaged, parts["own"])
            _restore_optimizer(self.model, self.optimizer, parts["optimizer"])
            self.schedule.restore(counters.schedule)
            self.carry = {name: tensor.to(device) for name, tensor in parts["carry"].items()}
            self.running.nll = parts["window"]["nll"].to(device).reshape(())
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise InputError(
                f"{path} does not fit the train section of config.yaml: {one_line(error)}; set it back or start again "
                "with --out"
            ) from error

    def _distribute(self, name: str, tensor: Tensor) -> Tensor:
        """The part that this process holds of a tensor; name: `<parameter>`, `<parameter>|<entry>`, or another."""
        parameter = self.average.parameters.get(name.partition("|")[0])
        is_alike = parameter is not None and parameter.shape == tensor.shape
        return distribute_like(tensor, parameter if is_alike else None)


def _list_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order of its state_dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _restore_optimizer(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    names = _list_names(model, optimizer)
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("|")
        state.setdefault(names.index(name), {})[entry] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
