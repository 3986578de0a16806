"""The plan of a training: its length, when it is evaluated and saved, and its phases (`train.phases`).

A step is one update of the parameters. It takes `gradient_accumulation_steps` consecutive batches of one epoch (fewer
at the end of an epoch that does not divide). A phase ends at its last step, or at an evaluation that finds it on a plateau,
and the next one has begun before a checkpoint of that step is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from fullrank.config.run import EvalConfig
from fullrank.config.training import PhaseConfig, PlateauConfig, TrainConfig
from fullrank.core.errors import InputError
from fullrank.training.state import Counters
from fullrank.training.values import Batches, EvaluationOptions


@dataclass(frozen=True)
class Phase:
    """A planned phase; `steps`: it ends after so many updates at the latest, None without such a limit."""

    config: PhaseConfig
    steps: int | None


def update_plateau(
    bests: list[tuple[int, float]], step: int, ppl: float, options: PlateauConfig
) -> tuple[list[tuple[int, float]], bool]:
    """The evaluations to remember, and True if the perplexity is on a plateau.

    With best(t) the lowest perplexity of the phase's evaluations after at most t of its updates, it is after `step` updates if

        best(step - options.steps) - best(step) < options.ppl

    and some evaluation is at least `options.steps` old.  `bests`: the earlier evaluations (step in the phase, perplexity) that
    were the best when they came; those that best() cannot need again are left out of the result.
    """
    if not bests or ppl < bests[-1][1]:
        bests = [*bests, (step, ppl)]
    before = [best for at, best in bests if at <= step - options.steps]
    on_plateau = bool(before) and before[-1] - bests[-1][1] < options.ppl
    return bests[max(0, len(before) - 1) :], on_plateau


@dataclass(frozen=True)
class Plan:
    """Length and rhythm of a training.

    `total_steps`: the end, and the length that schedules decay over. With a budget of `tokens` the first step that reaches it
    is the last one, and `total_steps` an estimate where the batches do not know how many tokens they have.
    It stays as planned when a phase ends early on a plateau: learning rates go on as if it had not, and training ends
    when the last phase has had its own steps.
    `evaluate_every` need not be a whole number: an evaluation is due at the first step at or after each multiple of it.
    """

    options: TrainConfig
    total_steps: int
    steps_per_epoch: int
    batches_per_epoch: int
    evaluate_every: float
    phases: tuple[Phase, ...]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an update whose segments all have `train.segment_length`."""
        options = self.options
        batch = options.batch_tokens or options.batch_size * options.segment_length
        return options.gradient_accumulation_steps * batch

    def batches_of(self, step: int) -> list[tuple[int, int]]:
        """(epoch, index) of the batches of update `step`, counted from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        first = place * self.options.gradient_accumulation_steps
        last = min(first + self.options.gradient_accumulation_steps, self.batches_per_epoch)
        return [(epoch, index) for index in range(first, last)]

    def done(self, step: int, tokens: int) -> bool:
        """True if training is over after `step` updates on `tokens` tokens."""
        return step >= self.total_steps if self.options.tokens is None else tokens >= self.options.tokens

    def finished(self, counters: Counters) -> bool:
        """True if training is over at `counters`, by the budget or with the last phase."""
        if self.phase_over(counters) and self.is_in_last_phase(counters):
            return True
        return self.done(counters.step, counters.tokens)

    def evaluation_due(self, step: int) -> bool:
        """True if an evaluation follows `step` updates (the last one aside, which always is evaluated)."""
        return _count_multiples(step, self.evaluate_every) > _count_multiples(step - 1, self.evaluate_every)

    def save_due(self, step: int) -> bool:
        """True if a checkpoint follows `step` updates; without a rhythm of its own, at every evaluation."""
        every = self.options.save_every_steps
        return self.evaluation_due(step) if every is None else step % every == 0

    # phases: without any, nothing ever begins or ends

    def phase(self, counters: Counters) -> Phase | None:
        """The phase of the next update; None without phases."""
        return next((phase for phase in self.phases if phase.config.name == counters.phase), None)

    def phase_over(self, counters: Counters) -> bool:
        """True if the phase has had all its updates."""
        phase = self.phase(counters)
        return phase is not None and phase.steps is not None and counters.step - counters.phase_began >= phase.steps

    def is_in_last_phase(self, counters: Counters) -> bool:
        """True if no other phase follows."""
        return self.phase(counters) is self.phases[-1]

    def begin_phase(self, counters: Counters) -> None:
        """Begin the phase after the current one with the next update: the first one before the first update."""
        names = [None, *(phase.config.name for phase in self.phases)]
        if self.phases:
            counters.phase = names[names.index(counters.phase) + 1]
            counters.phase_began, counters.phase_bests = counters.step, []

    def on_plateau(self, counters: Counters, ppl: float) -> bool:
        """Record the validation perplexity `ppl`; True if the phase is on its plateau and ends here."""
        phase = self.phase(counters)
        if phase is None or phase.config.plateau is None:
            return False
        step = counters.step - counters.phase_began
        counters.phase_bests, on_plateau = update_plateau(counters.phase_bests, step, ppl, phase.config.plateau)
        return on_plateau


def _count_multiples(step: int, every: float) -> int:
    """The number of multiples of `every` in (0, step]; 3 * 0.1 counts as reached by 0.3 in spite of rounding."""
    return math.floor(step / every * (1 + 1e-12))


def make_plan(options: TrainConfig, eval_options: EvalConfig | EvaluationOptions, batches: Batches[object]) -> Plan:
    """The plan of a training; InputError if there is nothing to train on.

    It ends with its last phase where every phase says after how many steps or epochs it ends, else with
    `train.steps/epochs/tokens`, or earlier with a last phase that has had its steps or is on its plateau.
    A budget in tokens counts steps exactly where the batches know the tokens of each of them, else with their mean.
    """
    per_epoch = batches.batches_per_epoch
    if per_epoch < 1:
        size = f"train.batch_tokens {options.batch_tokens}; make it smaller"
        if options.batch_tokens is None:
            size = (
                f"train.batch_size {options.batch_size} streams of train.segment_length {options.segment_length} tokens; make "
                "one of them smaller"
            )
        raise InputError(f"the training text is shorter than one batch: {size} or give more text")
    accumulation = options.gradient_accumulation_steps
    steps_per_epoch = math.ceil(per_epoch / accumulation)
    phases = tuple(
        Phase(config, config.steps if config.epochs is None else max(1, round(config.epochs * steps_per_epoch)))
        for config in options.phases
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
    return Plan(
        options=options,
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        batches_per_epoch=per_epoch,
        evaluate_every=eval_options.every_steps or (eval_options.every_epochs or 1.0) * steps_per_epoch,
        phases=phases,
    )


def _count_steps(tokens: int, accumulation: int, batches: Batches[object]) -> int:
    """The number of updates that read `tokens` tokens: exact, or by the mean tokens of a batch."""
    per_epoch = batches.tokens_per_epoch
    epochs, rest = divmod(tokens, per_epoch)
    before = epochs * math.ceil(batches.batches_per_epoch / accumulation)
    counts = batches.tokens_of_batches(epochs)
    if counts is None:
        return before + math.ceil(rest / (per_epoch / batches.batches_per_epoch * accumulation))
    needed = 1 + sum(seen < rest for seen in accumulate(counts)) if rest else 0
    return before + math.ceil(needed / accumulation)
