"""Values that the training loop exchanges, its counters, and its plan: length, evaluations, checkpoints, phases.

A step is one update of the parameters. It takes `gradient_accumulation_steps` consecutive batches of one epoch (fewer
at the end of an epoch that does not divide). A phase (`train.phases`) ends at its last step, or at an evaluation that sees it
on a plateau, and the next one has begun before a checkpoint of that step is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from fullrank.config.run import EvalConfig, PhaseConfig, PlateauConfig, TrainConfig

# What one batch leaves for the next (memories): named tensors, opaque to the loop, saved with every checkpoint.
Carry = Mapping[str, Tensor]

# -- what the loop calls -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """The loss of one batch.

    Where several processes share the batch, `nll` is of the rows of this one, `tokens` and `read` are of all, and the mean of
    `value` over the processes is the loss of the whole batch.

    Attributes:
        value: scalar to differentiate, the mean over tokens plus penalties.
        nll: sum over tokens, in nats, without smoothing or penalties.
        tokens: the number of tokens in the mean.
        carry: what the next batch continues from. A tensor with two dimensions or more has the rows of this process first; any
            other is the same in all processes.
        read: tokens that were read, where they are more (masked models).
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


class Batches(Protocol):
    """Training data: batch `index` of epoch `epoch` is a pure function of the two, so a position is one integer.

    Token counts are those of `Loss.seen`, of the rows of all processes. Where several train, a batch has `share(rank, count)`,
    the rows of one of them.
    """

    @property
    def batches_per_epoch(self) -> int: ...

    def tokens_of_batches(self, epoch: int) -> Sequence[int]:
        """Count the tokens of each batch of an epoch; every epoch has as many batches."""

    def batch(self, epoch: int, index: int) -> Any: ...


@dataclass(frozen=True)
class TrainingPosition:
    """The position of a forward pass in training.

    Attributes:
        step: the update it is part of, from 1.
        part: which of that update's batches it reads, from 0.
        phase: the phase of that update; None without phases.
        accumulation: batches of an update.
    """

    step: int
    part: int = 0
    phase: PhaseConfig | None = None
    accumulation: int = 1

    @property
    def number(self) -> int:
        """The number of the forward pass, from 1; an update cut short by the end of an epoch leaves numbers out."""
        return (self.step - 1) * self.accumulation + self.part + 1


Objective = Callable[[Any, Carry, TrainingPosition], Loss]
Evaluate = Callable[[nn.Module], EvaluationResult]


class Observer:
    """A progress display or tracker. It must not touch the model or draw random numbers."""

    def start(self, *, step: int, total_steps: int) -> None:
        """Handle a start of the run, before its next step; `step` steps are already made."""

    def advance(self, step: int) -> None:
        """Handle the end of every step."""

    def record(self, line: Mapping[str, Any]) -> None:
        """Handle a line of metrics.jsonl or timing.jsonl that was written."""

    def notice(self, text: str) -> None:
        """Handle a message for the user."""

    def finish(self) -> None:
        """Handle the end of training, or its interruption by an error; called once for each start."""


