"""The tables of a group of rows, and the curves of its runs, in bands over seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from fullrank.comparison.compare import Comparison, Group, Row
from fullrank.comparison.runs import COUNTING, FURTHER, PERPLEXITY, TRANSLATION
from fullrank.records import Column, Lines, Record, Table
from fullrank.render.blocks import Cell, Grid, build_grid


def build_tables(group: Group, records: Sequence[Record], has_title: bool) -> Iterator[Grid]:
    """Build the tables of a group: its figures, each split apart where there are several of a split, then its costs.

    Args:
        group: rows that are compared with each other.
        records: records of the rows of all groups.
        has_title: whether the first table is named by the group's text, as where there are several groups.
    """
    names = {row.name for row in group.rows}
    row_records = [record for record in records if record.labels["row"] in names and "run" not in record.labels]
    shown = drop_labels(row_records, "part", "baseline")
    headings = _choose_headings(group)
    tables = [[*_declare_figures(group, split, headings)] for split in group.splits]
    if len(headings) == len(group.measures) == 1:
        tables = [[*itertools.chain(*tables)]]
    tables[0] += _declare_further(group)
    if any(len(row.runs) > 1 for row in group.rows):
        tables[0].insert(0, Column("seeds", "n"))
    title = _name_group(group, has_title)
    costs = [*_declare_costs(group)]
    for columns in (*tables, costs):
        grid = build_grid(Table("row", tuple(columns), title), shown)
        title = ""
        rows = [_mark_row(cells, group, has_badge=columns is not costs) for cells in grid.rows]
        yield dataclasses.replace(grid, rows=rows)


def drop_labels(records: Iterable[Record], *names: str) -> list[Record]:
    """Copy records without some of their labels."""
    shown = []
    for record in records:
        labels = {name: label for name, label in record.labels.items() if name not in names}
        shown.append(dataclasses.replace(record, labels=labels))
    return shown


def _name_group(group: Group, has_title: bool) -> str:
    first = group.runs[0]
    title = group.part or first.label
    if first.finetunes:
        title = str(first.get("title") or first.task)
        names = dict.fromkeys((first.task, title))
        return ", ".join(names)
    return title if has_title else ""


def _choose_headings(group: Group) -> dict[str, str]:
    """Choose the checkpoints whose figures are shown, with their headings."""
    if any(row.first.get("before") for row in group.rows):
        return {"before": "pretrained", "final": "fine-tuned"}
    if any(row.first.get("paper.checkpoint") == "last" for row in group.rows):
        return {"final": "ours, best", "last": "ours, last"}
    return {"final": "ours"}


def _declare_figures(group: Group, split: str, headings: Mapping[str, str]) -> Iterator[Column]:
    """Yield the columns of a split: for each measure our figure, the difference, the paper's figure, and that of counting."""
    split_labels = {"split": split}
    final = {"split": split, "checkpoint": "final"}
    for measure in group.measures:
        key = measure.key
        form = measure.format
        name = f"{split} {measure.short}"
        for checkpoint, heading in headings.items():
            where = {"split": split, "checkpoint": checkpoint}
            best = measure.extreme if group.ranking and checkpoint == "final" else ""
            yield Column(
                f"{key}_mean",
                heading,
                where,
                form,
                f"{key}_deviation",
                best,
                group=name,
            )
        yield Column(f"{key}_difference", "difference", final, measure.difference_format, group=name)
        yield Column(f"{key}_paper", "paper", split_labels, form, f"{key}_paper_deviation", group=name)
        for model, heading in COUNTING.items():
            yield Column(f"{key}_{model}", heading, final, form, group=name, page_only=model == "unigram")


def _declare_further(group: Group) -> Iterator[Column]:
    final = {"split": group.split, "checkpoint": "final"}
    for measure in FURTHER:
        if measure not in group.measures:
            key = measure.key
            yield Column(f"{key}_mean", f"{group.split} {measure.short}", final, measure.format, f"{key}_deviation")


