"""Runs of one task compared: rows over seeds in groups whose figures compare, and every number of them as a record."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.comparison.measures import (
    ACCURACY,
    BLEU,
    CHRF,
    LAST_POSITION,
    MASKED_PERPLEXITY,
    PERPLEXITY,
    TOKENISED_BLEU,
    UNIGRAMS,
    WITHOUT_SOS,
    Measure,
    choose,
    find_metric,
    list_measures,
)
from fullrank.comparison.rows import (
    Row,
    find_attention,
    find_unequal_terms,
    group_by_seed,
    measure_interval,
    name_encoder,
    name_rows,
    number_names,
    number_texts,
)
from fullrank.comparison.runs import SPLITS, Run, find_scores, integer, mapping, number
from fullrank.config.load import flatten
from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError
from fullrank.evaluation import statistics as over_seeds
from fullrank.records import Interval, Record
from fullrank.render.tables import group_records

Values = Mapping[int | str, float]  # by seed
_OF_RUNS = ("run", "seed")  # labels by which runs of a row differ
_COSTS = ("tokens_per_second", "wall_seconds", "peak_memory_mib", "steps", "tokens_seen")
_RUN_KEYS = (
    "recipe", "scale", "protocol", "protocols", "training", "checkpoint", "examples", "slice", "sha256", "steps",
    "epochs", "environment", "paper",
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Rows that are compared with each other, by the first of `measures` on the first of `splits`.

    others: measures that are shown beside them. paper: the measure in which the paper's figures are, if any.
    """

    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]
    others: tuple[Measure, ...]
    splits: tuple[str, ...]
    paper: Measure | None

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
    def is_marked(self) -> bool:
        """The figures are no next-token perplexities: they compare with no other, not even with each other."""
        return self.rows[0].is_marked(self.measure)

    @property
    def undertrained(self) -> list[Row]:
        return [] if self.is_marked else [row for row in self.rows if row.is_undertrained(self.measure)]

    @property
    def measured(self) -> list[Row]:
        """Rows with a figure on the split by which they are judged."""
        return [row for row in self.rows if row.mean(self.measure, self.split) is not None]

    def find_best(self, rows: Sequence[Row], split: str = "") -> Row | None:
        """The row with the best mean; None where no row compares."""
        means = [(row.mean(self.measure, split or self.split), row) for row in rows]
        measured = [(mean, row) for mean, row in means if mean is not None]
        if not measured or self.is_marked or self.undertrained:
            return None
        choose_end = max if self.measure.higher else min
        return choose_end(measured, key=lambda pair: pair[0])[1]

    def baseline_of(self, row: Row) -> Row | None:
        """The row that another is compared with: the first; in fine-tuning the plain one most like it.

        None for a row that is its own baseline.
        """
        if self.is_marked:
            return None
        plain = [other for other in self.rows if other.first.finetunes and not find_attention(other.first)]
        if plain and row not in plain:
            return min(plain, key=lambda other: len(find_unequal_terms(row, other)))
        base = plain[0] if plain else self.rows[0]
        return None if row is base else base

    def difference(self, row: Row, base: Row, measure: Measure, split: str) -> Record | None:
        """Difference of means with its 95 % interval over seeds: shares of the baseline's mean, points for scores."""
        after, before = row.values(measure, split), base.values(measure, split)
        if not after or not before or row.text != base.text:
            return None
        mean = statistics.fmean(before.values())
        change = measure.difference(statistics.fmean(after.values()), mean)
        if change is None:
            return None
        ends, kind = measure_interval(after, before)
        interval = None
        if ends is not None:
            low, high = (measure.difference(mean + end, mean) or 0.0 for end in ends)
            interval = (low, high)
        labels = {**_make_labels(row), "split": split, "checkpoint": "final", "baseline": base.name}
        unit = "points" if measure.higher else "share"
        return Record(labels, f"{measure.key}_difference", change, unit, interval, kind)


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
    def mixed_texts(self) -> list[Row]:
        """The first row of each text, where rows of one part were measured on several; else empty."""
        for part in dict.fromkeys(row.part for row in self.rows):
            texts = {row.text: row for row in reversed(self.rows) if row.part == part}
            if len(texts) > 1:
                return sorted(texts.values(), key=lambda row: row.slot)
        return []

    def collect_records(self) -> list[Record]:
        """All numbers: of every run, then of every row."""
        records = [record for row in self.rows for run in row.runs for record in _describe_run(row, run)]
        records += _summarize_runs(records)
        return records + [record for group in self.groups for row in group.rows for record in _describe_row(group, row)]

    def describe_runs(self) -> list[dict[str, Any]]:
        """What is known of every finished run besides its numbers, for JSON."""
        return [
            _collect_facts(row, run, group.baseline_of(row))
            for group in self.groups for row in group.rows for run in row.runs
        ]  # fmt: skip


