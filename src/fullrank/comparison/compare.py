"""Runs of one task compared: rows over seeds in groups whose figures compare, and every number of them as a record."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fullrank.comparison.runs import (
    BITS_PER_BYTE,
    BLEU,
    COUNTING,
    MASKED_MODELING,
    PERPLEXITY,
    PRETRAINED,
    SPLITS,
    TOKENISED_BLEU,
    TRANSLATION,
    Measure,
    Run,
    choose_measure,
    find_metric,
    integer,
    list_measures,
    number,
    read_counted,
    read_run,
)
from fullrank.config.load import flatten
from fullrank.evaluation.statistics import compute_paired_interval, welch_interval
from fullrank.records import Record

# two runs that differ only in where they ran and how they were watched are seeds of one row
CIRCUMSTANCES = {
    "train.seed", "train.device", "train.threads", "train.track", "train.log_every_steps", "train.save_every_steps",
    "train.keep_checkpoints", "train.keep_model", "eval.test",
    "data.cache", "data.dir",
}  # fmt: skip
# what decides if two figures compare, by its name in words, with the keys that hold it
_CORPUS = {"corpus": "corpus.name", "label": "corpus.label"}
_TOKENS = _CORPUS | {
    "vocabulary": "corpus.vocabulary",
    "vocabulary fingerprint": "corpus.fingerprint",
    "validation tokens": "corpus.tokens.valid",
    "test tokens": "corpus.tokens.test",
    "validation text": "corpus.sha256.valid",
    "test text": "corpus.sha256.test",
}
_PAIRS = _CORPUS | {"validation pairs": "corpus.pairs.valid", "test pairs": "corpus.pairs.test"}
_SEED_SUFFIX = re.compile(r"[-_./ ]+(seed|s)[-_ ]?\d+$", re.IGNORECASE)
_ORDER = {"test": 0, "valid": 1}  # of splits
_COSTS = ("tokens_per_second", "wall_seconds", "peak_memory_mib", "steps", "tokens_seen")


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed. slot: its colour. text: number of the text that it was measured on.

    part: the part of a table in which rows are compared: a backbone, a task of fine-tuning; empty where there is one.
    """

    name: str
    slot: int
    runs: tuple[Run, ...]
    text: int
    part: str

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def labels(self) -> dict[str, str]:
        return {"row": self.name, "part": self.part} if self.part else {"row": self.name}

    @property
    def curve_name(self) -> str:
        """Name in the legend of curves."""
        return self.name if self.first.result is not None else f"{self.name} (unfinished)"

    def is_apart(self, measure: Measure) -> bool:
        """Return whether figures look like next-token perplexities and are none: they compare with no other row."""
        if measure.higher or self.first.task == MASKED_MODELING:
            return False
        return not all(run.next_token for run in self.runs)

    def is_above(self, model: str) -> bool:
        """Return whether the perplexity is above that of a model that only counts: `unigram` words, or `fourgram`."""
        for split in SPLITS:
            mean = self.mean(PERPLEXITY, split)
            counted = read_counted(self.first, split, model)
            if mean is not None and counted is not None and mean > counted:
                return True
        return False

    def values(self, measure: Measure, split: str) -> dict[int | None, float]:
        """Return the final figures by seed."""
        values = {run.seed: measure.value(run, split) for run in self.runs}
        return {seed: value for seed, value in values.items() if value is not None}

    def mean(self, measure: Measure, split: str) -> float | None:
        """Compute the mean of the runs' figures: of perplexities, never the exponential of a mean loss."""
        values = self.values(measure, split)
        return statistics.fmean(values.values()) if values else None


