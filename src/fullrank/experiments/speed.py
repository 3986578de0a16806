"""Speed of this machine: the time of a training step and of an evaluation, from a few of them with untrained weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fullrank.experiments.task import Parts
from fullrank.training.device import device_of, synchronize
from fullrank.training.optimizer import make_optimizer
from fullrank.training.values import TrainingPosition


class Speed(NamedTuple):
    """Seconds of a training step, and of one evaluation as it is done while training."""

    step: float
    evaluation: float


def measure_speed(parts: Parts, clock: Callable[[], float], spend: float = 1.0) -> Speed:
    """Train for about `spend` seconds, then evaluate once, timed by `clock`. Afterwards the weights are worth nothing."""
    groups = parts.groups()
    optimizer = make_optimizer(parts.options.optimizer, groups, parts.options)
    parameters = [p for group in groups for p in group["params"]]
    carry: dict[str, torch.Tensor] = {}
    times: list[float] = []
    end = time.perf_counter() + spend
    parts.model.train()
    while len(times) < 4 or (time.perf_counter() < end and len(times) < 200):
        begin, index = clock(), len(times) % parts.batches.batches_per_epoch
        position = TrainingPosition(step=len(times) + 1)
        loss = parts.objective(parts.batches.batch(0, index), carry if index else {}, position)
        loss.value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        carry = {name: tensor.detach() for name, tensor in loss.carry.items()}
        synchronize(device_of(parts.model))
        times.append(clock() - begin)
    parts.model.eval()
    begin = clock()
    with torch.no_grad():
        parts.evaluate(parts.model)
    return Speed(statistics.median(times[1:]), clock() - begin)