# -- counters ----------------------------------------------------------------------------------------------------------


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
    seconds: float = 0.0  # wall clock, over all starts of the run
    phase: str | None = None  # of the next step; None without phases
    phase_began: int = 0  # steps made before it
    phase_bests: list[tuple[int, float]] = field(default_factory=list)  # see note_best
    # training alone, without the first step of each start and phase, by phase (`train` without phases)
    timed: dict[str, TimedSteps] = field(default_factory=dict)
    peak_memory_mib: float = 0.0
    metrics_bytes: int = 0
    engines: list[str] = field(default_factory=list)  # kernels that computed attention in updates
    window_tokens: int = 0  # since the last line of metrics
    averaged: int = 0  # updates in the average of the weights
    schedule: dict[str, Any] = field(default_factory=dict)  # state of a learning rate that follows the validation

    @property
    def ms_per_step(self) -> dict[str, float]:
        """Milliseconds of training alone, for each phase that was timed."""
        return {name: 1000 * phase.seconds / phase.steps for name, phase in self.timed.items()}

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of training alone, 0 if unknown."""
        timed = self.sum_timed()
        return timed.tokens / timed.seconds if timed.seconds else 0.0

    def sum_timed(self) -> TimedSteps:
        """Sum all steps that were timed."""
        total = TimedSteps()
        for phase in self.timed.values():
            total.seconds += phase.seconds
            total.tokens += phase.tokens
        return total

    def note_evaluation(self, nll: float, metric: str, value: float) -> bool:
        """Record an evaluation after this step.

        Args:
            nll: mean in nats per token.
            metric: `loss`, or the name of a score.
            value: that of `metric`.

        Returns:
            Whether it is the best so far.
        """
        if self.best_metric is None or cost(metric, value) < cost(metric, self.best_metric):
            self.best_step = self.step
            self.best_nll = nll
            self.best_metric = value
            self.since_best = 0
            return True
        self.since_best += 1
        return False


def cost(metric: str, value: float) -> float:
    """Turn the value of a metric into a cost, where lower is better: a loss stays, a score is negated."""
    return value if metric == "loss" else -value


# -- the plan ----------------------------------------------------------------------------------------------------------


class EvaluationOptions(NamedTuple):
    """The part of an eval section that training reads: how often to evaluate, and what makes a step the best.

    With neither `every_steps` nor `every_epochs` it is once an epoch. metric: `loss` (the lowest is best), or the name of a
    score (the highest is best).
    """

    every_steps: int | None
    every_epochs: float | None
    metric: str


def note_best(bests: list[tuple[int, float]], step: int, ppl: float, options: PlateauConfig) -> bool:
    """Record the perplexity after `step` updates of a phase.

    It is on a plateau if an evaluation is at least `options.steps` old and

        best(step - options.steps) - best(step) < options.ppl

    where best(t) is the lowest perplexity of the phase's evaluations after at most t of its updates.

    Args:
        bests: evaluations (step in the phase, perplexity) that were the best when they came; this one is added if it is.
        step: updates of the phase.
        ppl: the perplexity.
        options: `ppl` and `steps` of the plateau.

    Returns:
        Whether the perplexity is on a plateau.
    """
    if not bests or ppl < bests[-1][1]:
        bests.append((step, ppl))
    before = [best for at, best in bests if at <= step - options.steps]
    return bool(before) and before[-1] - bests[-1][1] < options.ppl


@dataclass(frozen=True)
class Plan:
    """Length of a training, and the steps at which it is evaluated and saved.

    total_steps: the last step, over which schedules decay. With a budget of `tokens` it is the first step that reaches the
    budget. It stays as planned when a phase ends early on a plateau. Learning rates then go on as if the phase had not ended
    early, and training ends when the last phase has had its own steps.
    evaluate_every need not be a whole number: an evaluation is due at the first step at or after each multiple of it.
    """

    options: TrainConfig
    total_steps: int
    steps_per_epoch: int
    batches_per_epoch: int
    evaluate_every: float
    phases: tuple[PhaseConfig, ...]  # a length in epochs as `steps`

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an update whose segments all have `train.segment_length`."""
        options = self.options
        batch = options.batch_tokens or options.batch_size * options.segment_length
        return options.gradient_accumulation_steps * batch

    def batches_of(self, step: int) -> list[tuple[int, int]]:
        """Return (epoch, index) of the batches of update `step`, counted from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        first = place * self.options.gradient_accumulation_steps
        last = min(first + self.options.gradient_accumulation_steps, self.batches_per_epoch)
        return [(epoch, index) for index in range(first, last)]

    def is_finished(self, counters: Counters) -> bool:
        """Return whether training is over at `counters`, by the budget or with the last phase."""
        if self.phase_over(counters) and self.is_in_last_phase(counters):
            return True
        most = self.options.tokens
        return counters.step >= self.total_steps if most is None else counters.tokens >= most

    def evaluation_due(self, step: int) -> bool:
        """Return whether an evaluation follows `step` updates (the last one aside, which always is evaluated)."""
        return _count_multiples(step, self.evaluate_every) > _count_multiples(step - 1, self.evaluate_every)

    def save_due(self, step: int) -> bool:
        """Return whether a checkpoint follows `step` updates; without `save_every_steps`, at every evaluation."""
        every = self.options.save_every_steps
        return self.evaluation_due(step) if every is None else step % every == 0

    # phases: without any, nothing ever begins or ends

    def phase(self, counters: Counters) -> PhaseConfig | None:
        """Return the phase of the next update; None without phases."""
        return next((phase for phase in self.phases if phase.name == counters.phase), None)

    def phase_over(self, counters: Counters) -> bool:
        """Return whether the phase has had all its updates."""
        phase = self.phase(counters)
        return phase is not None and phase.steps is not None and counters.step - counters.phase_began >= phase.steps

    def is_in_last_phase(self, counters: Counters) -> bool:
        """Return whether no other phase follows."""
        return self.phase(counters) is self.phases[-1]

    def begin_phase(self, counters: Counters) -> None:
        """Begin the phase after the current one with the next update: the first one before the first update."""
        names = [None, *(phase.name for phase in self.phases)]
        if self.phases:
            counters.phase = names[names.index(counters.phase) + 1]
            counters.phase_began = counters.step
            counters.phase_bests = []

    def note_perplexity(self, counters: Counters, ppl: float) -> bool:
        """Record the validation perplexity `ppl`, and return whether the phase is on its plateau and ends here."""
        phase = self.phase(counters)
        if phase is None or phase.plateau is None:
            return False
        step = counters.step - counters.phase_began
        return note_best(counters.phase_bests, step, ppl, phase.plateau)


def _count_multiples(step: int, every: float) -> int:
    """Count the multiples of `every` in (0, step]; 3 * 0.1 counts as reached by 0.3 in spite of rounding."""
    return math.floor(step / every * (1 + 1e-12))


def make_plan(options: TrainConfig, eval_options: EvalConfig | EvaluationOptions, batches: Batches) -> Plan:
    """Make the plan of a training.

    If every phase states its steps or epochs, training ends with the last phase. Else it ends as `train.steps`, `epochs` or
    `tokens` says, or earlier: when the last phase has had its steps or is on its plateau.

    Args:
        options: section `train` of the configuration.
        eval_options: how often to evaluate, and by what metric.
        batches: their number and tokens.

    Returns:
        The plan.
    """
    per_epoch = batches.batches_per_epoch
    accumulation = options.gradient_accumulation_steps
    steps_per_epoch = math.ceil(per_epoch / accumulation)
    phases = tuple(
        replace(phase, steps=max(1, round(phase.epochs * steps_per_epoch)), epochs=None) if phase.epochs else phase
        for phase in options.phases
    )
    limits = [phase.steps for phase in phases if phase.steps is not None]
    if len(limits) == len(phases) > 0:
        total = sum(limits)
    elif options.steps is not None:
        total = options.steps
    elif options.tokens is not None:
        total = _count_steps(options.tokens, accumulation, batches)
    else:
        total = max(1, round((options.epochs or 1.0) * steps_per_epoch))
    evaluate_every = eval_options.every_steps or (eval_options.every_epochs or 1.0) * steps_per_epoch
    return Plan(options, total, steps_per_epoch, per_epoch, evaluate_every, phases)


def _count_steps(tokens: int, accumulation: int, batches: Batches) -> int:
    """Count the updates that read `tokens` tokens."""
    epochs, remainder = divmod(tokens, sum(batches.tokens_of_batches(0)))
    before = epochs * math.ceil(batches.batches_per_epoch / accumulation)
    counts = batches.tokens_of_batches(epochs)
    needed = 1 + sum(seen < remainder for seen in accumulate(counts)) if remainder else 0
    return before + math.ceil(needed / accumulation)
