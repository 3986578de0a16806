"""From a training under way to a snapshot and back: everything the next step depends on.

Names in `training.safetensors`: `optimizer.<parameter>|<entry>`, `own.<parameter>` (the weights being trained, when the
model file holds averages), `carry.<name>`, `random.<generator>`, `window.nll`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullrank.core.errors import InputError
from fullrank.training.averaging import WeightAverage
from fullrank.training.checkpoint import Snapshot, put_weights
from fullrank.training.randomness import random_state, restore_random_state
from fullrank.training.schedule import Schedule
from fullrank.training.values import Carry
from fullrank.training.window import Window


@dataclass
class Timed:
    """Steps whose time was taken."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    def add(self, seconds: float, steps: int, tokens: int) -> None:
        self.seconds += seconds
        self.steps += steps
        self.tokens += tokens


@dataclass
class Counters:
    """Where a training stands, in plain values."""

    step: int = 0
    tokens: int = 0
    best_step: int | None = None
    best_nll: float | None = None  # of that step
    metric: str = "loss"  # what makes it the best ...
    best_metric: float | None = None  # ... and its value then
    since_best: int = 0  # evaluations
    stopped_early: bool = False
    finished: bool = False
    seconds: float = 0.0  # wall clock, all parts
    phase: str | None = None  # of the next step; None without phases
    phase_began: int = 0  # steps made before it
    phase_bests: list[tuple[int, float]] = field(default_factory=list)  # (step of the phase, ppl), see phases.look_back
    timed_seconds: float = 0.0  # training alone, without the first step of each part and phase
    timed_steps: int = 0
    timed_tokens: int = 0
    timed_by_phase: dict[str, Timed] = field(default_factory=dict)
    peak_memory_mib: float = 0.0
    metrics_bytes: int = 0
    batches_per_epoch: int = 0

    def took(self, seconds: float, steps: int, tokens: int) -> None:
        """`steps` updates of the current phase took `seconds` of training alone."""
        self.timed_seconds += seconds
        self.timed_steps += steps
        self.timed_tokens += tokens
        if self.phase is not None:
            self.timed_by_phase.setdefault(self.phase, Timed()).add(seconds, steps, tokens)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Counters:
        """From the plain values of a checkpoint; one of an earlier version has fewer."""
        counters = cls(**state)
        if counters.metric == "loss":  # the only one that earlier versions had
            counters.best_metric = counters.best_nll
        counters.phase_bests = [(step, ppl) for step, ppl in counters.phase_bests]
        counters.timed_by_phase = {name: Timed(**timed) for name, timed in state.get("timed_by_phase", {}).items()}
        return counters


@dataclass
class Training:
    """What changes while training."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    average: WeightAverage
    window: Window
    counters: Counters
    carry: Carry = field(default_factory=dict)

    def capture(self) -> Snapshot:
        """Everything, as it is now; tensors are not copied."""
        training = {
            f"optimizer.{name}": tensor for name, tensor in _optimizer_tensors(self.model, self.optimizer).items()
        }
        training |= {f"carry.{name}": tensor for name, tensor in self.carry.items()}
        tensors, plain = random_state(self.window.device)
        training |= {f"random.{name}": tensor for name, tensor in tensors.items()}
        training["window.nll"] = self.window.nll
        weights = dict(self.model.state_dict())
        if self.average.active:
            training |= {f"own.{name}": parameter for name, parameter in self.average.parameters.items()}
            by_address = {id(p): name for name, p in self.average.parameters.items()}
            every_name = self.model.named_parameters(remove_duplicate=False)
            weights |= {name: self.average.averages[by_address[id(p)]] for name, p in every_name if name in weights}
        state = dataclasses.asdict(self.counters) | {
            "window_tokens": self.window.tokens,
            "optimizer": type(self.optimizer).__name__,
            "schedule": self.schedule.state(),
            "average": self.average.state(),
            "random": plain,
        }
        return Snapshot(weights, training, state)

    def restore(self, snapshot: Snapshot, path: Path) -> None:
        """Go back to `snapshot`; InputError, naming `path`, if it belongs to another model or configuration."""
        state = dict(snapshot.state)
        window_tokens, schedule = state.pop("window_tokens"), state.pop("schedule")
        metric = state.get("metric", "loss")
        if metric != self.counters.metric:
            raise InputError(
                f"{path} was made with eval.metric: {metric}, now it is {self.counters.metric}; set it back or start again "
                "with --out"
            )
        average, random_plain, optimizer = state.pop("average"), state.pop("random"), state.pop("optimizer")
        if state["batches_per_epoch"] != self.counters.batches_per_epoch:
            raise InputError(
                f"{path} was made with {state['batches_per_epoch']} batches an epoch, the data now gives "
                f"{self.counters.batches_per_epoch}: the text, train.batch_size, train.segment_length or "
                "train.batch_tokens changed; set them back or start again with --out"
            )
        put_weights(self.model, snapshot.weights, path)
        parts = _by_prefix(snapshot.training)
        try:
            if optimizer != type(self.optimizer).__name__:
                raise ValueError(f"it was trained with {optimizer}, not {type(self.optimizer).__name__}")
            self.average.restore(average, parts.get("own", {}))
            _restore_optimizer(self.model, self.optimizer, parts.get("optimizer", {}))
            self.schedule.restore(schedule)
        except (KeyError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{path} does not fit the train section of config.yaml: {error}; set it back or start again with --out"
            ) from error
        device = self.window.device
        self.carry = {name: tensor.to(device) for name, tensor in parts.get("carry", {}).items()}
        self.window.nll = parts["window"]["nll"].to(device)
        self.window.tokens = window_tokens
        self.counters = Counters.of(state)
        restore_random_state(device, parts["random"], random_plain)


def _by_prefix(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".")
        parts.setdefault(prefix, {})[rest] = tensor
    return parts


def _names_in_order(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order of its state_dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    names = _names_in_order(model, optimizer)
    tensors: dict[str, Tensor] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for entry, value in entries.items():
            if value is not None:
                tensors[f"{names[index]}|{entry}"] = torch.as_tensor(value)
    return tensors


def _restore_optimizer(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    places = {name: index for index, name in enumerate(_names_in_order(model, optimizer))}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("|")
        if name not in places or (tensor.ndim and tensor.shape != shapes[name]):
            raise ValueError(f"the state '{entry}' of parameter '{name}' has no place in the optimizer")
        state.setdefault(places[name], {})[entry] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
