"""Runs of one task compared: rows over seeds in groups whose figures compare, and every number of them as a record."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
from fullrank.comparison.rows import Row, group_by_seed, name_rows, number_names, number_texts
from fullrank.comparison.runs import SPLITS, Run, integer, number, read_runs
from fullrank.config.load import flatten
from fullrank.core.errors import InputError
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

    def find_above(self, model: str) -> list[Row]:
        """Rows with a figure above that of a model that only counts: `unigram` words, or `fourgram`."""
        above: list[Row] = []
        if self.is_marked:
            return above
        for row in self.rows:
            for split in SPLITS:
                mean = row.mean(self.measure, split)
                counted = self.measure.find_counted(row.first, split, model)
                if mean is None or counted is None:
                    continue
                if mean > counted and row not in above:
                    above.append(row)
        return above

    @property
    def ranking(self) -> list[Row]:
        """Rows by their means, the best first; none where no row compares, or one is worse than word frequencies."""
        if self.is_marked or self.find_above("unigram"):
            return []

        def find_mean(row: Row) -> float:
            return row.mean(self.measure, self.split) or 0.0

        measured = [row for row in self.rows if row.values(self.measure, self.split)]
        return sorted(measured, key=find_mean, reverse=self.measure.higher)

    def find_baseline(self, row: Row) -> Row | None:
        """The row that another is compared with: `h64-plain` for `h64-a-cross`, else the first; None for a baseline."""
        named = {other.name: other for other in self.rows}
        words = row.name.split("-")
        base = self.rows[0]
        for end in range(1, len(words)):
            plain = "-".join([*words[:end], "plain"])
            base = named.get(plain, base)
        if self.is_marked or base is row:
            return None
        return base


@dataclass(frozen=True)
class Comparison:
    """Finished rows in groups, and unfinished ones. left_out: runs of another task than the first."""

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
    def all_rows(self) -> tuple[Row, ...]:
        return (*self.rows, *self.unfinished)

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

    @cached_property
    def records(self) -> list[Record]:
        """All numbers: of every run, then of every row."""
        records: list[Record] = []
        for row in self.rows:
            for run in row.runs:
                records += _describe_run(row, run)
        records += _summarize_runs(records)
        for group in self.groups:
            for row in group.rows:
                records += _describe_row(group, row)
        return records


# -- rows and groups ---------------------------------------------------------------------------------------------------


def build_report(folders: Sequence[Path], table: str | None = None) -> Comparison:
    """Compare run folders of one kind: translation, causal or masked language models or fine-tuning, as the first is.

    The first row is the one that others are compared with.
    table: the table of several recipes that they belong to; rows are compared within each recipe, and in fine-tuning
    within each task.
    Raises InputError for no folder at all and for one that is no run. A run that is unfinished or damaged is listed, never an
    error.
    """
    if not folders:
        raise InputError("no run folders given; name at least one, for example runs/demo/plain")
    runs = read_runs(folders)
    kind = _name_kind(runs[0])
    same_task = [run for run in runs if _name_kind(run) == kind]
    finished = [run for run in same_task if run.result is not None]
    measure = choose(finished or same_task)
    rows = _build_rows(finished, table)
    members: dict[tuple[object, ...], list[Row]] = {}
    marked_last = sorted(rows, key=lambda row: row.is_marked(measure))  # figures that compare with no other
    for row in marked_last:
        key = (row.part, row.text, row.is_marked(measure))
        members.setdefault(key, []).append(row)
    groups = [_build_group(tuple(group), measure) for group in members.values()]
    unfinished = group_by_seed([run for run in same_task if run.result is None])
    unfinished_rows: list[Row] = []
    for name, seeds in zip(name_rows(unfinished), unfinished, strict=True):
        slot = len(rows) + len(unfinished_rows)
        unfinished_rows.append(Row(name, slot, seeds))
    left_out = [run for run in runs if run not in same_task]
    return Comparison(tuple(rows), tuple(groups), tuple(unfinished_rows), tuple(left_out))


def _name_kind(run: Run) -> str:
    return "fine-tuning" if run.finetunes else run.task


def _build_rows(runs: Sequence[Run], table: str | None) -> list[Row]:
    seeds = group_by_seed(runs)
    parts = [_name_part(row[0], table) for row in seeds]
    names = name_rows(seeds)
    if table is not None:
        names = []
        for part, row in zip(parts, seeds, strict=True):
            names.append(f"{part} {row[0].get('row')}")
        names = number_names(names)
    texts = number_texts(seeds)
    return [
        Row(
            names[slot],
            slot,
            row,
            texts[slot],
            parts[slot],
        )
        for slot, row in enumerate(seeds)
    ]


def _name_part(run: Run, table: str | None) -> str:
    """`vanilla` of mixhead/table1-vanilla; `table4` of mixhead/table4 itself; a task of fine-tuning."""
    if run.finetunes:
        return run.task
    recipe = run.get("recipe") or ""
    if table is None:
        return ""
    prefix = f"{table}-"
    if recipe.startswith(prefix):
        return recipe.removeprefix(prefix)
    return Path(recipe).stem


def _build_group(rows: tuple[Row, ...], measure: Measure) -> Group:
    runs = [run for row in rows for run in row.runs]
    if runs[0].finetunes:
        scores = [key for run in runs for key in run.scores]
        splits = dict.fromkeys(split for split, _ in scores)
        metrics = dict.fromkeys(metric for _, metric in scores)
        return Group(rows, tuple(map(find_metric, metrics)), tuple(splits))
    measured = []
    for split in _ORDER:
        if any(measure.value(run, split) is not None for run in runs):
            measured.append(split)
    measures = [measure]
    is_tokenised = any(TOKENISED_BLEU.find_paper(run, split) for run in runs for split in SPLITS)
    if measure is BLEU and is_tokenised:
        measures.append(TOKENISED_BLEU)
    return Group(rows, tuple(measures), tuple(measured or SPLITS))


# -- differences over seeds --------------------------------------------------------------------------------------------


def compare_rows(row: Row, base: Row, measure: Measure, split: str) -> Record | None:
    """Difference of means with its 95 % interval over seeds: shares of the baseline's mean, points for scores.

    The interval is paired (Student) for the same seeds, else Welch's; None where either side has one seed, and where
    nothing scatters. None for rows without figures, or of different texts.
    """
    before = base.values(measure, split)
    after = row.values(measure, split)
    if not after or not before or row.text != base.text:
        return None
    base_figures = list(before.values())
    figures = list(after.values())
    mean = statistics.fmean(base_figures)
    change = measure.compare(statistics.fmean(figures), mean)
    if change is None:
        return None
    ends = None
    protocol = "paired over seeds"
    if before.keys() == after.keys():
        paired = [after[seed] for seed in before]
        ends = compute_paired_interval(base_figures, paired)
    if ends is None:
        ends = welch_interval(base_figures, figures)
        protocol = "Welch, over seeds" if ends else ""
    interval = None
    if ends is not None:
        low = measure.compare(mean + ends.low, mean)
        high = measure.compare(mean + ends.high, mean)
        interval = (low or 0.0, high or 0.0)
    labels = {**row.labels, "split": split, "checkpoint": "final", "baseline": base.name}
    return Record(
        labels, f"{measure.key}_difference", change, "points" if measure.higher else "share", interval, protocol
    )


# -- records -----------------------------------------------------------------------------------------------------------


def _describe_run(row: Row, run: Run) -> Iterator[Record]:
    """The figures of a run, test and validation first, its time and memory."""
    labels = {**row.labels, "run": run.folder.name, "seed": run.seed}
    splits = sorted(run.get_mapping("final"), key=lambda split: _ORDER.get(split, 2))
    for checkpoint in ("final", "last"):
        for split in splits:
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
    measures = dict.fromkeys(record.measure for record in records)
    for measure in measures:
        of_measure = [record for record in records if record.measure == measure]
        rows = group_records(of_measure, list(names))
        for key, of_row in rows.items():
            values = [record.value for record in of_row if record.value is not None]
            labels = {}
            for name, label in zip(names, key, strict=True):
                if label is not None:
                    labels[name] = label
            first = of_row[0]
            yield Record(labels, f"{measure}_mean", statistics.fmean(values), first.unit, protocol=first.protocol)
            yield Record(labels, f"{measure}_seeds", len(values))
            if len(values) > 1:
                yield Record(labels, f"{measure}_deviation", statistics.stdev(values))


def _describe_row(group: Group, row: Row) -> Iterator[Record]:
    """Parameters of a row, word frequencies, the paper's figures beside ours, and its differences from the baseline."""
    run = row.first
    base = group.find_baseline(row)
    yield Record(row.labels, "seeds", len(row.runs))
    parameters = flatten(run.get_mapping("parameters"))
    for part, size in parameters.items():
        count = integer(size)
        if count is not None:
            yield Record({**row.labels, "component": part}, "parameters", count)
    first = group.rows[0].first
    total = integer(run.get("parameters.total"))
    base_total = integer(first.get("parameters.total"))
    if total is not None and base_total is not None:
        yield Record(row.labels, "parameters_added", total - base_total)
    for split in group.splits:
        place = {**row.labels, "split": split}
        final = {**place, "checkpoint": "final"}
        for measure in COUNTED:
            for model in COUNTING:
                counted = measure.find_counted(run, split, model)
                if counted is not None:
                    yield Record(final, f"{measure.key}_{model}", counted)
        for measure in group.measures:
            paper = measure.find_paper(run, split)
            mean, deviation, source = paper or (None, None, "")
            note = f"The paper's figure is of the {source}: of other examples than ours." if source else ""
            if mean is not None:
                yield Record(place, f"{measure.key}_paper", mean, protocol=source, note=note)
            if deviation is not None:
                yield Record(place, f"{measure.key}_paper_deviation", deviation)
        for measure in group.measures:
            if base is None:
                continue
            difference = compare_rows(row, base, measure, split)
            if difference is not None:
                yield difference
                if run.finetunes:
                    yield from _compare_deviations(row, base, measure, split)


def _compare_deviations(row: Row, base: Row, measure: Measure, split: str) -> Iterator[Record]:
    """The change of the deviation over seeds, ours and the paper's (Skip Cross-head, Table 4)."""
    labels = {**row.labels, "split": split, "baseline": base.name}
    base_scores = list(base.values(measure, split).values())
    scores = list(row.values(measure, split).values())
    before = _find_paper_deviation(base, measure, split)
    after = _find_paper_deviation(row, measure, split)
    paper = 100 * (after / before - 1) if before and after is not None else None
    change = deviation_change(base_scores, scores)
    interval = deviation_interval(base_scores, scores)
    probability = brown_forsythe(base_scores, scores)
    for name, value, ends, protocol in (
        ("deviation_change", change, interval, "F distribution"),
        ("deviation_change_paper", paper, None, ""),
        ("deviation_p", probability, None, "Brown-Forsythe"),
    ):
        if value is not None:
            yield Record(labels, f"{measure.key}_{name}", value, None, ends, protocol)


def _find_paper_deviation(row: Row, measure: Measure, split: str) -> float | None:
    paper = measure.find_paper(row.first, split)
    return paper[1] if paper else None
