"""Runs of one task compared as plain data: a row for each setting, over its seeds. Page, terminal and JSON show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting.format import MISSING, Stat, over_runs
from fullrank.reporting.measure import (
    ACCURACY,
    BLEU,
    LAST_POSITION,
    MEASURES,
    PERPLEXITY,
    SCORES,
    TOKENISED_BLEU,
    WITHOUT_SOS,
    Measure,
    choose,
)
from fullrank.reporting.runs import (
    LANGUAGE_MODELING,
    MASKED_MODELING,
    SPLITS,
    TRANSLATION,
    RunRecord,
    number,
    row_names,
    seeds_of_rows,
    texts_of_rows,
)
from fullrank.reporting.translations import Differences, all_differences

MARK = "†"  # at a figure that is no next-token perplexity
Stats = Mapping[str, Stat]  # by split


@dataclass(frozen=True)
class Row:
    """One row: the finished runs that differ only in their seed.

    text: number of the text and vocabulary it was measured on; figures compare only where it is equal.
    figures: by split, in the measure of the comparison; `last`: the same of the last checkpoint instead of the best.
    without_sos, last_position: by checkpoint (`final`, `last`) and split, where there are any.
    difference: to the first row where the two compare, a share, or points for scores; best: the splits in which no comparable
    row has a better mean.
    """

    name: str
    runs: tuple[RunRecord, ...]
    text: int
    figures: Stats
    perplexity: Stats
    scores: Mapping[str, Stats]
    last: Stats
    without_sos: Mapping[str, Stats]
    last_position: Mapping[str, Stats]
    unigram: Mapping[str, float]
    next_token: bool
    extra_parameters: int | None = None
    difference: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best: tuple[str, ...] = ()

    @property
    def parameters(self) -> int | None:
        return self.runs[0].parameters

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
        """How the row was evaluated, in words."""
        return " and ".join(dict.fromkeys(str(run.of("protocol") or "not recorded") for run in self.runs))

    @property
    def shown_protocol(self) -> str:
        """`protocol` without the remark that the mark at the figures stands for."""
        return self.protocol.removesuffix(f"; {NOT_NEXT_TOKEN}")

    @property
    def marked(self) -> bool:
        """Its figures look like next-token perplexities and are none: they compare with no other row."""
        return not self.next_token and self.runs[0].task != MASKED_MODELING

    @property
    def comparable_figures(self) -> Stats:
        return {} if self.marked else self.figures

    @property
    def signatures(self) -> dict[str, tuple[str, ...]]:
        """sacreBLEU's signatures of its scores, by the key of the measure."""
        found = {}
        for score in SCORES:
            ways = [run.of("final", split, f"{score.key}_signature") for run in self.runs for split in SPLITS]
            found[score.key] = tuple(dict.fromkeys(str(way) for way in ways if way))
        return {key: ways for key, ways in found.items() if ways}

    @property
    def ms_per_step(self) -> dict[str, Stat]:
        """Milliseconds per training step, by phase."""
        steps = [run.ms_per_step for run in self.runs]
        stats = {phase: over_runs(one.get(phase) for one in steps) for one in steps for phase in one}
        return {phase: stat for phase, stat in stats.items() if stat is not None}

    def over_runs(self, key: str) -> Stat | None:
        """A number of the results, over the runs."""
        return over_runs(number(run.of(key)) for run in self.runs)

    def mark(self, text: str) -> str:
        """A figure as text, with the mark where it is no next-token perplexity."""
        return f"{text} {MARK}" if self.marked and text != MISSING else text


