"""The state of a training under way, which a checkpoint saves: everything the next step depends on.

Names in `training.safetensors`: `optimizer.<parameter>|<entry>`, `own.<parameter>` (the weights being trained, when the
model file holds averages, and those that only training has), `carry.<name>`, `window.nll`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullrank.config.training import TrainConfig
from fullrank.core.errors import ConfigError, InputError, one_line
from fullrank.core.section import CountOrZero, read_value
from fullrank.decoding.sample import evaluating
from fullrank.forward import load_tensors
from fullrank.training.checkpoint import Snapshot
from fullrank.training.device import autocast, synchronize
from fullrank.training.distributed import distribute_like, gather_rows, take_rows
from fullrank.training.optimizer import Schedule
from fullrank.training.values import Carry, Evaluate, EvaluationResult


@dataclass
class TimedSteps:
    """Steps, their time and their tokens."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0


@dataclass
class Counters:
    """The position of a training in plain values: the `state` of checkpoint.json."""

    step: int = 0
    tokens: int = 0
    best_step: int | None = None
    best_nll: float | None = None  # of that step
    best_metric: float | None = None  # of that step: the value of `eval.metric`
    since_best: int = 0  # evaluations
    stopped_early: bool = False
    finished: bool = False
    seconds: float = 0.0  # wall clock, all parts
    phase: str | None = None  # of the next step; None without phases
    phase_began: int = 0  # steps made before it
    phase_bests: list[tuple[int, float]] = field(default_factory=list)  # see phases.update_plateau
    # training alone, without the first step of each part and phase, by phase (`train` without phases)
    timed: dict[str, TimedSteps] = field(default_factory=dict)
    peak_memory_mib: float = 0.0
    metrics_bytes: int = 0
    engines: list[str] = field(default_factory=list)  # kernels that computed attention in updates
    window_tokens: CountOrZero = 0  # since the last line of metrics
    averaged: CountOrZero = 0  # updates in the average of the weights
    schedule: dict[str, Any] = field(default_factory=dict)  # state of a learning rate that follows the validation

    def sum_timed(self) -> TimedSteps:
        """All steps that were timed."""
        phases = self.timed.values()
        return TimedSteps(*(sum(getattr(phase, name) for phase in phases) for name in ("seconds", "steps", "tokens")))

    def note_evaluation(self, nll: float, metric: str, value: float) -> bool:
        """Record an evaluation after this step, `value` of `metric`; True if it is the best so far."""
        if self.best_metric is None or cost(metric, value) < cost(metric, self.best_metric):
            self.best_step, self.best_nll, self.best_metric = self.step, nll, value
            self.since_best = 0
            return True
        self.since_best += 1
        return False


def cost(metric: str, value: float) -> float:
    """`value` of `metric` as a number that is better the lower it is: the loss is, a score is not."""
    return value if metric == "loss" else -value


