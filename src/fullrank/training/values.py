"""What travels between the loop and those who use it: plain values, and the shapes of what is handed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from fullrank.config.run import PhaseConfig
from fullrank.core.errors import RunError

# What one batch leaves for the next (memories): named tensors, opaque to the loop, saved with every checkpoint.
Carry = Mapping[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """What an objective says about one batch.

    `value`: scalar to differentiate, the mean over tokens plus penalties.  `nll`: sum over tokens, in nats, without
    smoothing or penalties; a tensor spares a GPU the wait.  `tokens`: how many.  `carry`: for the next batch.
    `read`: tokens seen, where more are read than the loss is about (masked ones); None: `tokens`.
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


class Evaluation(Protocol):
    """What an evaluation returns: nats summed over tokens, and how many tokens.

    It may have `scores` as well, a mapping of names to figures of another kind, {"bleu": 31.2}; see `Judged`.
    """

    @property
    def nll(self) -> float: ...

    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True)
class Judged:
    """An evaluation with scores: functions of configuration and seed only, for they are written to metrics.jsonl."""

    nll: float
    tokens: int
    scores: Mapping[str, float] = field(default_factory=dict)


class Batches(Protocol):
    """Training data: batch `index` of epoch `epoch` is a pure function of the two, so a position is one integer.

    What they know of their tokens, they may say, for the plan of a budget in tokens (`plan.make_plan`): all of an epoch
    (`tokens_per_epoch`), and each batch's (`tokens_of_batches(epoch) -> Sequence[int]`, their sum being the former) or what
    is usual (`tokens_per_batch`). Tokens are those of `Loss.seen`.
    """

    @property
    def batches_per_epoch(self) -> int: ...

    def batch(self, epoch: int, index: int) -> Any: ...


@dataclass(frozen=True)
class Place:
    """Where in training a batch is read.

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


class Judging(Protocol):
    """What training reads of the eval section: how often there is an evaluation, and what makes one the best.

    Both cadences None: once an epoch. `metric`: `loss`, or the name of a score of `Judged`, of which the highest is the best.
    """

    @property
    def every_steps(self) -> int | None: ...
    @property
    def every_epochs(self) -> float | None: ...
    @property
    def metric(self) -> str: ...


Objective = Callable[[Any, Carry, Place], Loss]
Evaluate = Callable[[nn.Module], Evaluation]


@dataclass(frozen=True)
class FitResult:
    """What came out of training; times add up over all parts of a resumed run.

    `epochs`: steps made, in epochs.  `tokens`: tokens trained on.  `best_nll`: validation nll of the best step, in nats per
    token, the lowest one unless `eval.metric` says otherwise.  `best_metric`: what made that step the best, by `eval.metric`.
    `ms_per_step`: training alone, without evaluation, saving and the first step of each part and phase.
    `ms_per_step_by_phase`: the same for each phase that was timed, `train` where there are no phases.
    `stopped_early`: by `train.patience`, or by the plateau of the last phase.  `seconds`: wall clock.
    `resumed_from`: the step this part began at, None for a run begun here.
    """

    steps: int
    epochs: float
    tokens: int
    best_step: int | None
    best_nll: float | None
    best_metric: float | None
    stopped_early: bool
    ms_per_step: float
    ms_per_step_by_phase: dict[str, float]
    tokens_per_second: float
    seconds: float
    peak_memory_mib: float
    resumed_from: int | None


class Interrupted(RunError):
    """Training was asked to stop (SIGINT, SIGTERM) and has saved its state: the same command goes on from there."""


class Observer(Protocol):
    """Looks on: a live line, TensorBoard. It must be quick, must not touch the model and must not draw random numbers."""

    def start(self, *, step: int, total_steps: int) -> None:
        """Before the first step of this part; `step` are already made."""

    def advance(self, step: int, tokens: int) -> None:
        """After every step; `tokens` are seen so far."""

    def record(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl or timing.jsonl was written."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def finish(self) -> None:
        """The part is over, well or badly; called once."""
