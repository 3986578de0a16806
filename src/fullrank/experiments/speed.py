"""Speed of this machine: the time of a training step and of all evaluation, from a few of them with untrained weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fullrank.config.run import RunConfig
from fullrank.core.embedding import Input
from fullrank.core.output import Output
from fullrank.core.translator import Translator
from fullrank.experiments.run import task_of
from fullrank.experiments.task import Parts, Prepared
from fullrank.files import silent
from fullrank.training.device import choose_device, device_of, synchronize
from fullrank.training.optimizer import make_optimizer
from fullrank.training.values import TrainingPosition


class Speed(NamedTuple):
    """Seconds of a training step, and of one evaluation as it is done while training."""

    step: float
    evaluation: float


@dataclass(frozen=True)
class Trial:
    """A model on this machine: parameters (in all, and outside of its vocabulary), tokens and seconds of an update.

    judging: seconds of all evaluation.
    """

    parameters: int
    body: int
    tokens: float
    step: float
    judging: float


def try_training(
    config: RunConfig, prepared: Prepared, evaluations: int, clock: Callable[[], float] | None = None
) -> Trial:
    """Build the model of a configuration on data that are prepared, and time it.

    evaluations: while training. clock: None is the time of the processor for one thread, which other programs do not change,
    else wall-clock time.
    """
    device, corpus, task = choose_device(config.train.device), prepared.corpus, task_of(config)
    if clock is None:
        is_alone = torch.get_num_threads() == 1 and device.type == "cpu"
        clock = time.process_time if is_alone else time.perf_counter
    parts = task.parts(task.prepare(config, prepared.identity, True, silent), Path(), device)
    speed = measure_speed(parts, clock)
    unit = "pairs" if corpus.has_pairs else "tokens"
    valid, test = (corpus.splits[split][unit] for split in ("valid", "test"))
    final = speed.evaluation * (valid + test) / min(config.eval.max_tokens or valid, valid)
    if isinstance(parts.model, Translator):
        from fullrank.experiments.translation import Search, translate_split

        some, began = min(16, valid), clock()
        translate_split(parts.model, corpus, "valid", Search.from_config(config.eval), some)
        final += (clock() - began) * (valid + test) / some
    return Trial(
        parameters=sum(p.numel() for p in parts.model.parameters()),
        body=count_body(parts.model),
        tokens=parts.batches.tokens_per_epoch / parts.batches.batches_per_epoch,
        step=speed.step,
        judging=final + evaluations * speed.evaluation,
    )


def count_body(model: Any) -> int:
    """Parameters outside of the vocabulary: neither in an embedding nor in the output layer."""
    tables = [module for module in model.modules() if isinstance(module, Input | Output)]
    vocabulary = {id(p) for module in tables for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in vocabulary)


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