# -- rows and groups ---------------------------------------------------------------------------------------------------


def compare(runs: Sequence[Run], table: str | None = None) -> Comparison:
    """Comparison of runs. The first run says if translation, language or masked language models are compared.

    table: the table of several recipes that they belong to; rows are compared within each recipe, and in fine-tuning
    within each task. InputError for runs of fine-tuning among others.
    """
    tuned = [run for run in runs if run.finetunes]
    if tuned and len(tuned) < len(runs):
        other = next(run for run in runs if not run.finetunes)
        raise InputError(
            f"{tuned[0].folder} is a run of fine-tuning and {other.folder} is not: no figure of theirs compares; "
            "make a report of each kind"
        )
    same_task = list(tuned or [run for run in runs if run.task == runs[0].task])
    finished = [run for run in same_task if run.result is not None]
    seeds = group_by_seed(finished)
    if tuned:  # plain encoders first
        seeds.sort(key=lambda row: bool(find_attention(row[0])))
    parts = [_name_part(row[0], table) for row in seeds]
    names = name_rows(seeds) if table is None else _name_parts(parts, seeds)
    measure = choose(finished or same_task)
    texts = number_texts(seeds, measure.in_bits)
    rows = [
        Row(name, slot, row, text, part)
        for slot, (name, row, text, part) in enumerate(zip(names, seeds, texts, parts, strict=True))
    ]
    keys = dict.fromkeys((row.part, row.text, row.is_marked(measure)) for row in rows)
    keys = dict.fromkeys(sorted(keys, key=lambda key: key[2]))  # figures that compare with no other come last
    members = [[row for row in rows if (row.part, row.text, row.is_marked(measure)) == key] for key in keys]
    return Comparison(
        tuple(rows),
        tuple(_build_group(group, measure) for group in members),
        _build_unfinished(same_task, len(rows)),
        tuple(run for run in runs if run not in same_task),
    )


def _build_unfinished(runs: Sequence[Run], slot: int) -> tuple[Row, ...]:
    seeds = group_by_seed([run for run in runs if run.result is None])
    names = name_rows(seeds)
    return tuple(Row(name, slot + index, row) for index, (name, row) in enumerate(zip(names, seeds, strict=True)))


def _name_part(run: Run, table: str | None) -> str:
    """`vanilla` of mixhead/table1-vanilla; `table4` of mixhead/table4 itself; a task of fine-tuning."""
    if run.finetunes:
        return run.task
    recipe = run.origin("recipe")
    if table is None:
        return ""
    return recipe.removeprefix(f"{table}-") if recipe.startswith(f"{table}-") else Path(recipe).stem


def _name_parts(parts: Sequence[str], rows: Sequence[Sequence[Run]]) -> list[str]:
    return number_names([f"{part} {row[0].origin('row')}" for part, row in zip(parts, rows, strict=True)])