class WeightAverage:
    """The mean of a model's parameters, to be evaluated and saved in their place (`train.averaging: swa`).

    With p_s the parameters after update s, after update t

        a_t = mean of p_s,  first < s <= t          first = `swa_start` x planned steps

    It is a running mean, a += (p - a) / count. Buffers are not averaged: they stay as training left them.
    """

    def __init__(self, model: nn.Module, options: TrainConfig, total_steps: int) -> None:
        self.first = round(options.swa_start * total_steps) if options.averaging == "swa" else None
        self.parameters = dict(model.named_parameters())
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
            return
        trained = [parameter.detach() for parameter in self.parameters.values()]
        torch._foreach_lerp_(list(self.averages.values()), trained, 1 / self.count)

    def _copy_parameters(self) -> None:
        self.averages = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the averages inside the block, and its own parameters, bit for bit, after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, average in self.averages.items():
            trained = self.parameters[name].detach().clone()
            self.parameters[name].copy_(average)
            average.copy_(trained)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Leave the averages in the model at the end of training."""
        for name, average in self.averages.items():
            self.parameters[name].copy_(average)

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
    """Seconds of wall clock, and of training alone, by phase, added to the counters.

    The first step of a part and of a phase is not typical (compiling, first touch) and left out.
    """

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
            return
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

    def new_phase(self) -> None:
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

    def evaluate(
        self, evaluate: Evaluate, options: TrainConfig, gather_parameters: AbstractContextManager[None]
    ) -> EvaluationResult:
        """Evaluate the model as it would be saved now: with averaged weights when averaging, and all of them.

        In evaluation mode, and in the precision of training; modes and weights are restored.
        """
        precision = autocast(options.precision, self.running.device)
        with self.average.applied(), gather_parameters, evaluating(self.model), precision:
            return evaluate(self.model)

    def capture(self) -> Snapshot:
        """A snapshot of everything as it is now; tensors are not copied."""
        average, weights, training = self.average, dict(self.model.state_dict()), {"window.nll": self.running.nll}
        for name, tensor in _name_optimizer_tensors(self.model, self.optimizer).items():
            training[f"optimizer.{name}"] = tensor
        for name, tensor in self.carry.items():
            training[f"carry.{name}"] = gather_rows(tensor)
        for name, parameter in average.parameters.items():
            if average.count or name not in weights:
                training[f"own.{name}"] = parameter
        if average.count:
            names = {id(parameter): name for name, parameter in average.parameters.items()}
            for alias, parameter in self.model.named_parameters(remove_duplicate=False):
                if alias in weights:
                    weights[alias] = average.averages[names[id(parameter)]]
        counters = self.counters
        counters.window_tokens, counters.averaged = self.running.tokens, average.count
        counters.schedule = self.schedule.state()
        return Snapshot(weights, training, dataclasses.asdict(counters))

    def _distribute(self, name: str, tensor: Tensor) -> Tensor:
        """The part that this process holds of a tensor by its name in `training.safetensors`."""
        kind, _, rest = name.partition(".")
        if kind == "carry":
            return take_rows(tensor)
        parameter = self.average.parameters.get(rest.rpartition("|")[0] if kind == "optimizer" else rest)
        is_alike = parameter is not None and parameter.shape == tensor.shape
        return distribute_like(tensor, parameter if is_alike else None)

    def restore(self, snapshot: Snapshot, path: Path) -> None:
        """Go back to `snapshot`; InputError, naming `path`, if it belongs to another model or configuration."""
        try:
            counters = read_value(Counters, snapshot.state, "state")
        except ConfigError as error:
            raise InputError(f"{path}: damaged ({one_line(error)}); start again with --out") from error
        current = self.model.state_dict()
        weights = {name: distribute_like(tensor, current.get(name)) for name, tensor in snapshot.weights.items()}
        load_tensors(self.model, weights, path)
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in snapshot.training.items():
            prefix, _, rest = name.partition(".")
            parts.setdefault(prefix, {})[rest] = self._distribute(name, tensor)
        device = self.running.device
        self.counters, self.running.tokens = counters, counters.window_tokens
        try:
            self.average.restore(counters.averaged, parts.get("own", {}))
            _restore_optimizer(self.model, self.optimizer, parts.get("optimizer", {}))
            self.schedule.restore(counters.schedule)
            self.carry = {name: tensor.to(device) for name, tensor in parts.get("carry", {}).items()}
            self.running.nll = parts["window"]["nll"].to(device).reshape(())
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise InputError(
                f"{path} does not fit the train section of config.yaml: {one_line(error)}; set it back or start again "
                "with --out"
            ) from error


def _list_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order of its state_dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _name_optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of the optimizer by parameter and entry."""
    names = _list_names(model, optimizer)
    tensors = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for entry, value in entries.items():
            if value is not None:
                tensors[f"{names[index]}|{entry}"] = torch.as_tensor(value)
    return tensors


def _restore_optimizer(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    names = _list_names(model, optimizer)
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("|")
        state.setdefault(names.index(name), {})[entry] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
