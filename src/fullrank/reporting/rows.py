"""A row of a comparison: one setting over its seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.evaluation.statistics import Interval, paired_interval, welch_interval
from fullrank.reporting import figures, runs
from fullrank.reporting.figures import MISSING, Measure, Stat
from fullrank.reporting.runs import RunGroup, integer, number

MARK = "†"  # at a figure that is no next-token perplexity
Stats = Mapping[str, Stat]  # by split


@dataclass(frozen=True)
class Row(RunGroup):
    """One row of a comparison.

    text: number of the text and vocabulary it was measured on; figures compare only where it is equal.
    part: the part of a table that it belongs to (its backbone), within which rows are compared; empty where there are none.
    difference: to the first row where the two compare, a share, or points for scores; intervals: of it, over seeds (`against`);
    best: the splits in which no comparable row has a better mean.
    """

    text: int
    measure: Measure
    part: str = ""
    extra_parameters: int | None = None
    difference: Mapping[str, float] = dataclasses.field(default_factory=dict)
    intervals: Mapping[str, Interval] = dataclasses.field(default_factory=dict)
    best: tuple[str, ...] = ()

    @cached_property
    def figures(self) -> Stats:
        """By split, in the measure of the comparison."""
        return self.measure.over_runs(self.runs)

    @cached_property
    def last(self) -> Stats:
        """Figures of the last checkpoint instead of the best."""
        return self.measure.over_runs(self.runs, "last")

    @property
    def comparable_figures(self) -> Stats:
        return {} if self.marked else self.figures

    @cached_property
    def unigram(self) -> Mapping[str, float]:
        return self.measure.unigrams(self.runs[0])

    @property
    def undertrained(self) -> bool:
        """Some figure is above that of word frequencies alone."""
        figures, unigram = self.comparable_figures, self.unigram
        return any(figures[split].mean > unigram[split] for split in figures.keys() & unigram.keys())

    def against(self, base: Row, split: str) -> Interval | None:
        """95 % interval over seeds of the difference to another row, a share of its mean, or points for scores.

        Paired (Student) where both rows have the same seeds, else Welch's; None where a row has one seed.
        """
        before, after = base.by_seed(split), self.by_seed(split)
        ends = welch_interval([*before.values()], [*after.values()])
        if before.keys() == after.keys():
            ends = paired_interval([*before.values()], [after[seed] for seed in before]) or ends
        if ends is None or ends.low == ends.high:
            return None
        mean = base.figures[split].mean
        return Interval(*(self.measure.difference(mean + end, mean) or 0.0 for end in ends))

    def by_seed(self, split: str) -> dict[object, float]:
        """Final figures by seed; by folder where a run has recorded none."""
        values = {run.folder if run.seed is None else run.seed: self.measure.final(run, split) for run in self.runs}
        return {seed: value for seed, value in values.items() if value is not None}

    def stats(self, measure: Measure) -> Stats:
        """Another figure, by split."""
        return measure.over_runs(self.runs)

    def by_checkpoint(self, measure: Measure) -> dict[str, Stats]:
        """Another figure by checkpoint (`final`, `last`) and split, where there are any."""
        stats = {checkpoint: measure.over_runs(self.runs, checkpoint) for checkpoint in ("final", "last")}
        return {checkpoint: by_split for checkpoint, by_split in stats.items() if by_split}

    def over_runs(self, key: str) -> Stat | None:
        """A number of the results, over the runs."""
        return figures.over_runs(number(run.get(key)) for run in self.runs)

    @property
    def ms_per_step(self) -> dict[str, Stat]:
        """Milliseconds per training step, by phase."""
        steps = [run.ms_per_step for run in self.runs]
        stats = {phase: figures.over_runs(one.get(phase) for one in steps) for one in steps for phase in one}
        return {phase: stat for phase, stat in stats.items() if stat is not None}

    @property
    def parameters(self) -> int | None:
        return integer(self.get("parameters", "total"))

    @property
    def paper(self) -> Mapping[str, Any]:
        return self.runs[0].paper

    @property
    def label(self) -> str:
        """Label of the text, which says so if it is a slice; empty if not recorded."""
        return str(self.runs[0].corpus.get("label") or self.runs[0].corpus.get("name") or "")

    @property
    def is_slice(self) -> bool:
        """The text is a part of the published corpus."""
        return bool(self.runs[0].corpus.get("is_slice"))

    @property
    def protocol(self) -> str:
        """Evaluation of the row, in words."""
        return " and ".join(dict.fromkeys(str(run.get("protocol") or "not recorded") for run in self.runs))

    @property
    def shown_protocol(self) -> str:
        """`protocol` without the remark that the mark at the figures stands for."""
        return self.protocol.removesuffix(f"; {NOT_NEXT_TOKEN}")

    @property
    def next_token(self) -> bool:
        return self.measure.higher or all(run.next_token for run in self.runs)

    @property
    def marked(self) -> bool:
        """True if figures look like next-token perplexities and are none: they compare with no other row."""
        return not self.next_token and self.runs[0].task != runs.MASKED_MODELING

    def mark(self, text: str) -> str:
        """A figure as text, with the mark where it is no next-token perplexity."""
        return f"{text} {MARK}" if self.marked and text != MISSING else text
