"""Values that the loop exchanges with its callers, and the protocols of what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from fullrank.config.training import PhaseConfig

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)

# What one batch leaves for the next (memories): named tensors, opaque to the loop, saved with every checkpoint.
Carry = Mapping[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """The loss of one batch.

    `value`: scalar to differentiate, the mean over tokens plus penalties.  `nll`: sum over tokens, in nats, without
    smoothing or penalties; a tensor spares a GPU the wait.  `tokens`: the number of tokens in the mean.  `carry`: for the
    next batch.  `read`: tokens that were read, where they are more than `tokens` (masked models); None: `tokens`.
    Where several processes share the batch, `nll` is of the rows of this one, `tokens` and `read` are of all, and the mean of
    `value` over the processes is the loss of the whole batch.  A tensor of the carry with two dimensions or more has the rows
    of this process first; any other is the same in all.
    """

    value: Tensor
    nll: Tensor | float
    tokens: int
    carry: Carry = field(default_factory=dict)
    read: int | None = None

    @property
    def seen(self) -> int:
        """Tokens that count as trained on."""
        return self.tokens if self.read is None else self.read


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluation while training: nats summed over tokens, the number of tokens, and scores by name, {"bleu": 31.2}.

    All are functions of configuration and seed only, for they are written to metrics.jsonl.
    """

    nll: float
    tokens: int
    scores: Mapping[str, float] = field(default_factory=dict)


class Batches(Protocol[Batch_co]):
    """Training data: batch `index` of epoch `epoch` is a pure function of the two, so a position is one integer.

    Token counts are those of `Loss.seen`, of the rows of all processes.
    """

    @property
    def batches_per_epoch(self) -> int: ...

    @property
    def tokens_per_epoch(self) -> int: ...

    def tokens_of_batches(self, epoch: int) -> Sequence[int] | None:
        """Tokens of each batch of an epoch; None if they are not known, then the mean is used."""

    def batch(self, epoch: int, index: int) -> Batch_co: ...


@dataclass(frozen=True)
class TrainingPosition:
    """The position of a forward pass in training.

    `step`: the update it is part of, from 1.  `part`: which of that update's batches, from 0.  `phase`: of `train.phases`,
    None without phases.  `accumulation`: batches of an update.
    """

    step: int
    part: int = 0
    phase: PhaseConfig | None = None
    accumulation: int = 1

    @property
    def number(self) -> int:
        """The number of the forward pass, from 1; an update cut short by the end of an epoch leaves numbers out."""
        return (self.step - 1) * self.accumulation + self.part + 1


class EvaluationOptions(NamedTuple):
    """The part of an eval section that training reads: how often to evaluate, and what makes a step the best.

    Both cadences None: once an epoch. `metric`: `loss` (the lowest is best), or the name of a score (the highest is best).
    """

    every_steps: int | None
    every_epochs: float | None
    metric: str


Objective = Callable[[Batch, Carry, TrainingPosition], Loss]
Evaluate = Callable[[nn.Module], EvaluationResult]


@dataclass(frozen=True)
class FitResult:
    """The result of training; times add up over all parts of a resumed run.

    `epochs`: steps made, in epochs.  `tokens`: tokens trained on.  `best_nll`: validation nll of the best step, in nats per
    token, the lowest one unless `eval.metric` says otherwise.  `best_metric`: the value of `eval.metric` at that step.
    `ms_per_step`: training alone, without evaluation, saving and the first step of each part and phase, for each phase that
    was timed (`train` where there are no phases).
    `stopped_early`: by `train.patience`, or by the plateau of the last phase.  `seconds`: wall clock.
    `resumed_from`: the step this part began at, None for a run begun here.  `engines`: kernels that computed attention.
    """

    steps: int
    epochs: float
    tokens: int
    best_step: int | None
    best_nll: float | None
    best_metric: float | None
    stopped_early: bool
    ms_per_step: dict[str, float]
    tokens_per_second: float
    seconds: float
    peak_memory_mib: float
    resumed_from: int | None
    engines: list[str]


class Observer:
    """A progress display or tracker, which ignores what it does not override.

    It must not touch the model or draw random numbers.
    """

    def start(self, *, step: int, total_steps: int) -> None:
        """Before the first step of this part; `step` are already made."""

    def advance(self, step: int, tokens: int) -> None:
        """After every step; `tokens` are seen so far."""

    def record(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl or timing.jsonl was written."""

    def notice(self, text: str) -> None:
        """A message for the user."""

    def finish(self) -> None:
        """The part is over, with or without an error; called once."""
