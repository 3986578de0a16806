"""Runs of one task compared as plain data: a row for each setting, over its seeds. Page, terminal and JSON show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.evaluation.statistics import Interval
from fullrank.reporting import figures, runs
from fullrank.reporting.figures import BLEU, PERPLEXITY, SCORES, TOKENISED_BLEU, Measure, Stat
from fullrank.reporting.resampled import Differences, differences
from fullrank.reporting.rows import Row
from fullrank.reporting.runs import SPLITS, RunRecord


def signatures(runs: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    """sacreBLEU's signatures of the scores of runs, each once, by the key of the measure."""
    signed = {
        score.key: [run.get("final", split, f"{score.key}_signature") for run in runs for split in SPLITS]
        for score in SCORES
    }
    return {key: tuple(dict.fromkeys(str(way) for way in ways if way)) for key, ways in signed.items() if any(ways)}


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
    def notes(self) -> dict[str, str]:
        """Notes of the recipes on their figures, by recipe."""
        return runs.recipe_notes([*self.runs, *self.unfinished])

    @property
    def task(self) -> str:
        return (*self.runs, *self.unfinished)[0].task

    @property
    def groups(self) -> list[list[Row]]:
        """Rows that were measured on the same text and belong to the same part of a table, for each text and part."""
        keys = dict.fromkeys((row.text, row.part) for row in self.rows)
        return [[row for row in self.rows if (row.text, row.part) == key] for key in keys]

    @property
    def comparable(self) -> bool:
        """Every row was measured on the same text with the same vocabulary."""
        return len({row.text for row in self.rows}) <= 1

    def is_first(self, row: Row) -> bool:
        """The row that those of its part are compared with."""
        return row is next(other for other in self.rows if other.part == row.part)

    @property
    def several_seeds(self) -> bool:
        return any(len(row.runs) > 1 for row in self.rows)

    @property
    def split(self) -> str:
        """The split by which rows are judged."""
        return compared_split(self.rows)

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
        return any(measure.paper_figure(row.paper, split) is not None for row in self.rows for split in SPLITS)

    @property
    def paper_is_last(self) -> bool:
        """The paper's figures are of the last checkpoint, as a recipe states with `checkpoint: last`."""
        return any(row.paper.get("checkpoint") == "last" for row in self.rows)

    @property
    def shows_last(self) -> bool:
        """The last checkpoint has a column: it is the paper's, and not everywhere our best."""
        return self.paper_is_last and any(row.last and row.last != row.figures for row in self.rows)

    @cached_property
    def differences(self) -> tuple[Differences, ...]:
        """Rows against their baselines on resampled test sets; empty without translations.

        Of the test split (else of validation, where translations of it were kept), then of further test sets.
        """
        if self.measure is not BLEU:
            return ()
        either = (differences(self.rows, split) for split in reversed(SPLITS))
        others = dict.fromkeys(split for run in self.runs for split in run.references if split not in SPLITS)
        tested = (next(filter(None, either), None), *(differences(self.rows, split) for split in others))
        return tuple(filter(None, tested))

    def as_json(self) -> dict[str, Any]:
        """The comparison by its keys in a JSON document; numbers in full precision.

        `measure` of a row is the key under which the compared figures stand (beside `perplexity`), and `difference_in` says
        if `difference` and its 95 % interval over seeds are shares or points. `significance` has an entry for each split of
        which translations were resampled. `other_splits` of a row has its scores on further test sets.
        """
        return {
            "comparable": self.comparable,
            "rows": [_row_as_json(row) for row in self.rows],
            "unfinished": [_run_as_json(run) for run in self.unfinished],
            "left_out": [{"folder": str(run.folder), "name": run.name, "task": run.task} for run in self.left_out],
            "significance": self.differences,
            "notes": self.notes,
        }


def compared_split(rows: Sequence[Row]) -> str:
    """`test` if any row has it, else `valid`."""
    return "test" if any("test" in row.figures for row in rows) else "valid"


def best_row(rows: Sequence[Row], measure: Measure, split: str) -> Row | None:
    """The row with the best mean; None if no row compares, or one is undertrained."""
    if any(row.undertrained for row in rows):
        return None
    measured = [row for row in rows if split in row.comparable_figures]
    best = measure.best([row.figures[split].mean for row in measured]) if measured else None
    return next((row for row in measured if row.figures[split].mean == best), None)