@dataclass(frozen=True)
class Comparison:
    """Finished rows in the order given (the first is the one that others are compared with), and unfinished runs.

    `left_out` are runs of another task than the first: translations, next tokens and masked ones have no common figure.
    """

    rows: tuple[Row, ...]
    unfinished: tuple[RunRecord, ...]
    measure: Measure
    left_out: tuple[RunRecord, ...]

    @property
    def runs(self) -> list[RunRecord]:
        """Every finished run."""
        return [run for row in self.rows for run in row.runs]

    @property
    def task(self) -> str:
        runs = (*self.runs, *self.unfinished)
        return runs[0].task if runs else LANGUAGE_MODELING

    @property
    def translates(self) -> bool:
        return self.task == TRANSLATION

    @property
    def groups(self) -> list[list[Row]]:
        """Rows that were measured on the same text, for each text."""
        groups: dict[int, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.text, []).append(row)
        return list(groups.values())

    @property
    def comparable(self) -> bool:
        """Every row was measured on the same text with the same vocabulary."""
        return len(self.groups) <= 1

    @property
    def several_seeds(self) -> bool:
        return any(len(row.runs) > 1 for row in self.rows)

    @property
    def split(self) -> str:
        """The split by which rows are judged: `test` if any row has it, else `valid`."""
        return judged_split(self.rows)

    @property
    def protocols(self) -> tuple[str, ...]:
        """Protocols of evaluation, each once, in the order of the rows."""
        return tuple(dict.fromkeys(row.shown_protocol for row in self.rows))

    def protocol_mark(self, row: Row) -> str:
        """`[1]`, `[2]` .. by the row's protocol; empty where all rows have the same."""
        return f"[{self.protocols.index(row.shown_protocol) + 1}]" if len(self.protocols) > 1 else ""

    @property
    def paper_measure(self) -> Measure | None:
        """The measure of the paper's figures beside ours: the comparison's, or tokenised BLEU beside BLEU."""
        kinds = (BLEU, TOKENISED_BLEU) if self.measure is BLEU else (self.measure,)
        return next((measure for measure in kinds if self.states(measure)), None)

    def states(self, measure: Measure) -> bool:
        """A row has figures of a paper in this measure."""
        return any(measure.of_paper(row.paper, split) is not None for row in self.rows for split in SPLITS)

    @property
    def paper_is_last(self) -> bool:
        """The paper's figures are of the last checkpoint, as a recipe states with `checkpoint: last`."""
        return any(row.paper.get("checkpoint") == "last" for row in self.rows)

    @property
    def shows_last(self) -> bool:
        """The last checkpoint has a column: it is the paper's, and not everywhere our best."""
        return self.paper_is_last and any(row.last and row.last != row.figures for row in self.rows)

    @property
    def signatures(self) -> dict[str, tuple[str, ...]]:
        """sacreBLEU's signatures by the key of the measure, each once."""
        keys = dict.fromkeys(key for row in self.rows for key in row.signatures)
        return {
            key: tuple(dict.fromkeys(way for row in self.rows for way in row.signatures.get(key, ()))) for key in keys
        }

    @cached_property
    def differences(self) -> tuple[Differences, ...]:
        """Rows against their baselines on resampled test sets, an entry for each split; empty without translations."""
        if self.measure is not BLEU:
            return ()
        return all_differences([(row.name, row.runs, row.text) for row in self.rows])


def judged_split(rows: Sequence[Row]) -> str:
    """`test` if any row has it, else `valid`."""
    return "test" if any("test" in row.figures for row in rows) else "valid"