@dataclass(frozen=True)
class Group:
    """Rows that are compared with each other, by the first of `measures` on the first of `splits`."""

    rows: Sequence[Row]
    measures: Sequence[Measure]
    splits: Sequence[str]

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
    def comparable_rows(self) -> list[Row]:
        return [row for row in self.rows if not row.is_apart(self.measure)]

    def find_above(self, model: str) -> list[Row]:
        """Find the rows worse than a model that only counts (`Row.is_above`); of scores none."""
        return [] if self.measure.higher else [row for row in self.comparable_rows if row.is_above(model)]

    @property
    def ranking(self) -> list[Row]:
        """Rows by their means, the best first; none where no row compares, or one is worse than word frequencies."""
        if self.find_above("unigram"):
            return []
        measured = [row for row in self.comparable_rows if self.find_mean(row) is not None]
        return sorted(measured, key=lambda row: self.find_mean(row) or 0.0, reverse=self.measure.higher)

    def find_mean(self, row: Row) -> float | None:
        """Find the mean by which rows are compared."""
        return row.mean(self.measure, self.split)

    def find_baseline(self, row: Row) -> Row | None:
        """Find the row that another is compared with: `h64-plain` for `h64-a-cross`, else the first; None for a baseline."""
        named = {other.name: other for other in self.comparable_rows}
        if row.name not in named:
            return None
        words = row.name.split("-")
        base = self.comparable_rows[0]
        for end in range(1, len(words)):
            plain = "-".join([*words[:end], "plain"])
            base = named.get(plain, base)
        return None if base is row else base


@dataclass(frozen=True)
class Comparison:
    """Finished rows in groups, and unfinished ones. left_out: runs of another task than the first."""

    rows: Sequence[Row]
    groups: Sequence[Group]
    unfinished: Sequence[Row]
    left_out: Sequence[Run]

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]

    @property
    def unfinished_runs(self) -> list[Run]:
        return [run for row in self.unfinished for run in row.runs]

    @property
    def all_rows(self) -> list[Row]:
        return [*self.rows, *self.unfinished]

    @property
    def mixed_texts(self) -> list[Row]:
        """The first row of each text, where rows of one part were measured on several; else empty."""
        parts = [group.part for group in self.groups]
        return [group.rows[0] for group in self.groups if parts.count(group.part) > 1]

    @cached_property
    def records(self) -> list[Record]:
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
    table: the table of several recipes that they belong to. Rows are then compared within each recipe, and in
    fine-tuning within each task.
    Raises InputError for a folder that is no run. A run that is unfinished or damaged is listed, never an error.
    """
    unique = {Path(folder).resolve(): Path(folder) for folder in folders}
    runs = [read_run(folder) for folder in unique.values()]
    same_task = [run for run in runs if run.kind == runs[0].kind]
    finished = [run for run in same_task if run.result is not None]
    measure = choose_measure(finished or same_task)
    rows = _build_rows(finished, table)
    members: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        members.setdefault((row.part, row.text), []).append(row)
    groups = [_build_group(group, measure) for group in members.values()]
    unfinished = _build_rows([run for run in same_task if run.result is None], None, len(rows))
    left_out = [run for run in runs if run not in same_task]
    return Comparison(rows, groups, unfinished, left_out)


def _build_rows(runs: Sequence[Run], table: str | None, first_slot: int = 0) -> list[Row]:
    runs_of_rows = group_by_seed(runs)
    parts = [_name_part(row[0], table) for row in runs_of_rows]
    names = name_rows(runs_of_rows)
    if table is not None:
        names = number_names([f"{part} {row[0].get('row')}" for part, row in zip(parts, runs_of_rows, strict=True)])
    slots = itertools.count(first_slot)
    texts = number_texts(runs_of_rows)
    return list(map(Row, names, slots, runs_of_rows, texts, parts))


def _name_part(run: Run, table: str | None) -> str:
    """Name the part of a table.

    It is `vanilla` of mixhead/table1-vanilla, `table4` of mixhead/table4 itself, and a task of fine-tuning.
    """
    if run.finetunes:
        return run.task
    if table is None:
        return ""
    recipe = Path(run.get("recipe") or "").stem
    return recipe.removeprefix(f"{Path(table).name}-")


def _build_group(rows: Sequence[Row], measure: Measure) -> Group:
    runs = [run for row in rows for run in row.runs]
    if runs[0].finetunes:
        splits = dict.fromkeys(split for run in runs for split in run.get_mapping("final"))
        metrics = dict.fromkeys(name for run in runs for name in run.metric_names)
        return Group(rows, list(map(find_metric, metrics)), list(splits))
    measured_splits = []
    for split in _ORDER:
        values = [measure.value(run, split) for run in runs]
        if any(value is not None for value in values):
            measured_splits.append(split)
    is_tokenised = any(TOKENISED_BLEU.find_paper(run, split) for run in runs for split in SPLITS)
    measures = [measure]
    if measure is BLEU and is_tokenised:
        measures.append(TOKENISED_BLEU)
    if runs[0].tokens == PRETRAINED:  # each model has its tokens
        measures.append(BITS_PER_BYTE)
    return Group(rows, measures, measured_splits or SPLITS)


def group_by_seed(runs: Sequence[Run]) -> list[tuple[Run, ...]]:
    """Group runs into rows, in order of first appearance.

    A second run with the same seed (or none recorded) is no independent sample and opens a row of its own, so that a
    spread is always over different seeds. So does a run that was measured on another text.
    """
    rows: dict[tuple[str, int], list[Run]] = {}
    repeats: Counter[tuple[str, int | None]] = Counter()
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in CIRCUMSTANCES}
        origin = [run.get(key) for key in ("scale", "recipe", "row")]
        training = str([sorted(settings.items()), origin, identify_text(run)])
        number = repeats[training, run.seed]
        rows.setdefault((training, number), []).append(run)
        repeats[training, run.seed] += 1
    return [tuple(row) for row in rows.values()]


def name_rows(rows: Sequence[Sequence[Run]]) -> list[str]:
    """Name each row distinctly: by its name in the recipe, else by its run's name without the seed."""
    names = []
    for run, *others in rows:
        name = _SEED_SUFFIX.sub("", run.name) if others else run.name
        names.append(run.get("row") or name)
    return number_names(names)


