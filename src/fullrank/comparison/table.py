"""The table of a group of rows: figures with the paper's beside ours, differences, parameters, speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fullrank.comparison.compare import Group
from fullrank.comparison.measures import FURTHER, Measure, choose_decimals
from fullrank.comparison.resampled import DIFFERENCE
from fullrank.comparison.words import describe_protocol, name_split
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.records import Column, Record, Table
from fullrank.render.blocks import Cell, Grid
from fullrank.render.tables import build_grid, format_label, group_records


def build_tables(
    group: Group, records: Sequence[Record], has_title: bool, protocols: Mapping[str, str]
) -> Iterator[Grid]:
    """The tables of a group. records: those of all rows. protocols: marks of protocols of evaluation."""
    names = {row.name for row in group.rows}
    shown = [record for record in records if record.labels["row"] in names and "run" not in record.labels]
    shown = drop_labels(shown, "part", "baseline")
    shown += _find_unigrams(group)
    columns = [*_declare_figures(group, shown), *_declare_costs(group)]
    grid = build_grid(Table("row", tuple(columns), _name_group(group, has_title)), shown)
    yield dataclasses.replace(grid, rows=[_mark_row(cells, group, protocols) for cells in grid.rows])
    deviations = build_grid(_declare_deviations(group), shown)
    if len(deviations.headings) > 2:
        yield deviations


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
        return ", ".join(dict.fromkeys([first.task, str(first.get("title") or first.task)]))
    if group.is_marked:
        return f"{title}: {NOT_NEXT_TOKEN}".removeprefix(": ")
    return title if has_title else ""


def _find_unigrams(group: Group) -> Iterator[Record]:
    """Word frequencies alone, as a row beneath the others."""
    for split in group.splits:
        unigram = group.measure.unigram(group.runs[0], split)
        if unigram is not None:
            labels = {"row": "unigram", "split": split, "checkpoint": "final"}
            yield Record(labels, f"{group.measure.key}_mean", unigram)


def _declare_figures(group: Group, records: Sequence[Record]) -> Iterator[Column]:
    """Numbers of seeds; of each split and measure our figures, the difference and the paper's; then further measures."""
    if any(len(row.runs) > 1 for row in group.rows):
        yield Column("seeds", "n")
    has_last = any(row.first.get("paper.checkpoint") == "last" for row in group.rows)
    headings = {"final": "ours, best", "last": "ours, last"} if has_last else {"final": "ours"}
    for split in group.splits:
        for measure in group.measures:
            key, name = measure.key, f"{split} {measure.short}"
            form = _find_format(measure, records)
            best = measure.extreme if group.ranking else ""
            for checkpoint, heading in headings.items():
                where = {"split": split, "checkpoint": checkpoint}
                emphasis = best if checkpoint == "final" else ""
                yield Column(f"{key}_mean", heading, where, form, f"{key}_deviation", emphasis, group=name)
            where = {"split": split, "checkpoint": "final"}
            yield Column(
                f"{key}_difference", "difference", where, _find_difference_format(measure, records), group=name
            )
            deviation = f"{key}_paper_deviation"
            yield Column(f"{key}_paper", "paper", {"split": split}, form, deviation, group=name)
    for measure in FURTHER:
        if measure in group.measures:
            continue
        where = {"split": group.split, "checkpoint": "final"}
        heading, form = f"{group.split} {measure.short}", _find_format(measure, records)
        yield Column(f"{measure.key}_mean", heading, where, form, f"{measure.key}_deviation")


def _declare_costs(group: Group) -> Iterator[Column]:
    yield Column("parameters", "total", {"component": "total"}, ",d", group="parameters")
    yield Column("parameters_added", "added", format="+,d", group="parameters")
    yield Column("tokens_per_second_mean", "tokens/s", format=",.0f")
    for phase in dict.fromkeys(phase for row in group.rows for phase in row.first.ms_per_step):
        yield Column("ms_per_step_mean", f"ms/step, {phase}", {"phase": phase}, ",.4g", page_only=True)
    yield Column("wall_seconds_mean", "seconds", format=",.0f", page_only=True)


def _find_format(measure: Measure, records: Sequence[Record]) -> str:
    values = [record.value or 0.0 for record in records if record.measure == f"{measure.key}_mean"]
    return measure.format(max(values, default=0.0))


def _find_difference_format(measure: Measure, records: Sequence[Record]) -> str:
    """Digits enough that no decided difference looks like zero."""
    scale, decimals = (1, 2) if measure.higher else (100, 1)
    for record in records:
        if record.measure == f"{measure.key}_difference" and record.value is not None:
            low, high = (scale * end for end in record.interval) if record.interval else (None, None)
            decimals = max(decimals, choose_decimals(scale * record.value, low, high, decimals))
    return f"+.{decimals}{'f' if measure.higher else '%'}"


def _mark_row(cells: Sequence[Cell], group: Group, protocols: Mapping[str, str]) -> Sequence[Cell]:
    """Colour and badges at the name of a row: a slice, its protocol, undertrained."""
    row = next((row for row in group.rows if row.name == cells[0].text), None)
    if row is None:
        return [dataclasses.replace(cell, quiet=True) for cell in cells]
    badges = ["slice"] if row.first.is_slice else []
    badges += [f"protocol {protocols[describe_protocol(row)]}"] if len(protocols) > 1 else []
    badges += ["undertrained"] if row in group.undertrained else []
    name = f"{row.name} †" if group.is_marked else row.name
    return [dataclasses.replace(cells[0], text=name, slot=row.slot, badge=", ".join(badges)), *cells[1:]]


def _declare_deviations(group: Group) -> Table:
    """How the deviation over seeds changes from the baseline's (Skip Cross-head, Table 4)."""
    headings = {
        "deviation_change": ("change", "+.1f"),
        "deviation_change_bootstrap": ("by bootstrap", "+.1f"),
        "deviation_change_paper": ("paper", "+.1f"),
        "deviation_p": ("p of equal deviations", ".3f"),
    }
    columns = []
    for split in group.splits:
        for measure in group.measures:
            for ending, (heading, form) in headings.items():
                name = f"{split} {measure.short}"
                columns.append(Column(f"{measure.key}_{ending}", heading, {"split": split}, form, group=name))
    title = "Change of the deviation over seeds in percent: 95 % intervals by the F distribution and by bootstrap"
    return Table("row", tuple(columns), title)


_RESAMPLED = (
    Column("bleu_resampled", "BLEU", format=".2f"),
    Column(DIFFERENCE, "difference over sentences", format="+.2f"),
    Column("bleu_resampled_p", "p", format=".3f"),
    Column("bleu_resampled_ahead", "samples ahead", format=".0%"),
    Column("bleu_seeds_difference", "difference over seeds", format="+.2f"),
)


def build_resampled(records: Sequence[Record]) -> Iterator[Grid]:
    """Every row against its baseline on resampled test sets, a table for each split."""
    for (split,), of_split in group_records(records, ("split",)).items():
        title = f"BLEU on resampled sentences, {name_split(format_label(split))}"
        yield build_grid(Table(("row", "baseline"), _RESAMPLED, title), drop_labels(of_split, "split"))