def best_row(rows: Sequence[Row], measure: Measure, split: str) -> Row | None:
    """The row with the best mean; None if no row compares."""
    measured = [row for row in rows if split in row.comparable_figures]
    best = measure.best([row.figures[split].mean for row in measured]) if measured else None
    return next((row for row in measured if row.figures[split].mean == best), None)


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Comparison of runs. The first run says if translation, language or masked language models are compared."""
    same_task = [record for record in records if record.task == records[0].task]
    left_out = tuple(record for record in records if record.task != records[0].task)
    finished = [record for record in same_task if record.result is not None]
    measure = choose(finished or same_task)
    groups = seeds_of_rows(finished)
    rows = [_row(*parts, measure) for parts in zip(row_names(groups), groups, texts_of_rows(groups), strict=True)]
    return Comparison(
        tuple(_with_neighbours(row, rows, measure) for row in rows),
        tuple(record for record in same_task if record.result is None),
        measure,
        left_out,
    )


def _row(name: str, runs: tuple[RunRecord, ...], text: int, measure: Measure) -> Row:
    return Row(
        name=name,
        runs=runs,
        text=text,
        figures=stats_of(runs, measure),
        perplexity=stats_of(runs, PERPLEXITY),
        scores={score.key: stats for score in (*SCORES, ACCURACY) if (stats := stats_of(runs, score))},
        last=stats_of(runs, measure, "last"),
        without_sos=_by_checkpoint(runs, WITHOUT_SOS),
        last_position=_by_checkpoint(runs, LAST_POSITION),
        unigram=unigram_of(runs[0], measure),
        next_token=measure.higher or all(run.next_token for run in runs),
    )


def stats_of(runs: Sequence[RunRecord], measure: Measure, checkpoint: str = "final") -> dict[str, Stat]:
    """A figure over the runs of a row, by split."""
    stats = {split: over_runs(measure.final(run, split, checkpoint) for run in runs) for split in SPLITS}
    return {split: stat for split, stat in stats.items() if stat is not None}


def _by_checkpoint(runs: Sequence[RunRecord], measure: Measure) -> dict[str, Stats]:
    return {name: stats for name in ("final", "last") if (stats := stats_of(runs, measure, name))}


def unigram_of(run: RunRecord, measure: Measure) -> dict[str, float]:
    """Figures of word frequencies alone, by split."""
    return {split: value for split in SPLITS if (value := measure.unigram(run, split)) is not None}


def _with_neighbours(row: Row, rows: Sequence[Row], measure: Measure) -> Row:
    """The row with what follows from the others: extra parameters, differences to the first, where it is best."""
    first = rows[0]
    known = row.parameters is not None and first.parameters is not None
    difference: dict[str, float] = {}
    best = []
    for split, stat in row.comparable_figures.items():
        base = first.comparable_figures.get(split)
        if row is not first and base is not None and row.text == first.text:
            change = measure.difference(stat.mean, base.mean)
            difference |= {} if change is None else {split: change}
        rivals = [other.comparable_figures.get(split) for other in rows if other.text == row.text]
        means = [rival.mean for rival in rivals if rival is not None]
        if len(means) > 1 and measure.show(stat.mean) == measure.show(measure.best(means)):
            best.append(split)
    return dataclasses.replace(
        row,
        extra_parameters=(row.parameters or 0) - (first.parameters or 0) if known else None,
        difference=difference,
        best=tuple(best),
    )


def as_json(compared: Comparison) -> dict[str, Any]:
    """The comparison as plain objects for one JSON document; numbers in full precision.

    `measure` of a row is the key under which the compared figures stand (beside `perplexity`), and `difference_in` says if
    `difference` is a share or points. `significance` has an entry for each split of which translations were resampled.
    `other_splits` of a row has its scores on further test sets.
    """
    return {
        "comparable": compared.comparable,
        "rows": [_row_as_json(row, compared.measure) for row in compared.rows],
        "unfinished": [_run_as_json(run) for run in compared.unfinished],
        "left_out": [{"folder": str(run.folder), "name": run.name, "task": run.task} for run in compared.left_out],
        "significance": [dataclasses.asdict(tested) for tested in compared.differences],
    }


def _run_as_json(run: RunRecord) -> dict[str, Any]:
    return {"folder": str(run.folder), "name": run.name, "seed": run.seed, "problems": list(run.problems)}


def _stat(stat: Stat | None) -> dict[str, Any] | None:
    return None if stat is None else dataclasses.asdict(stat)


def _by_split(stats: Stats) -> dict[str, Any]:
    return {split: _stat(stat) for split, stat in stats.items()}


def _row_as_json(row: Row, measure: Measure) -> dict[str, Any]:
    others = [one for one in MEASURES if one is not PERPLEXITY and stats_of(row.runs, one)]
    figures: dict[str, Any] = {}
    for one in others:
        figures[one.key] = _by_split(stats_of(row.runs, one))
        if one.in_bits:
            figures[f"unigram_{one.key}"] = unigram_of(row.runs[0], one)
        if one.key in row.signatures:
            figures[f"{one.key}_signature"] = list(row.signatures[one.key])
    other_splits: dict[str, Any] = {}
    for split in dict.fromkeys(split for run in row.runs for split in run.other_splits):
        stats = {one.key: over_runs(one.final(run, split) for run in row.runs) for one in (PERPLEXITY, *SCORES)}
        other_splits[split] = {key: _stat(stat) for key, stat in stats.items() if stat is not None}
    return {
        "name": row.name,
        "task": row.runs[0].task,
        "corpus": row.label,
        "is_slice": row.is_slice,
        "text": row.text,
        "protocol": row.protocol,
        "parameters": row.parameters,
        "extra_parameters": row.extra_parameters,
        "measure": measure.key,
        "perplexity": _by_split(row.perplexity),
        **figures,
        "last": {measure.key: _by_split(row.last)} if row.last else None,
        WITHOUT_SOS.key: {name: _by_split(stats) for name, stats in row.without_sos.items()} or None,
        "next_token": row.next_token,
        "remark": None if row.next_token else NOT_NEXT_TOKEN if row.marked else MASKED_TOKEN,
        "last_position": {name: _by_split(stats) for name, stats in row.last_position.items()} or None,
        "difference": dict(row.difference),
        "difference_in": "points" if measure.higher else "share",
        "best": list(row.best),
        "other_splits": other_splits,
        "paper": dict(row.paper) or None,
        "unigram_perplexity": unigram_of(row.runs[0], PERPLEXITY),
        "tokens_per_second": _stat(row.over_runs("tokens_per_second")),
        "ms_per_step": _by_split(row.ms_per_step),
        "wall_seconds": _stat(row.over_runs("wall_seconds")),
        "peak_memory_mib": _stat(row.over_runs("peak_memory_mib")),
        "runs": [
            _run_as_json(run)
            | {one.key: {split: one.final(run, split) for split in SPLITS} for one in (PERPLEXITY, *others)}
            for run in row.runs
        ],
    }