def _declare_costs(group: Group) -> Iterator[Column]:
    yield Column("parameters", "total", {"component": "total"}, ",d", group="parameters")
    yield Column("parameters_added", "added", format="+,d", group="parameters")
    yield Column("tokens_per_second_mean", "tokens/s", format=",.0f")
    for phase in dict.fromkeys(phase for row in group.rows for phase in row.first.ms_per_step):
        yield Column("ms_per_step_mean", f"ms/step, {phase}", {"phase": phase}, ",.4g", page_only=True)
    yield Column("wall_seconds_mean", "seconds", format=",.0f", page_only=True)


def _mark_row(cells: Sequence[Cell], group: Group, *, has_badge: bool) -> Sequence[Cell]:
    name, *others = cells
    row = next(row for row in group.rows if row.name == name.text)
    undertrained = group.find_above("unigram")
    marks = {
        "slice": row.first.is_slice,
        "not next-token": row.is_apart(group.measure),
        "undertrained": row in undertrained,
        "has not learned trigrams": row in group.find_above("fourgram") and row not in undertrained,
    }
    badges = [badge for badge, holds in marks.items() if holds and has_badge]
    return [dataclasses.replace(name, slot=row.slot, badge=", ".join(badges)), *others]


# -- curves ------------------------------------------------------------------------------------------------------------

_POINTS = 200  # more cannot be told apart at the width of a figure


def find_curves(compared: Comparison) -> Iterator[tuple[Lines, list[Record]]]:
    """Find plots with their records: validation figure (of translations BLEU and loss), training loss, learning rate, speed."""
    rows = compared.all_rows
    measure = compared.groups[0].measure if compared.groups else PERPLEXITY
    unit = measure.words
    key = measure.key if measure.higher else "ppl"
    if measure.kind == "bits":  # metrics.jsonl counts by token
        unit = "bits per token"
        key = "nll"
    curves = [(f"Validation {unit}", unit, "valid", key)]
    if rows[0].first.task == TRANSLATION:
        curves = [
            ("Validation BLEU", "BLEU", "valid", "bleu"),
            ("Validation loss", "nats per target token", "valid", "nll"),
        ]
    curves += [
        ("Training loss", "nats per token", "train", "nll"),
        ("Learning rate", "learning rate", "train", "lr"),
        ("Speed", "tokens per second", "train", "tokens_per_second"),
    ]
    for title, unit, split, key in curves:
        records = _read_curves(rows, split, key, math.log(2) if unit == "bits per token" else 1.0)
        if records:
            values = [record.value or 0.0 for record in records]
            is_wide = "perplexity" in unit and max(values) > 4 * min(values) > 0
            curve = Lines(
                "x",
                series=("row",),
                band="seed",
                title=title,
                subtitle="Over several seeds the mean, in a band of ± one standard deviation.",
                x_title="training tokens",
                y_title=unit,
                y_scale="log" if is_wide else "linear",
                from_zero=title in ("Learning rate", "Speed"),
            )
            yield curve, records


def _read_curves(rows: Sequence[Row], split: str, key: str, unit: float) -> list[Record]:
    """Read the values of the lines of a split over training tokens; of many lines the means of neighbours.

    Args:
        rows: whose runs are read.
        split: `train` or `valid`.
        key: of the values.
        unit: what they are divided by.

    Returns:
        Records with the labels `row`, `seed` and `x`.
    """
    records = []
    for row in rows:
        for run in row.runs:
            tokens = run.read_curve("train", "tokens")
            last_step, all_tokens = max(tokens.items(), default=(1.0, 1.0))  # all steps read as many, on average
            points = sorted(run.read_curve(split, key).items())
            if len(points) > 1:
                blocks = min(len(points), _POINTS)
                for block in np.array_split(points, blocks):
                    step, y = block.mean(axis=0)
                    x = step * (all_tokens / last_step)
                    point = {"row": row.curve_name, "seed": run.seed, "x": x}
                    records.append(Record(point, "value", y / unit))
    return records
