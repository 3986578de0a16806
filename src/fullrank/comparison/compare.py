"""Runs of one task compared: rows over seeds in groups whose figures compare, and every number of them as a record."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.comparison.measures import (
    BLEU,
    COUNTED,
    COUNTING,
    PERPLEXITY,
    TOKENISED_BLEU,
    Measure,
    choose,
    find_metric,
    list_measures,
)
from fullrank.comparison.rows import (
    Row,
    find_attention,
    find_signatures,
    group_by_seed,
    name_rows,
    number_names,
    number_texts,
)
from fullrank.comparison.runs import SPLITS, Run, integer, number
from fullrank.config.load import flatten
from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.evaluation.statistics import (
    brown_forsythe,
    compute_paired_interval,
    deviation_change,
    deviation_interval,
    welch_interval,
)
from fullrank.records import Record
from fullrank.render.tables import group_records

_ORDER = {"test": 0, "valid": 1}  # of splits
_OF_RUNS = ("run", "seed")  # labels by which runs of a row differ
_COSTS = ("tokens_per_second", "wall_seconds", "peak_memory_mib", "steps", "tokens_seen")
_ATTRIBUTES = ("name", "seed", "task", "is_slice", "problems")
_RUN_KEYS = (
    "recipe", "scale", "protocol", "protocols", "training", "checkpoint", "examples", "slice", "sha256", "steps",
    "epochs", "environment", "paper",
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Rows that are compared with each other, by the first of `measures` on the first of `splits`."""

    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]
    splits: tuple[str, ...]

    @property
    def measure(self) -> Measure:
        return self.measures[0]

    @property
    def split(self) -> str:
        return self.splits[0]

    @property
    def part(self) -> str:
        return self.rows[0].part

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]

    @property
    def is_marked(self) -> bool:
        """The figures are no next-token perplexities: they compare with no other, not even with each other."""
        return self.rows[0].is_marked(self.measure)

    @property
    def undertrained(self) -> list[Row]:
        """Rows that are worse than word frequencies."""
        return [] if self.is_marked else [row for row in self.rows if row.is_above(self.measure, "unigram")]

    @property
    def above_fourgrams(self) -> list[Row]:
        """Rows that have not learned trigrams: counting 4-grams is better."""
        return [] if self.is_marked else [row for row in self.rows if row.is_above(self.measure, "fourgram")]

    @property
    def ranking(self) -> list[Row]:
        """Rows by their means, the best first; none where no row compares."""
        if self.is_marked or self.undertrained:
            return []
        measured = [row for row in self.rows if row.values(self.measure, self.split)]
        return sorted(measured, key=lambda row: row.mean(self.measure, self.split) or 0.0, reverse=self.measure.higher)

    def baseline_of(self, row: Row) -> Row | None:
        """The row that another is compared with: `h64-plain` for `h64-a-cross`, else the first; None for a baseline."""
        named = {other.name: other for other in self.rows}
        words = row.name.split("-")
        base = self.rows[0]
        for end in range(1, len(words)):
            base = named.get("-".join([*words[:end], "plain"]), base)
        return None if self.is_marked or base is row else base


@dataclass(frozen=True)
class Comparison:
    """Finished rows in groups, and unfinished runs. left_out: runs of another task than the first."""

    rows: tuple[Row, ...]
    groups: tuple[Group, ...]
    unfinished: tuple[Row, ...]
    left_out: tuple[Run, ...]

    @property
    def runs(self) -> list[Run]:
        """Every finished run."""
        return [run for row in self.rows for run in row.runs]

    @property
    def unfinished_runs(self) -> list[Run]:
        return [run for row in self.unfinished for run in row.runs]

    @property
    def task(self) -> str:
        return (*self.runs, *self.unfinished_runs)[0].task

    @property
    def measure(self) -> Measure:
        """The measure by which rows are judged."""
        return self.groups[0].measure if self.groups else PERPLEXITY

    @property
    def mixed_texts(self) -> list[Row]:
        """The first row of each text, where rows of one part were measured on several; else empty."""
        firsts = {(row.part, row.text): row for row in reversed(self.rows)}
        parts = [part for part, _ in firsts]
        mixed = [row for row in firsts.values() if parts.count(row.part) > 1]
        return sorted(mixed, key=lambda row: row.slot)

    def collect_records(self) -> list[Record]:
        """All numbers: of every run, then of every row."""
        records = [record for row in self.rows for run in row.runs for record in _describe_run(row, run)]
        records += _summarize_runs(records)
        for group in self.groups:
            for row in group.rows:
                records += _describe_row(group, row)
        return records

    def describe_runs(self) -> list[dict[str, Any]]:
        """What is known of every finished run besides its numbers, for JSON."""
        facts = []
        for group in self.groups:
            for row in group.rows:
                facts += [_collect_facts(row, run, group.baseline_of(row)) for run in row.runs]
        return facts