def compare(records: Sequence[RunRecord], table: str | None = None) -> Comparison:
    """Comparison of runs. The first run says if translation, language or masked language models are compared.

    table: the table of several recipes that they belong to; rows are compared within each recipe.
    """
    same_task = [record for record in records if record.task == records[0].task]
    finished = [record for record in same_task if record.result is not None]
    measure, groups = figures.choose(finished or same_task), runs.group_by_seed(finished)
    parts = [_part(group[0], table) if table is not None else "" for group in groups]
    names = runs.row_names(groups)
    if table is not None:
        names = runs.numbered([f"{part} {group[0].origin('row')}" for part, group in zip(parts, groups, strict=True)])
    rows = [
        Row(name, slot, group, text, measure, part)
        for slot, (name, group, text, part) in enumerate(
            zip(names, groups, runs.texts_of_rows(groups, in_bits=measure.in_bits), parts, strict=True)
        )
    ]
    return Comparison(
        tuple(_with_neighbours(row, rows, measure) for row in rows),
        tuple(record for record in same_task if record.result is None),
        measure,
        tuple(record for record in records if record.task != records[0].task),
    )


def _part(run: RunRecord, table: str) -> str:
    """`vanilla` of mixhead/table1-vanilla; `table4` of mixhead/table4 itself."""
    recipe = run.origin("recipe")
    return recipe.removeprefix(f"{table}-") if recipe.startswith(f"{table}-") else Path(recipe).stem


def _with_neighbours(row: Row, rows: Sequence[Row], measure: Measure) -> Row:
    """The row with what follows from the others: extra parameters, differences to the first, where it is best."""
    rows = [other for other in rows if other.part == row.part]
    first, best = rows[0], []
    difference, intervals = dict[str, float](), dict[str, Interval]()
    for split, stat in row.comparable_figures.items():
        base = first.comparable_figures.get(split)
        if row is not first and base is not None and row.text == first.text:
            change = measure.difference(stat.mean, base.mean)
            difference |= {} if change is None else {split: change}
            intervals |= {} if (ends := row.against(first, split)) is None else {split: ends}
        rivals = [other.comparable_figures.get(split) for other in rows if other.text == row.text]
        means = [rival.mean for rival in rivals if rival is not None]
        trained = not any(other.undertrained for other in rows if other.text == row.text)
        if trained and len(means) > 1 and measure.show(stat.mean) == measure.show(measure.best(means)):
            best.append(split)
    known = row.parameters is not None and first.parameters is not None
    extra = (row.parameters or 0) - (first.parameters or 0) if known else None
    return dataclasses.replace(
        row, extra_parameters=extra, difference=difference, intervals=intervals, best=tuple(best)
    )


# -- JSON -------------------------------------------------------------------------------------------------------------


def _run_as_json(run: RunRecord) -> dict[str, Any]:
    return {"folder": str(run.folder), "name": run.name, "seed": run.seed, "problems": run.problems}


def _row_as_json(row: Row) -> dict[str, Any]:
    measure, others = row.measure, [one for one in figures.MEASURES if one is not PERPLEXITY and row.stats(one)]
    values: dict[str, Any] = {}
    for one in others:
        values[one.key] = row.stats(one)
        if one.in_bits:
            values[f"unigram_{one.key}"] = one.unigrams(row.runs[0])
    values |= {f"{key}_signature": ways for key, ways in signatures(row.runs).items()}
    other_splits: dict[str, dict[str, Stat]] = {split: {} for run in row.runs for split in run.other_splits}
    for split, scores in other_splits.items():
        for one in (PERPLEXITY, *SCORES):
            if stat := figures.over_runs(one.final(run, split) for run in row.runs):
                scores[one.key] = stat
    return {
        "name": row.name,
        "task": row.runs[0].task,
        "corpus": row.label,
        "is_slice": row.is_slice,
        "text": row.text,
        "recipe": row.runs[0].origin("recipe") or None,
        "protocol": row.protocol,
        "protocols": row.get("protocols"),
        "training": row.get("training"),
        "parameters": row.parameters,
        "extra_parameters": row.extra_parameters,
        "measure": measure.key,
        "perplexity": row.stats(PERPLEXITY),
        **values,
        "last": {measure.key: row.last} if row.last else None,
        "next_token": row.next_token,
        "remark": None if row.next_token else NOT_NEXT_TOKEN if row.marked else MASKED_TOKEN,
        figures.WITHOUT_SOS.key: row.by_checkpoint(figures.WITHOUT_SOS) or None,
        "last_position": row.by_checkpoint(figures.LAST_POSITION) or None,
        "difference": row.difference,
        "difference_interval": row.intervals,
        "difference_in": "points" if measure.higher else "share",
        "best": row.best,
        "other_splits": other_splits,
        "paper": row.paper or None,
        "unigram_perplexity": PERPLEXITY.unigrams(row.runs[0]),
        "ms_per_step": row.ms_per_step,
        **{key: row.over_runs(key) for key in ("tokens_per_second", "wall_seconds", "peak_memory_mib")},
        "runs": [
            _run_as_json(run)
            | {one.key: {split: one.final(run, split) for split in SPLITS} for one in (PERPLEXITY, *others)}
            for run in row.runs
        ],
    }
