"""When training ends and when it is evaluated and saved, in steps: `train.steps/epochs/tokens` and `eval.every_*` worked out.

A step is one update of the parameters. It takes `gradient_accumulation_steps` consecutive batches of one epoch (fewer
at the end of an epoch that does not divide), so the place of a step in the data is a function of its number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fullrank.config.run import TrainConfig
from fullrank.core.errors import InputError
from fullrank.training.phases import Phases, check_all_begin, plan_phases
from fullrank.training.state import Counters
from fullrank.training.values import Batches, Judging


@dataclass(frozen=True)
class Plan:
    """Length and rhythm of a training.

    `total_steps` is where it ends, and what schedules decay over. With a budget of `tokens` the first step that reaches it is
    the last one, and `total_steps` an estimate where the batches do not know how many tokens they have.
    It stays what was planned when a phase ends early on a plateau: learning rates go on as if it had not, and training ends
    when the last phase has had its own steps.
    `evaluate_every` may be a fraction of a step's grid: an evaluation is due at the first step at or after each multiple of it.
    """

    total_steps: int
    steps_per_epoch: int
    batches_per_epoch: int
    accumulation: int
    tokens: int | None
    evaluate_every: float
    save_every: int | None
    log_every: int
    phases: Phases

    def batches_of(self, step: int) -> list[tuple[int, int]]:
        """(epoch, index) of the batches that update `step`, counted from 1, is made of."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        first = place * self.accumulation
        last = min(first + self.accumulation, self.batches_per_epoch)
        return [(epoch, index) for index in range(first, last)]

    def done(self, step: int, tokens: int) -> bool:
        """Whether training is over after `step` updates on `tokens` tokens."""
        return step >= self.total_steps if self.tokens is None else tokens >= self.tokens

    def finished(self, counters: Counters) -> bool:
        """The same where `counters` stand, or whether the last of the phases has had its steps."""
        if self.done(counters.step, counters.tokens):
            return True
        return self.phases.over(counters) and self.phases.last(counters)

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after `step` updates (the last one aside, which always is)."""
        return _multiples(step, self.evaluate_every) > _multiples(step - 1, self.evaluate_every)

    def save_due(self, step: int) -> bool:
        """Whether to save after `step` updates; without a rhythm of its own, whenever there is an evaluation."""
        return self.evaluation_due(step) if self.save_every is None else step % self.save_every == 0

    def log_due(self, step: int) -> bool:
        """Whether to write a line about training after `step` updates (the last one aside, which always is)."""
        return step % self.log_every == 0


def _multiples(step: int, every: float) -> int:
    """How many multiples of `every` lie in (0, step]; 3 * 0.1 counts as reached by 0.3 in spite of rounding."""
    return math.floor(step / every * (1 + 1e-12))


def _steps_for(tokens: int, options: TrainConfig, batches: Batches) -> int:
    """After how many updates `tokens` tokens are reached: exactly, or as near as the batches can tell."""
    accumulation = options.gradient_accumulation_steps
    per_epoch: int | None = getattr(batches, "tokens_per_epoch", None)
    epochs, rest = divmod(tokens, per_epoch) if per_epoch else (0, tokens)
    before = epochs * math.ceil(batches.batches_per_epoch / accumulation)
    of_batches: Callable[[int], Sequence[int]] | None = getattr(batches, "tokens_of_batches", None)
    if per_epoch and of_batches is not None:
        needed = 1 + sum(seen < rest for seen in accumulate(of_batches(epochs))) if rest else 0
        return before + math.ceil(needed / accumulation)
    usual: float = options.batch_tokens or options.batch_size * options.segment_length
    usual = per_epoch / batches.batches_per_epoch if per_epoch else usual
    return before + math.ceil(rest / (getattr(batches, "tokens_per_batch", usual) * accumulation))


def make_plan(options: TrainConfig, eval_options: Judging, batches: Batches) -> Plan:
    """The plan of a training; InputError if there is nothing to train on, or a phase that would never begin.

    It ends with its last phase where every phase says after how many steps or epochs it ends, else with
    `train.steps/epochs/tokens`, or earlier with a last phase that has had its steps or is on its plateau.
    A budget in tokens counts steps exactly where the batches know the tokens of each of them (`values.Batches`), else in whole
    epochs and batches of the usual size as far as they know these, or, if they know nothing, in full batches.
    """
    per_epoch = batches.batches_per_epoch
    if per_epoch < 1:
        size = (
            f"train.batch_size {options.batch_size} streams of train.segment_length {options.segment_length} tokens; make one "
            "of them smaller"
            if options.batch_tokens is None
            else f"train.batch_tokens {options.batch_tokens}; make it smaller"
        )
        raise InputError(f"the training text is shorter than one batch: {size} or give more text")
    accumulation = options.gradient_accumulation_steps
    steps_per_epoch = math.ceil(per_epoch / accumulation)
    phases = plan_phases(options, steps_per_epoch)
    if phases.total is not None:
        total = phases.total
    elif options.steps is not None:
        total = options.steps
    elif options.tokens is not None:
        total = _steps_for(options.tokens, options, batches)
    else:
        total = max(1, round((options.epochs or 1.0) * steps_per_epoch))
    if phases.total is None:
        check_all_begin(phases, total, options)
    if eval_options.every_steps is not None:
        evaluate_every: float = eval_options.every_steps
    else:
        evaluate_every = (eval_options.every_epochs or 1.0) * steps_per_epoch
    return Plan(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        batches_per_epoch=per_epoch,
        accumulation=accumulation,
        tokens=options.tokens,
        evaluate_every=evaluate_every,
        save_every=options.save_every_steps,
        log_every=options.log_every_steps,
        phases=phases,
    )
