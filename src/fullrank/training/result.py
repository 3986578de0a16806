"""What came out of a training, worked out from where it stands."""

from __future__ import annotations

from fullrank.training.plan import Plan
from fullrank.training.state import Counters
from fullrank.training.values import FitResult


def result(counters: Counters, plan: Plan, resumed_from: int | None) -> FitResult:
    """Where `counters` stand, as a result; a phase too short for its time to be taken has no milliseconds."""
    per_step = (
        counters.timed_seconds / counters.timed_steps
        if counters.timed_steps
        else counters.seconds / max(1, counters.step)
    )
    timed = [(phase.config.name, counters.timed_by_phase.get(phase.config.name)) for phase in plan.phases]
    by_phase = {name: 1000 * taken.seconds / taken.steps for name, taken in timed if taken is not None and taken.steps}
    return FitResult(
        steps=counters.step,
        epochs=counters.step / plan.steps_per_epoch,
        tokens=counters.tokens,
        best_step=counters.best_step,
        best_nll=counters.best_nll,
        best_metric=counters.best_metric,
        stopped_early=counters.stopped_early,
        ms_per_step=1000 * per_step,
        ms_per_step_by_phase=by_phase if timed else {"train": 1000 * per_step},
        tokens_per_second=counters.timed_tokens / counters.timed_seconds if counters.timed_seconds else 0.0,
        seconds=counters.seconds,
        peak_memory_mib=counters.peak_memory_mib,
        resumed_from=resumed_from,
    )