# -- rows and groups ---------------------------------------------------------------------------------------------------


def compare(runs: Sequence[Run], table: str | None = None) -> Comparison:
    """Comparison of runs of one kind: translation, causal or masked language models or fine-tuning, as the first run is.

    table: the table of several recipes that they belong to; rows are compared within each recipe, and in fine-tuning
    within each task.
    """
    same_task = [run for run in runs if _name_kind(run) == _name_kind(runs[0])]
    finished = [run for run in same_task if run.result is not None]
    measure = choose(finished or same_task)
    rows = _build_rows(finished, measure, table)
    members: dict[tuple[object, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.is_marked(measure)):  # figures that compare with no other come last
        members.setdefault((row.part, row.text, row.is_marked(measure)), []).append(row)
    unfinished = group_by_seed([run for run in same_task if run.result is None])
    names = name_rows(unfinished)
    return Comparison(
        tuple(rows),
        tuple(_build_group(tuple(group), measure) for group in members.values()),
        tuple(Row(names[index], len(rows) + index, row) for index, row in enumerate(unfinished)),
        tuple(run for run in runs if run not in same_task),
    )


def _name_kind(run: Run) -> str:
    return "fine-tuning" if run.finetunes else run.task


def _build_rows(runs: Sequence[Run], measure: Measure, table: str | None) -> list[Row]:
    seeds = group_by_seed(runs)
    seeds.sort(key=lambda row: row[0].finetunes and bool(find_attention(row[0])))  # plain encoders first
    parts = [_name_part(row[0], table) for row in seeds]
    if table is None:
        names = name_rows(seeds)
    else:
        names = number_names([f"{part} {row[0].get('row')}" for part, row in zip(parts, seeds, strict=True)])
    texts = number_texts(seeds, measure.in_bits)
    return [Row(names[slot], slot, row, texts[slot], parts[slot]) for slot, row in enumerate(seeds)]


def _name_part(run: Run, table: str | None) -> str:
    """`vanilla` of mixhead/table1-vanilla; `table4` of mixhead/table4 itself; a task of fine-tuning."""
    if run.finetunes:
        return run.task
    recipe = run.get("recipe") or ""
    if table is None:
        return ""
    return recipe.removeprefix(f"{table}-") if recipe.startswith(f"{table}-") else Path(recipe).stem


def _build_group(rows: tuple[Row, ...], measure: Measure) -> Group:
    runs = [run for row in rows for run in row.runs]
    if runs[0].finetunes:
        scores = [key for run in runs for key in run.scores]
        splits = dict.fromkeys(split for split, _ in scores)
        metrics = dict.fromkeys(metric for _, metric in scores)
        return Group(rows, tuple(map(find_metric, metrics)), tuple(splits))
    measured = [split for split in ("test", "valid") if any(measure.value(run, split) is not None for run in runs)]
    is_tokenised = any(TOKENISED_BLEU.paper_figure(run, split) for run in runs for split in SPLITS)
    measures = (BLEU, TOKENISED_BLEU) if measure is BLEU and is_tokenised else (measure,)
    return Group(rows, measures, tuple(measured or SPLITS))


# -- differences over seeds --------------------------------------------------------------------------------------------


def compare_rows(row: Row, base: Row, measure: Measure, split: str) -> Record | None:
    """Difference of means with its 95 % interval over seeds: shares of the baseline's mean, points for scores.

    The interval is paired (Student) for the same seeds, else Welch's; None where either side has one seed, and where
    nothing scatters. None for rows without figures, or of different texts.
    """
    before, after = base.values(measure, split), row.values(measure, split)
    if not after or not before or row.text != base.text:
        return None
    mean = statistics.fmean(before.values())
    change = measure.compare(statistics.fmean(after.values()), mean)
    if change is None:
        return None
    ends, protocol = None, "paired over seeds"
    if before.keys() == after.keys():
        ends = compute_paired_interval(list(before.values()), [after[seed] for seed in before])
    if ends is None:
        ends = welch_interval(list(before.values()), list(after.values()))
        protocol = "Welch, over seeds" if ends else ""
    interval = None
    if ends is not None:
        interval = (measure.compare(mean + ends.low, mean) or 0.0, measure.compare(mean + ends.high, mean) or 0.0)
    labels = {**row.labels, "split": split, "checkpoint": "final", "baseline": base.name}
    unit = "points" if measure.higher else "share"
    return Record(labels, f"{measure.key}_difference", change, unit, interval, protocol)


# -- records -----------------------------------------------------------------------------------------------------------


def _describe_run(row: Row, run: Run) -> Iterator[Record]:
    """The figures of a run, test and validation first, its time and memory."""
    labels = {**row.labels, "run": run.folder.name, "seed": run.seed}
    for checkpoint in ("final", "last"):
        for split in sorted(run.get_mapping("final"), key=lambda split: _ORDER.get(split, 2)):
            place = {**labels, "split": split, "checkpoint": checkpoint}
            protocol = run.get(f"protocols.{split}.words") or run.get("protocol") or ""
            for measure in list_measures(run):
                value = measure.value(run, split, checkpoint)
                if value is not None:
                    yield Record(place, measure.key, value, measure.record_unit, protocol=protocol)
    for key in _COSTS:
        value = number(run.get(key))
        if value is not None:
            yield Record(labels, key, value)
    for phase, value in run.ms_per_step.items():
        yield Record({**labels, "phase": phase}, "ms_per_step", value)


def _summarize_runs(records: Sequence[Record]) -> Iterator[Record]:
    """Means over the runs of each row, with sample deviations (n - 1) and numbers of seeds."""
    names = dict.fromkeys(name for record in records for name in record.labels if name not in _OF_RUNS)
    for measure in dict.fromkeys(record.measure for record in records):
        of_measure = [record for record in records if record.measure == measure]
        for key, of_row in group_records(of_measure, list(names)).items():
            values = [record.value for record in of_row if record.value is not None]
            labels = {name: label for name, label in zip(names, key, strict=True) if label is not None}
            first = of_row[0]
            yield Record(labels, f"{measure}_mean", statistics.fmean(values), first.unit, protocol=first.protocol)
            yield Record(labels, f"{measure}_seeds", len(values))
            if len(values) > 1:
                yield Record(labels, f"{measure}_deviation", statistics.stdev(values))


def _describe_row(group: Group, row: Row) -> Iterator[Record]:
    """Parameters of a row, word frequencies, the paper's figures beside ours, and its differences from the baseline."""
    run, base = row.first, group.baseline_of(row)
    yield Record(row.labels, "seeds", len(row.runs))
    for part, size in flatten(run.get_mapping("parameters")).items():
        count = integer(size)
        if count is not None:
            yield Record({**row.labels, "component": part}, "parameters", count)
    total, base_total = (integer(one.first.get("parameters.total")) for one in (row, group.rows[0]))
    if total is not None and base_total is not None:
        yield Record(row.labels, "parameters_added", total - base_total)
    for split in group.splits:
        place = {**row.labels, "split": split}
        for measure in COUNTED:
            for model in COUNTING:
                counted = measure.find_counted(run, split, model)
                if counted is not None:
                    yield Record({**place, "checkpoint": "final"}, f"{measure.key}_{model}", counted)
        for measure in group.measures:
            stated = measure.paper_figure(run, split)
            if stated is not None:
                source = stated.source
                note = f"The paper's figure is of the {source}: of other examples than ours." if source else ""
                yield Record(place, f"{measure.key}_paper", stated.mean, protocol=source, note=note)
                if stated.deviation is not None:
                    yield Record(place, f"{measure.key}_paper_deviation", stated.deviation)
        for measure in group.measures:
            difference = compare_rows(row, base, measure, split) if base else None
            if base is not None and difference is not None:
                yield difference
                if run.finetunes:
                    yield from _compare_deviations(row, base, measure, split)


def _compare_deviations(row: Row, base: Row, measure: Measure, split: str) -> Iterator[Record]:
    """The change of the deviation over seeds, ours and the paper's (Skip Cross-head, Table 4)."""
    labels = {**row.labels, "split": split, "baseline": base.name}
    a, b = (list(one.values(measure, split).values()) for one in (base, row))
    paper = None
    before, after = (measure.paper_figure(one.first, split) for one in (base, row))
    if before and after and before.deviation and after.deviation is not None:
        paper = 100 * (after.deviation / before.deviation - 1)
    for name, value, interval, protocol in (
        ("deviation_change", deviation_change(a, b), deviation_interval(a, b), "F distribution"),
        ("deviation_change_paper", paper, None, ""),
        ("deviation_p", brown_forsythe(a, b), None, "Brown-Forsythe"),
    ):
        if value is not None:
            yield Record(labels, f"{measure.key}_{name}", value, None, interval, protocol)


def _collect_facts(row: Row, run: Run, baseline: Row | None) -> dict[str, Any]:
    remark = None
    if not run.next_token:
        remark = NOT_NEXT_TOKEN if row.is_marked(PERPLEXITY) else MASKED_TOKEN
    return {
        "folder": str(run.folder),
        "row": row.name,
        "part": row.part or None,
        "text": row.text,
        **{name: getattr(run, name) for name in _ATTRIBUTES},
        **{key: run.get(key) for key in _RUN_KEYS},
        "next_token": None if run.finetunes else run.next_token,
        "corpus": run.label,
        "baseline": baseline and baseline.name,
        "remark": remark,
        "bleu_signature": next(iter(find_signatures([run])), None),
    }