def _build_group(rows: Sequence[Row], measure: Measure) -> Group:
    runs = [run for row in rows for run in row.runs]
    if runs[0].finetunes:
        scores = [key for run in runs for key in find_scores(run)]
        splits = tuple(dict.fromkeys(split for split, _ in scores))
        measures = tuple(find_metric(name) for name in dict.fromkeys(metric for _, metric in scores))
        paper = next((one for one in measures for split in splits if _has_paper_figure(runs, one, split)), None)
        return Group(tuple(rows), measures, (), splits, paper)
    kinds = (BLEU, TOKENISED_BLEU) if measure is BLEU else (measure,)
    paper = next((kind for kind in kinds if any(_has_paper_figure(runs, kind, split) for split in SPLITS)), None)
    others = {BLEU: (CHRF, PERPLEXITY), MASKED_PERPLEXITY: (ACCURACY,)}.get(measure, (WITHOUT_SOS, LAST_POSITION))
    if paper is TOKENISED_BLEU:
        others = (TOKENISED_BLEU, *others)
    measured = [split for split in ("test", "valid") if any(measure.value(run, split) is not None for run in runs)]
    return Group(tuple(rows), (measure,), others, tuple(measured or SPLITS), paper)


def _has_paper_figure(runs: Sequence[Run], measure: Measure, split: str) -> bool:
    return any(measure.paper_figure(run, split) is not None for run in runs)


def find_splits(runs: Sequence[Run]) -> tuple[str, ...]:
    """Splits with final figures: test, validation, then the others."""
    splits = dict.fromkeys(str(split) for run in runs for split in mapping(run.get("final")))
    order = {"test": 0, "valid": 1}
    return tuple(sorted(splits, key=lambda split: order.get(split, 2)))


# -- records -----------------------------------------------------------------------------------------------------------


def _make_labels(row: Row) -> dict[str, str | int]:
    return {"row": row.name, **({"part": row.part} if row.part else {})}


def _find_protocol(run: Run, split: str) -> str:
    return str(mapping(mapping(run.get("protocols")).get(split)).get("words") or run.get("protocol") or "")


def _describe_run(row: Row, run: Run) -> Iterator[Record]:
    """The figures of a run, its time and memory."""
    labels = {**_make_labels(row), "run": run.folder.name, "seed": run.seed}
    for checkpoint in ("final", "last"):
        for split in find_splits([run]):
            place = {**labels, "split": split, "checkpoint": checkpoint}
            for measure in list_measures(run):
                value = measure.value(run, split, checkpoint)
                if value is not None:
                    yield Record(place, measure.key, value, measure.record_unit, protocol=_find_protocol(run, split))
    for key in _COSTS:
        value = number(run.get(key))
        if value is not None:
            yield Record(labels, key, value)
    for phase, value in run.ms_per_step.items():
        yield Record({**labels, "phase": phase}, "ms_per_step", value)


def _summarize_runs(records: Sequence[Record]) -> Iterator[Record]:
    """Means over the runs of each row, with sample deviations (n - 1) and numbers of seeds."""
    names = [
        name for name in dict.fromkeys(name for record in records for name in record.labels) if name not in _OF_RUNS
    ]
    for measure in dict.fromkeys(record.measure for record in records):
        of_measure = [record for record in records if record.measure == measure]
        for key, of_row in group_records(of_measure, names).items():
            values = [record.value for record in of_row if record.value is not None]
            labels = {name: label for name, label in zip(names, key, strict=True) if label is not None}
            first = of_row[0]
            yield Record(labels, f"{measure}_mean", statistics.fmean(values), first.unit, protocol=first.protocol)
            yield Record(labels, f"{measure}_seeds", len(values))
            if len(values) > 1:
                yield Record(labels, f"{measure}_deviation", statistics.stdev(values))