def number_names(names: Sequence[str]) -> list[str]:
    """Make equal names distinct by `(2)`, `(3)` ..."""
    distinct: list[str] = []
    for name in names:
        label = name
        number = 2
        while label in distinct:
            label = f"{name} ({number})"
            number += 1
        distinct.append(label)
    return distinct


# -- the same text -----------------------------------------------------------------------------------------------------


def identify_text(run: Run) -> dict[str, Any]:
    """Identify the text behind a figure, as far as recorded.

    The training text is no part of it: another one makes another model. A perplexity has the tokens of the text, BLEU the
    reference translations and a signature, a score of fine-tuning the examples.
    """
    if run.finetunes:
        digests = run.get_mapping("sha256")
        return {f"{split} examples": digest for split, digest in digests.items() if split != "train"}
    is_translation = run.task == TRANSLATION
    keys = _PAIRS if is_translation else _TOKENS
    text = {name: run.get(key) for name, key in keys.items()}
    if is_translation:
        signature = run.bleu_signature  # another version of sacreBLEU alone makes no other measurement
        text["BLEU signature"] = signature and re.sub(r"\|version:[^|]*", "", signature)
        text |= {f"{split} references": run.references.get(split) for split in SPLITS}
    return {name: value for name, value in text.items() if value is not None}


