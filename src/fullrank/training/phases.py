"""`train.phases`: which phase a training is in, when it ends and what follows.

Where a training stands in its phases are plain values in the `Counters` (`phase`, `phase_began`, `phase_bests`), so a
checkpoint holds them. A phase ends at its last step, or at an evaluation that finds it on a plateau, and the next one has
begun before a checkpoint of that step is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from fullrank.config.run import PhaseConfig, PlateauConfig, TrainConfig
from fullrank.core.errors import InputError
from fullrank.training.state import Counters


@dataclass(frozen=True)
class Phase:
    """A phase as planned; `steps`: after so many updates it ends at the latest, None if it does not say."""

    config: PhaseConfig
    steps: int | None

    @property
    def least(self) -> int:
        """How many updates it takes at least: a plateau needs two evaluations that lie `plateau.steps` apart."""
        bounds = [] if self.steps is None else [self.steps]
        if self.config.plateau is not None:
            bounds.append(self.config.plateau.steps + 1)
        return min(bounds, default=0)

    @property
    def bound(self) -> str:
        """The key and value behind `least`."""
        key, config = f"train.phases.{self.config.name}", self.config
        if config.plateau is not None and self.least != self.steps:
            return f"{key}.plateau.steps {config.plateau.steps}"
        return f"{key}.steps {config.steps}" if config.steps is not None else f"{key}.epochs {config.epochs:g}"


@dataclass(frozen=True)
class Phases:
    """The phases of a training in their order; without any, nothing ever begins or ends."""

    planned: tuple[Phase, ...] = ()

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.planned)

    @property
    def total(self) -> int | None:
        """Updates of all phases together; None if one does not say, or there are none."""
        known = [phase.steps for phase in self.planned if phase.steps is not None]
        return sum(known) if known and len(known) == len(self.planned) else None

    def begin(self, counters: Counters) -> None:
        """Nothing is trained yet: the first phase begins."""
        if self.planned:
            counters.phase = self.planned[0].config.name

    def current(self, counters: Counters) -> Phase | None:
        """The phase of the next update; None without phases."""
        return next((phase for phase in self.planned if phase.config.name == counters.phase), None)

    def check(self, counters: Counters, path: Path) -> None:
        """Raises InputError unless the checkpoint `path`, which holds `counters`, was made in one of these phases."""
        fits = self.current(counters) is not None if self.planned else counters.phase is None
        if not fits:
            here = ", ".join(phase.config.name for phase in self.planned) or "none"
            made = "without phases" if counters.phase is None else f"in phase '{counters.phase}'"
            raise InputError(
                f"{path} was made {made}, train.phases now has {here}; set it back or start again with --out"
            )

    def over(self, counters: Counters) -> bool:
        """Whether the phase has had all its updates."""
        phase = self.current(counters)
        return phase is not None and phase.steps is not None and counters.step - counters.phase_began >= phase.steps

    def last(self, counters: Counters) -> bool:
        """Whether no other phase follows."""
        return self.current(counters) is self.planned[-1]

    def next(self, counters: Counters) -> None:
        """The phase after the current one begins with the next update; the last one stays."""
        for one, following in pairwise(self.planned):
            if one.config.name == counters.phase:
                counters.phase, counters.phase_began, counters.phase_bests = following.config.name, counters.step, []
                return

    def observe(self, counters: Counters, ppl: float) -> bool:
        """An evaluation gave the validation perplexity `ppl`; whether the phase is on its plateau and ends here."""
        phase = self.current(counters)
        if phase is None or phase.config.plateau is None:
            return False
        step = counters.step - counters.phase_began
        counters.phase_bests, flat = look_back(counters.phase_bests, step, ppl, phase.config.plateau)
        return flat


def look_back(
    bests: list[tuple[int, float]], step: int, ppl: float, plateau: PlateauConfig
) -> tuple[list[tuple[int, float]], bool]:
    """The evaluations to remember, and whether the perplexity is on a plateau.

    With best(t) the lowest perplexity of the phase's evaluations after at most t of its updates, it is after `step` updates if

        best(step - plateau.steps) - best(step) < plateau.ppl

    and some evaluation is at least `plateau.steps` old.  `bests`: the earlier evaluations (step in the phase, perplexity) that
    were the best when they came; those that best() cannot need again are left out of what is returned.
    """
    if not bests or ppl < bests[-1][1]:
        bests = [*bests, (step, ppl)]
    old = [best for at, best in bests if at <= step - plateau.steps]
    return bests[max(0, len(old) - 1) :], bool(old) and old[-1] - bests[-1][1] < plateau.ppl


def plan_phases(options: TrainConfig, steps_per_epoch: int) -> Phases:
    """The phases of `options`, `epochs` of each turned into steps of this data, one at least."""

    def steps(phase: PhaseConfig) -> int | None:
        return phase.steps if phase.epochs is None else max(1, round(phase.epochs * steps_per_epoch))

    return Phases(tuple(Phase(config, steps(config)) for config in options.phases))


def check_all_begin(phases: Phases, total_steps: int, options: TrainConfig) -> None:
    """Raises InputError if the training of `total_steps` updates is certainly over before its last phase begins."""
    before = accumulate(phase.least for phase in phases)
    for steps, (index, (_, phase)) in zip(before, enumerate(pairwise(phases), start=1), strict=False):
        if steps >= total_steps:
            name, value = next(
                (key, value) for key in ("steps", "epochs", "tokens") if (value := getattr(options, key)) is not None
            )
            taken = ", ".join(earlier.bound for earlier in phases.planned[:index])
            raise InputError(
                f"train.phases.{phase.config.name} would never begin: the phases before it take at least {steps} steps "
                f"({taken}), the whole training has {total_steps} (train.{name} {value}); shorten them or raise train.{name}"
            )