def _describe_row(group: Group, row: Row) -> Iterator[Record]:
    """Parameters of a row, word frequencies, the paper's figures beside ours, and its differences from the baseline."""
    labels = _make_labels(row)
    yield Record(labels, "seeds", len(row.runs))
    for part, size in flatten(mapping(row.first.get("parameters"))).items():
        count = integer(size)
        if count is not None:
            yield Record({**labels, "component": part}, "parameters", count)
    extra = row.extra_parameters(group.rows[0])
    if extra is not None:
        yield Record(labels, "parameters_added", extra)
    for split in group.splits:
        place = {**labels, "split": split}
        for measure in UNIGRAMS:
            unigram = measure.unigram(row.first, split)
            if unigram is not None:
                yield Record({**place, "checkpoint": "final"}, f"{measure.key}_unigram", unigram)
        for measure in dict.fromkeys((*group.measures, group.paper or group.measure)):
            stated = measure.paper_figure(row.first, split)
            if stated is not None:
                yield Record(place, f"{measure.key}_paper", stated.mean, protocol=stated.source, note=stated.note)
            if stated is not None and stated.deviation is not None:
                yield Record(place, f"{measure.key}_paper_deviation", stated.deviation)
        for measure in group.measures:
            yield from _compare_row(group, row, measure, split)


def _compare_row(group: Group, row: Row, measure: Measure, split: str) -> Iterator[Record]:
    """The difference from the baseline, and in fine-tuning the change of the deviation."""
    base = group.baseline_of(row)
    difference = group.difference(row, base, measure, split) if base else None
    if base is None or difference is None:
        return
    yield difference
    if row.first.finetunes:
        labels = {**_make_labels(row), "split": split, "baseline": base.name}
        for name, (value, ends, protocol) in _compare_deviations(row, base, measure, split).items():
            if value is not None:
                yield Record(labels, f"{measure.key}_{name}", value, None, ends, protocol)


def _compare_deviations(
    row: Row, base: Row, measure: Measure, split: str
) -> dict[str, tuple[float | None, Interval | None, str]]:
    """Change of the deviation over seeds from the baseline's, in percent (Skip Cross-head, Table 4), with its tests.

    Value, 95 % interval and method by name; a value is None where so few seeds cannot tell it.
    """
    before, after = base.values(measure, split), row.values(measure, split)
    pairs = before.keys() == after.keys()
    a = list(before.values())
    b = [after[seed] for seed in before] if pairs else list(after.values())
    change, welch = over_seeds.deviation_change(a, b), over_seeds.welch_interval(a, b)
    bootstrap = f"bootstrap of {over_seeds.SAMPLES:,} samples, seed {over_seeds.SEED}"
    own, other = (measure.paper_figure(one.first, split) for one in (row, base))
    stated = None
    if own and other and own.deviation is not None and other.deviation:
        stated = 100 * (own.deviation / other.deviation - 1)
    return {
        "deviation_change": (change, over_seeds.deviation_interval(a, b), "F distribution"),
        "deviation_change_bootstrap": (change, over_seeds.deviation_bootstrap(a, b, paired=pairs), bootstrap),
        "deviation_change_paper": (stated, None, ""),
        "deviation_p": (over_seeds.brown_forsythe(a, b), None, "Brown-Forsythe"),
        "difference_welch": (welch and statistics.fmean(b) - statistics.fmean(a), welch, "Welch, over seeds"),
    }


def _collect_facts(row: Row, run: Run, baseline: Row | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "folder": str(run.folder), "name": run.name, "row": row.name, "part": row.part or None, "seed": run.seed,
        "task": run.task, "corpus": run.label, "is_slice": run.is_slice, "text": row.text,
        "baseline": baseline and baseline.name, "next_token": run.next_token, "problems": list(run.problems),
        "remark": None,
    }  # fmt: skip
    if not run.finetunes and not run.next_token:
        facts["remark"] = NOT_NEXT_TOKEN if row.is_marked(PERPLEXITY) else MASKED_TOKEN
    if run.finetunes:
        facts |= {"encoder": name_encoder(run), "attention": find_attention(run)}
        facts |= {"next_token": None, "title": run.get("title")}
    signatures = [run.get("final", split, f"{BLEU.key}_signature") for split in SPLITS]
    facts["bleu_signature"] = next(filter(None, signatures), None)
    return {**facts, **{key: run.get(key) for key in _RUN_KEYS}}