def compare_texts(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """List the entries in which two texts differ; one that a text does not record is not compared."""
    if bool(first) != bool(second):
        return ["corpus (not recorded in every run)"]
    return [name for name in first if name in second and first[name] != second[name]]


def number_texts(rows: Sequence[Sequence[Run]]) -> list[int]:
    """Find the number of the text that each row was measured on; figures compare where the numbers are equal."""
    distinct: list[dict[str, Any]] = []
    numbers = []
    for row in rows:
        text = identify_text(row[0])
        equal = [index for index, other in enumerate(distinct) if not compare_texts(other, text)]
        if not equal:
            distinct.append(text)
        numbers.append(equal[0] if equal else len(distinct) - 1)
    return numbers


# -- records -----------------------------------------------------------------------------------------------------------


def compare_rows(row: Row, base: Row, measure: Measure, split: str) -> Record | None:
    """Compare the means of two rows of a group, with a 95 % interval over seeds.

    The difference is a share of the baseline's mean, of scores in points. The interval is paired (Student) for the same
    seeds, else Welch's. It is None where either side has one seed, and where nothing scatters.

    Args:
        row: row that is compared.
        base: row that it is compared with.
        measure: the figure that is compared.
        split: `valid` or `test`; of fine-tuning such as `dev`.

    Returns:
        Difference with its interval; None for rows without figures.
    """
    before = base.values(measure, split)
    after = row.values(measure, split)
    if not after or not before:
        return None
    base_figures = list(before.values())
    figures = list(after.values())
    mean = statistics.fmean(base_figures)
    ends = None
    protocol = "paired over seeds"
    if before.keys() == after.keys():
        ends = compute_paired_interval(base_figures, [after[seed] for seed in before])
    if ends is None:
        ends = welch_interval(base_figures, figures)
        protocol = "Welch, over seeds" if ends else ""
    interval = None
    if ends is not None:
        interval = measure.compare(mean + ends.low, mean), measure.compare(mean + ends.high, mean)
    labels = {
        **row.labels,
        "split": split,
        "checkpoint": "final",
        "baseline": base.name,
    }
    unit = "points" if measure.higher else "share"
    change = measure.compare(statistics.fmean(figures), mean)
    return Record(labels, f"{measure.key}_difference", change, unit, interval, protocol)


def _describe_run(row: Row, run: Run) -> Iterator[Record]:
    labels = {**row.labels, "run": run.folder.name, "seed": run.seed}
    measured = run.get_mapping("final")
    splits = sorted(measured, key=lambda split: _ORDER.get(split, 2))
    for checkpoint in ("before", "final", "last"):
        for split in splits:
            of_split = {**labels, "split": split, "checkpoint": checkpoint}
            protocol = run.get(f"protocols.{split}.words") or run.get("protocol") or ""
            for measure in list_measures(run):
                value = measure.value(run, split, checkpoint)
                if value is not None:
                    yield Record(of_split, measure.key, value, measure.unit, protocol=protocol)
    for key in _COSTS:
        value = number(run.get(key))
        if value is not None:
            yield Record(labels, key, value)
    for phase, value in run.ms_per_step.items():
        yield Record({**labels, "phase": phase}, "ms_per_step", value)


def _summarize_runs(records: Sequence[Record]) -> Iterator[Record]:
    """Yield means over the runs of each row, with sample deviations (n - 1) and numbers of seeds."""
    measures: dict[str, dict[tuple[Any, ...], list[Record]]] = {}
    for record in records:
        labels = tuple(item for item in record.labels.items() if item[0] not in ("run", "seed"))
        measures.setdefault(record.measure, {}).setdefault(labels, []).append(record)
    for measure, samples in measures.items():
        for labels, sample in samples.items():
            values = [record.value for record in sample if record.value is not None]
            first = sample[0]
            mean = statistics.fmean(values)
            yield Record(dict(labels), f"{measure}_mean", mean, first.unit, protocol=first.protocol)
            yield Record(dict(labels), f"{measure}_seeds", len(values))
            if len(values) > 1:
                yield Record(dict(labels), f"{measure}_deviation", statistics.stdev(values))


def _describe_row(group: Group, row: Row) -> Iterator[Record]:
    """Yield parameters of a row, word frequencies, the paper's figures beside ours, and its differences from the baseline."""
    run = row.first
    base = group.find_baseline(row)
    yield Record(row.labels, "seeds", len(row.runs))
    for part, size in flatten(run.get_mapping("parameters")).items():
        count = integer(size)
        if count is not None:
            yield Record({**row.labels, "component": part}, "parameters", count)
    total = integer(run.get("parameters.total"))
    base_total = integer(group.rows[0].first.get("parameters.total"))
    if total is not None and base_total is not None:
        yield Record(row.labels, "parameters_added", total - base_total)
    for split in group.splits:
        of_split = {**row.labels, "split": split}
        for model in COUNTING:
            counted = read_counted(run, split, model)
            if counted is not None:
                yield Record({**of_split, "checkpoint": "final"}, f"perplexity_{model}", counted)
        for measure in group.measures:
            mean, deviation, source = measure.find_paper(run, split) or (None, None, "")
            note = f"The paper's figure is of the {source}: of other examples than ours." if source else ""
            if mean is not None:
                yield Record(of_split, f"{measure.key}_paper", mean, protocol=source, note=note)
            if deviation is not None:
                yield Record(of_split, f"{measure.key}_paper_deviation", deviation)
        for measure in group.measures:
            difference = compare_rows(row, base, measure, split) if base else None
            if difference:
                yield difference
