"""The table of a group of rows: figures with the paper's beside ours, differences, parameters, speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from fullrank.comparison.compare import Group
from fullrank.comparison.measures import COUNTING, FURTHER
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.records import Column, Record, Table
from fullrank.render.blocks import Cell, Grid
from fullrank.render.tables import build_grid

_DEVIATION_COLUMNS = (  # of fine-tuning: deviations over seeds (Skip Cross-head, Table 4)
    ("deviation_change", "deviation", "+.1f"),
    ("deviation_change_paper", "deviation, paper", "+.1f"),
    ("deviation_p", "p of equal deviations", ".3f"),
)


def build_table(group: Group, records: Sequence[Record], has_title: bool) -> Grid:
    """The table of a group. records: those of all rows."""
    names = {row.name for row in group.rows}
    shown = []
    for record in records:
        if record.labels["row"] in names and "run" not in record.labels:
            shown.append(record)
    shown = drop_labels(shown, "part", "baseline")
    columns = (*_declare_figures(group), *_declare_costs(group))
    table = Table("row", columns, _name_group(group, has_title))
    grid = build_grid(table, shown)
    rows = [_mark_row(cells, group) for cells in grid.rows]
    return dataclasses.replace(grid, rows=rows)


def drop_labels(records: Iterable[Record], *names: str) -> list[Record]:
    """The records without labels that a table does not show."""
    shown = []
    for record in records:
        labels = {name: label for name, label in record.labels.items() if name not in names}
        shown.append(dataclasses.replace(record, labels=labels))
    return shown


def _name_group(group: Group, has_title: bool) -> str:
    first = group.runs[0]
    title = group.part or first.label
    if first.finetunes:
        names = [first.task, str(first.get("title") or first.task)]
        return ", ".join(dict.fromkeys(names))
    if group.is_marked:
        return f"{title}: {NOT_NEXT_TOKEN}".removeprefix(": ")
    return title if has_title else ""


def _declare_figures(group: Group) -> Iterator[Column]:
    """Numbers of seeds; of each split and measure our figures, the difference and the paper's; then further measures."""
    if any(len(row.runs) > 1 for row in group.rows):
        yield Column("seeds", "n")
    has_last = any(row.first.get("paper.checkpoint") == "last" for row in group.rows)
    headings = {"final": "ours"}
    if has_last:
        headings = {"final": "ours, best", "last": "ours, last"}
    for split in group.splits:
        for measure in group.measures:
            key = measure.key
            name = f"{split} {measure.short}"
            form = measure.format
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
            final = {"split": split, "checkpoint": "final"}
            yield Column(
                f"{key}_difference",
                "difference",
                final,
                measure.difference_format,
                group=name,
            )
            yield Column(f"{key}_paper", "paper", {"split": split}, form, f"{key}_paper_deviation", group=name)
            for model, heading in COUNTING.items():
                yield Column(f"{key}_{model}", heading, final, form, group=name, page_only=model == "unigram")
            for ending, heading, further_form in _DEVIATION_COLUMNS:
                yield Column(f"{key}_{ending}", heading, {"split": split}, further_form, group=name)
    for measure in FURTHER:
        if measure not in group.measures:
            yield Column(
                f"{measure.key}_mean",
                f"{group.split} {measure.short}",
                {"split": group.split, "checkpoint": "final"},
                measure.format,
                f"{measure.key}_deviation",
            )


def _declare_costs(group: Group) -> Iterator[Column]:
    yield Column("parameters", "total", {"component": "total"}, ",d", group="parameters")
    yield Column("parameters_added", "added", format="+,d", group="parameters")
    yield Column("tokens_per_second_mean", "tokens/s", format=",.0f")
    phases = dict.fromkeys(phase for row in group.rows for phase in row.first.ms_per_step)
    for phase in phases:
        yield Column("ms_per_step_mean", f"ms/step, {phase}", {"phase": phase}, ",.4g", page_only=True)
    yield Column("wall_seconds_mean", "seconds", format=",.0f", page_only=True)


def _mark_row(cells: Sequence[Cell], group: Group) -> Sequence[Cell]:
    """Colour and badges at the name of a row: a slice, and what it has not learned."""
    row = next(row for row in group.rows if row.name == cells[0].text)
    badges = ["slice"] if row.first.is_slice else []
    if row in group.find_above("unigram"):
        badges.append("undertrained")
    elif row in group.find_above("fourgram"):
        badges.append("has not learned trigrams")
    name = f"{row.name} †" if group.is_marked else row.name
    name_cell = dataclasses.replace(cells[0], text=name, slot=row.slot, badge=", ".join(badges))
    return [name_cell, *cells[1:]]
