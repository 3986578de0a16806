"""The report of runs: a page for the terminal and as one HTML file, and the same content as JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from fullrank.comparison.compare import Comparison, Group, compare
from fullrank.comparison.curves import (
    count_steps_per_epoch,
    read_training,
    read_validation,
    select_second_half,
)
from fullrank.comparison.measures import BLEU, PERPLEXITY, WITHOUT_SOS, Measure, choose_decimals
from fullrank.comparison.mechanisms import describe_mechanisms
from fullrank.comparison.resampled import DIFFERENCE, read_translations, resample_comparison
from fullrank.comparison.rows import Row, describe_attention, name_encoder
from fullrank.comparison.runs import (
    MASKED_MODELING,
    TRANSLATION,
    Run,
    collect_notes,
    find_metric_names,
    integer,
    mapping,
    number,
    read_runs,
)
from fullrank.comparison.words import (
    Summary,
    describe_protocol,
    find_signatures,
    name_protocols,
    name_split,
    summarize,
)
from fullrank.config.load import flatten
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError
from fullrank.records import Bars, Column, Dots, Lines, Record, Table, declaration_from_dict
from fullrank.render.blocks import Block, Cell, Code, Details, Facts, Grid, Heading, Legend, Page, Paragraph, Section
from fullrank.render.blocks import Group as Blocks
from fullrank.render.page import build_blocks, build_figure, write_page
from fullrank.render.tables import build_grid, format_label, format_value, group_records, join_words

_SENTENCES = 3  # shown with their translations
_NOTE_WIDTH = 240  # characters of a recipe's notes on the terminal
_FACTS = {
    "Text": [
        "corpus.name", "corpus.label", "corpus.is_slice", "corpus.tokens", "corpus.pairs", "corpus.vocabulary", "examples",
    ],
    "Training and protocol": ["seed", "protocol", "checkpoint", "recipe", "scale", "kernel", "steps", "tokens_seen"],
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """Finished runs compared: the same content as page and as JSON."""

    compared: Comparison

    @cached_property
    def resampled(self) -> tuple[list[Record], list[str]]:
        """Records of resampled test sets, and why other runs have none."""
        return resample_comparison(self.compared)

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.compared, self.resampled[0])

    @cached_property
    def records(self) -> list[Record]:
        """Every number of the report."""
        return self.compared.collect_records() + self.resampled[0]

    @property
    def notes(self) -> dict[str, str]:
        """Notes of the recipes on their figures, by recipe."""
        return collect_notes([*self.compared.runs, *self.compared.unfinished_runs])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, numbers in full precision."""
        unfinished = [
            {"folder": str(run.folder), "name": run.name, "seed": run.seed, "problems": list(run.problems)}
            for run in self.compared.unfinished_runs
        ]
        return {
            "headline": self.summary.headline,
            "records": [record.to_dict() for record in self.records],
            "runs": self.compared.describe_runs(),
            "unfinished": unfinished,
            "warnings": list(self.summary.warnings),
            "notes": self.notes,
        }

    def build_page(self, title: str | None = None) -> Page:
        """The page. Equal runs give equal pages."""
        return _build_page(self, title)

    def write(self, path: Path, title: str | None = None) -> Path:
        """Write the page to `path`, or to `report.html` in the folder `path`, and return where it is."""
        return write_page(self.build_page(title), Path(path))


def build_report(folders: Sequence[Path], table: str | None = None) -> Report:
    """The report of run folders; the first one's row is the one that others are compared with.

    table: a table of several recipes, in each of which the first row is the one that its others are compared with.
    Raises InputError for none at all, for a folder that is no run, and for runs of fine-tuning among others. A run that is
    unfinished or damaged is listed in the report, never an error.
    """
    if not folders:
        raise InputError("no run folders given; name at least one, for example runs/demo/plain")
    return Report(compare(read_runs(folders), table))


def _build_page(content: Report, title: str | None) -> Page:
    compared, summary = content.compared, content.summary
    finished, unfinished = compared.runs, compared.unfinished_runs
    labels = list(dict.fromkeys(run.label or run.task for run in finished))
    on = f" on {join_words(labels)}" if 0 < len(labels) < 3 else ""
    counts = [f"{len(compared.rows)} rows", f"{len(finished)} finished", f"{len(unfinished)} not finished"]
    first = [Paragraph(warning, "warning") for warning in summary.warnings]
    first += [Paragraph(paragraph) for paragraph in summary.paragraphs]
    builders: dict[str, Callable[[Report], Iterable[Block]]] = {
        "Comparison": _build_comparison,
        "Rows": _build_rows,
        "Curves": _build_curves,
        "Analyses": _build_analyses,
        "Samples": _build_samples,
        "Parameters": _build_parameters,
        "Configuration": _build_configurations,
        "Environment": _build_environment,
        "Reproduce": _build_commands,
        "Unfinished": _build_troubles,
    }
    on_terminal = ("Comparison", "Unfinished")
    sections = [
        Section(name, list(build(content)), page_only=name not in on_terminal) for name, build in builders.items()
    ]
    return Page(
        title or f"{len(finished) + len(unfinished)} runs{on}",
        f"fullrank report · {', '.join(counts)}",
        summary.headline,
        [*first, *_build_tiles(compared)],
        [section for section in sections if section.blocks],
    )


def _assign_slots(rows: Sequence[Row]) -> dict[str, int]:
    """Colours of rows, by their names in tables and at curves."""
    return {name: row.slot for row in rows for name in (row.name, row.curve_name)}


# -- the comparison ----------------------------------------------------------------------------------------------------


def _build_tiles(compared: Comparison) -> Iterator[Block]:
    """Key figures of a comparison of one group."""
    group = compared.groups[0] if len(compared.groups) == 1 else None
    if group is None or not group.measured:
        return
    measure, split = group.measure, group.split
    best = group.find_best(group.rows)
    row = best or group.measured[0]
    extreme = measure.extreme.capitalize() if best and len(group.measured) > 1 else "Final"
    tiles = [(f"{extreme} {name_split(split)} {measure.words}: {row.name}", measure.show(row.mean(measure, split)))]
    base = group.baseline_of(row)
    difference = group.difference(row, base, measure, split) if base else None
    if base and difference:
        tiles.append((f"Against {base.name}", measure.show_difference(difference.value)))
        tiles.append(("Parameters added", format_value(row.extra_parameters(base), "+,d")))
    tiles.append((f"Unigram {measure.words}", measure.show(measure.unigram(row.first, split))))
    tiles.append(("Training tokens per run", format_value(number(row.first.get("tokens_seen")), ",d")))
    yield Facts([tile for tile in tiles if tile[1] != "-"], "tiles")


def _build_comparison(content: Report) -> Iterator[Block]:
    """The tables of all groups, resampled test sets, and what weakens the comparison."""
    compared = content.compared
    protocols = name_protocols(compared.rows)
    for group in compared.groups:
        records = _select_records(content, group)
        yield _build_group_grid(group, records, len(compared.groups) > 1, protocols)
        deviations = build_grid(_declare_deviations(group), records)
        if len(deviations.headings) > 2:
            yield deviations
    yield from (Paragraph(f"BLEU: sacreBLEU, {signature}.", "note") for signature in find_signatures(compared.runs))
    yield from _build_resampled(content)
    yield from (Paragraph(caution, "note") for caution in content.summary.cautions)
    for recipe, text in content.notes.items():
        rest = f" ... (`fullrank recipes show {recipe}`)"
        yield Paragraph(
            f"Notes of {recipe}: {text}",
            "note",
            textwrap.shorten(f"Notes of {recipe}: {text}", _NOTE_WIDTH, placeholder=rest),
        )
    if compared.rows:
        yield from _build_details(content)


def _select_records(content: Report, group: Group) -> list[Record]:
    """The records of a group's rows, without the labels that are the same for all or stand in the heading."""
    names = {row.name for row in group.rows}
    records = [record for record in content.records if record.labels["row"] in names and "run" not in record.labels]
    return _drop_labels(records, "part", "baseline")


def _build_group_grid(group: Group, records: list[Record], several: bool, protocols: Mapping[str, str]) -> Grid:
    """Rows with figures (the paper's beside ours), differences, parameters and speed; beneath them word frequencies."""
    records = [*records, *_find_unigrams(group)]
    first = group.rows[0].first
    title = _describe_examples(first) if first.finetunes else group.part or first.label
    if group.is_marked:
        title = f"{title}: {NOT_NEXT_TOKEN}".removeprefix(": ")
    has_title = several or group.is_marked or first.finetunes
    table = Table("row", tuple(_declare_columns(group, records)), title if has_title else "")
    grid = build_grid(table, records)
    return dataclasses.replace(grid, rows=[_mark_row(cells, group, protocols) for cells in grid.rows])


def _describe_examples(run: Run) -> str:
    """`glue/cola, Corpus of Linguistic Acceptability: train 2,000 examples (slice), dev 1,043 examples`."""
    counts = []
    for split, count in mapping(run.get("examples")).items():
        part = " (slice)" if run.get("slice", split) else ""
        counts.append(f"{split} {format_value(number(count), ',d')} examples{part}")
    names = dict.fromkeys([run.task, str(run.get("title") or run.task)])
    return f"{', '.join(names)}: {', '.join(counts)}"


def _drop_labels(records: Iterable[Record], *names: str) -> list[Record]:
    """The records without labels that a table does not show."""
    return [
        dataclasses.replace(record, labels={name: label for name, label in record.labels.items() if name not in names})
        for record in records
    ]


def _find_unigrams(group: Group) -> Iterator[Record]:
    key = f"{group.measure.key}_mean"
    for row in group.rows[:1]:
        for split in group.splits:
            unigram = group.measure.unigram(row.first, split)
            if unigram is not None:
                yield Record({"row": "unigram", "split": split, "checkpoint": "final"}, key, unigram)


def _declare_columns(group: Group, records: Sequence[Record]) -> Iterator[Column]:
    several = any(len(row.runs) > 1 for row in group.rows)
    if several:
        yield Column("seeds", "n")
    shows_last = any(row.first.paper.get("checkpoint") == "last" for row in group.rows)
    for split in group.splits:
        for measure in group.measures:
            yield from _declare_figure(group, measure, split, records, shows_last)
    for measure in group.others:
        for split in group.splits[: 1 if measure not in (WITHOUT_SOS,) else 2]:
            hidden = measure is PERPLEXITY and not all(run.next_token for row in group.rows for run in row.runs)
            if not hidden:
                where = {"split": split, "checkpoint": "final"}
                name = f"{split} {measure.short}"
                yield Column(
                    f"{measure.key}_mean", name, where, _find_format(measure, records), f"{measure.key}_deviation"
                )
    yield Column("parameters", "total", {"component": "total"}, ",d", group="parameters")
    yield Column("parameters_added", "added", format="+,d", group="parameters")
    yield Column("tokens_per_second_mean", "tokens/s", format=",.0f")
    for phase in dict.fromkeys(phase for row in group.rows for phase in row.first.ms_per_step):
        yield Column("ms_per_step_mean", f"ms/step, {phase}", {"phase": phase}, ",.4g", page_only=True)
    yield Column("wall_seconds_mean", "seconds", format=",.0f", page_only=True)


def _declare_figure(
    group: Group, measure: Measure, split: str, records: Sequence[Record], shows_last: bool
) -> Iterator[Column]:
    """The paper's figure, ours and the difference."""
    key, name = measure.key, f"{split} {measure.short}"
    where, form = {"split": split, "checkpoint": "final"}, _find_format(measure, records)
    best: Literal["", "lowest", "highest"] = "" if group.undertrained or group.is_marked else measure.extreme
    paper = measure if group.paper in group.measures or group.paper is None else group.paper
    paper_name = "paper" if paper is measure else f"paper, {paper.short}"
    yield Column(
        f"{key}_mean", "ours, best" if shows_last else "ours", where, form, f"{key}_deviation", best, group=name
    )
    if shows_last:
        last = {"split": split, "checkpoint": "last"}
        yield Column(f"{key}_mean", "ours, last", last, form, f"{key}_deviation", group=name)
    yield Column(f"{key}_difference", "difference", where, _find_difference_format(measure, records), group=name)
    yield Column(f"{paper.key}_paper", paper_name, {"split": split}, form, f"{paper.key}_paper_deviation", group=name)


def _find_format(measure: Measure, records: Sequence[Record]) -> str:
    values = [record.value for record in records if record.measure == f"{measure.key}_mean"]
    return measure.format(max((value for value in values if value is not None), default=0.0))


def _find_difference_format(measure: Measure, records: Sequence[Record]) -> str:
    """Digits enough that no decided difference looks like zero."""
    decimals = 2 if measure.higher else 1
    for record in records:
        if record.measure == f"{measure.key}_difference" and record.value is not None:
            scale = 1 if measure.higher else 100
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
    columns = []
    for split in group.splits:
        for measure in group.measures:
            key, where, name = measure.key, {"split": split}, f"{split} {measure.short}"
            columns += [
                Column(f"{key}_deviation_change", "change", where, "+.1f", group=name),
                Column(f"{key}_deviation_change_bootstrap", "by bootstrap", where, "+.1f", group=name),
                Column(f"{key}_deviation_change_paper", "paper", where, "+.1f", group=name),
                Column(f"{key}_deviation_p", "p of equal deviations", where, ".3f", group=name),
            ]
    title = "Change of the deviation over seeds in percent: 95 % intervals by the F distribution and by bootstrap"
    return Table("row", tuple(columns), title)


def _build_resampled(content: Report) -> Iterator[Block]:
    """Every row against its baseline on resampled test sets."""
    records, left_out = content.resampled
    columns = (
        Column("bleu_resampled", "BLEU", format=".2f"),
        Column(DIFFERENCE, "difference over sentences", format="+.2f"),
        Column("bleu_resampled_p", "p", format=".3f"),
        Column("bleu_resampled_ahead", "samples ahead", format=".0%"),
        Column("bleu_seeds_difference", "difference over seeds", format="+.2f"),
    )
    for (split,), of_split in group_records(records, ("split",)).items():
        table = Table(("row", "baseline"), columns, f"BLEU on resampled sentences, {name_split(format_label(split))}")
        yield build_grid(table, _drop_labels(of_split, "split"))
    if records:
        protocol = next(record.protocol for record in records if record.protocol)
        yield Paragraph(
            f"P{protocol[1:]} (Koehn 2004). Its interval and p are about these very models on other sentences like these, "
            "the interval over seeds about training again.", "note",
        )  # fmt: skip
    yield from (Paragraph(f"Left out: {sentence}.", "note") for sentence in left_out)


def _build_details(content: Report) -> Iterator[Block]:
    """Every figure of rows and of runs, and what the runs cost."""
    records = _drop_labels(content.records, "part")
    figures = [record for record in records if "checkpoint" in record.labels and "baseline" not in record.labels]
    means = [record for record in figures if record.measure.endswith("_mean")]
    of_runs = [record for record in figures if "run" in record.labels]
    costs = [record for record in records if "run" in record.labels and "split" not in record.labels]
    yield Details("Means of every figure", [build_grid(Table(("row", "split", "checkpoint")), means)])
    tables = Table(("row", "seed", "run")), Table(("row", "seed", "run", "split"))
    grids = [build_grid(table, shown) for table, shown in zip(tables, (costs, of_runs), strict=True)]
    yield Details(f"Single runs ({len(content.compared.runs)})", grids)


def _build_rows(content: Report) -> Iterator[Block]:
    """What each row is, its seeds as dots, and what else the paper states of it."""
    rows = content.compared.rows
    figures = []
    for group in content.compared.groups:
        if len(group.rows) > 1 and not group.is_marked:
            records = [
                record for record in content.records if record.labels.get("row") in {row.name for row in group.rows}
            ]
            for split in group.splits if rows[0].first.finetunes else group.splits[:1]:
                for measure in group.measures:
                    title = f"{group.part} {name_split(split)} {measure.words}".strip()
                    where = {"split": split, "checkpoint": "final"}
                    if not any(record.measure == measure.key and record.has(where) for record in records):
                        continue
                    plot = Dots(
                        "row",
                        measure.key,
                        where,
                        title,
                        "A dot is one run, the bar their mean. The axis does not start at zero.",
                    )
                    figures.append(build_figure(plot, records, _assign_slots(rows)))
    mechanisms = [(row.name, "; ".join(_describe_row(row))) for row in rows]
    yield Blocks([*figures, Facts(mechanisms)])


def _describe_row(row: Row) -> Iterator[str]:
    """Mechanisms or encoder of a row, and what else the paper states of it."""
    run = row.first
    if run.finetunes:
        train = mapping(run.config.get("train"))
        yield f"{name_encoder(run)}, {describe_attention(run) or 'its own attention'}"
        for key in ("learning_rate", "mixing_learning_rate"):
            if train.get(key):
                yield f"{key.replace('_', ' ')} {train[key]}"
        yield f"{run.get('epochs')} epochs"
    else:
        yield describe_mechanisms(run.config)
    shown = ("valid", "test", "dev", "metric", *find_metric_names(run))
    others = {key.replace("_", " "): value for key, value in run.paper.items() if not key.startswith(shown)}
    if others:
        yield f"the paper states: {_describe_value(others)}"


# -- curves, analyses, samples -----------------------------------------------------------------------------------------


def _build_curves(content: Report) -> Iterator[Block]:
    compared = content.compared
    rows = [*compared.rows, *compared.unfinished]
    slots = _assign_slots(rows)
    figures = [build_figure(plot, records, slots) for plot, records in _find_validation_curves(compared, rows)]
    small = [build_figure(plot, records, slots) for plot, records in _find_training_curves(compared, rows)]
    if not figures and not small:
        return
    if compared.mixed_texts:
        yield Paragraph("Curves measured on different texts do not compare.", "warning")
    if any(run.sees_future for row in rows for run in row.runs):
        yield Paragraph(f"† {NOT_NEXT_TOKEN}; such a curve compares with no other.", "warning")
    yield Legend([(row.slot, row.curve_name) for row in rows])
    yield Blocks([*figures, *small])


Drawn = Iterator[tuple[Lines, list[Record]]]


def _find_validation_curves(compared: Comparison, rows: Sequence[Row]) -> Drawn:
    """The validation figure over training tokens; of translations BLEU (as Mixhead's Fig. 2) and loss, over epochs."""
    measure = compared.groups[0].measure if compared.groups else PERPLEXITY
    epoch = count_steps_per_epoch(compared.runs) if compared.task == TRANSLATION else None
    x_title = "epochs" if epoch else "training tokens"
    if compared.task == TRANSLATION:
        yield from _draw_twice(
            "Validation BLEU", "BLEU", x_title, read_validation(rows, BLEU.logged_value, "BLEU", epoch)
        )
        losses = read_validation(rows, lambda line: line.get("nll"), "nll", epoch)
        yield from _draw_twice("Validation loss", "nats per target token", x_title, losses)
    else:
        unit = measure.unit
        yield from _draw_twice(
            f"Validation {unit}", unit, x_title, read_validation(rows, measure.logged_value, unit, None)
        )


def _draw_twice(title: str, unit: str, x_title: str, records: list[Record]) -> Drawn:
    """The whole training, on a logarithmic axis where it falls far, and its second half alone."""
    if not records:
        return
    values = [record.value or 0.0 for record in records]
    wide = min(values) > 0 and max(values) > 4 * min(values) and "bits" not in unit and unit != "BLEU"
    note = "Over several seeds the mean, in a band of ± one standard deviation."
    plot = Lines("x", series=("row",), band="seed", title=title, subtitle=note, x_title=x_title, y_title=unit)
    yield dataclasses.replace(plot, y_scale="log" if wide else "linear"), records
    half = select_second_half(records)
    if half:
        yield dataclasses.replace(plot, title=f"{title}, second half"), half


def _find_training_curves(compared: Comparison, rows: Sequence[Row]) -> Drawn:
    """Training loss, learning rate and speed."""
    unit = "nats per masked token" if compared.task == MASKED_MODELING else "nats per token"
    plot = Lines("x", series=("row",), band="seed", x_title="training tokens")
    lightly = "Smoothed lightly where there are many lines."
    curves = [
        ("Training loss", unit, lightly, False, read_training(rows, "nll", smooth=True)),
        ("Learning rate", "learning rate", "", True, read_training(rows, "lr", smooth=False)),
        ("Speed", "tokens per second", lightly, True, read_training(rows, "tokens_per_second", smooth=True)),
    ]
    for title, y_title, note, from_zero, records in curves:
        if records:
            yield dataclasses.replace(plot, title=title, subtitle=note, y_title=y_title, from_zero=from_zero), records


def _build_analyses(content: Report) -> Iterator[Block]:
    """Tables and plots that `fullrank analyze` has left in run folders, all runs of one measurement together."""
    compared = content.compared
    contents: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for row in (*compared.rows, *compared.unfinished):
        for run in row.runs:
            name = row.name if len(row.runs) == 1 else f"{row.name}, seed {run.seed}"
            for analysis in run.analyses:
                contents.setdefault(str(analysis.get("measurement")), []).append((name, analysis))
    for measurement, analyses in contents.items():
        try:
            blocks = _build_analysis(analyses)
        except (KeyError, TypeError, ValueError, AttributeError):  # of another version
            continue
        first = analyses[0][1]
        yield Paragraph(f"{measurement}: {first.get('text')}, segments of {first.get('segment_length')} tokens.")
        yield from blocks


def _build_analysis(analyses: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Block]:
    records = []
    for name, analysis in analyses:
        for content in analysis["records"]:
            record = Record.from_dict(content)
            records.append(dataclasses.replace(record, labels={**record.labels, "model": name}))
    tables, plots = (tuple(map(declaration_from_dict, analyses[0][1][key])) for key in ("tables", "plots"))
    return build_blocks(tables, plots, records)


def _build_samples(content: Report) -> Iterator[Block]:
    """A text that each row has written, or the first sentences with the translation of every row."""
    compared = content.compared
    texts = []
    for row in compared.rows:
        sample = mapping(row.first.get("sample"))
        if sample.get("text"):
            drawn = f"{sample.get('tokens')} tokens, temperature {sample.get('temperature')}, seed {sample.get('seed')}"
            texts.append((f"{row.name} ({drawn})", str(sample["text"])))
    for group in compared.groups if compared.task == TRANSLATION else ():
        texts += _find_sentences(group)
    if texts:
        yield Facts(texts, "samples")
        yield Paragraph("By the best checkpoint of the first seed. They show the road, not a ranking.", "note")


def _find_sentences(group: Group) -> Iterator[tuple[str, str]]:
    translations = {}
    for row in group.rows:
        try:
            translations[row.name] = read_translations(row.first.folder, group.split)
        except InputError:
            continue
    references = next((references for _, references in translations.values()), [])
    for index, reference in enumerate(references[:_SENTENCES]):
        yield "Reference", reference
        for name, (hypotheses, own_references) in translations.items():
            if own_references == references:
                yield name, hypotheses[index]


# -- parameters, configuration, environment, commands ------------------------------------------------------------------


def _build_parameters(content: Report) -> Iterator[Block]:
    records = [record for record in content.records if record.measure == "parameters"]
    parts = [record for record in records if record.labels["component"] != "total" and record.value]
    if not parts:
        return
    if not content.compared.rows[0].first.finetunes:  # there parts overlap
        yield build_figure(Bars("row", "component", "parameters", "Parameters"), parts, wide=True)
    names = dict.fromkeys(format_label(record.labels["component"]) for record in (*parts, *records))
    columns = [Column("parameters", name.replace("_", " "), {"component": name}, ",d") for name in names]
    yield build_grid(Table("row", tuple(columns)), _drop_labels(records, "part"))


def _to_text(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def _build_configurations(content: Report) -> Iterator[Block]:
    """The keys in which rows differ, then every resolved configuration."""
    compared = content.compared
    rows = [row for row in (*compared.rows, *compared.unfinished) if row.first.config]
    if len(rows) > 1:
        lines = list(_compare_configurations(rows))
        headings = [Heading("key", left=True), *(Heading(row.name, left=True) for row in rows)]
        note = "All other keys are the same." if lines else "All configurations are the same."
        yield Grid(headings, lines, notes=[note])
    for row in rows:
        text = yaml.safe_dump(
            dict(row.first.config), sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
        )
        yield Details(f"Resolved configuration of {row.name}", [Code(text)])


def _compare_configurations(rows: Sequence[Row]) -> Iterator[list[Cell]]:
    settings = [[flatten(run.config) for run in row.runs] for row in rows]
    for key in dict.fromkeys(key for row in settings for run in row for key in run):
        values = []
        for row in settings:
            texts = dict.fromkeys(_to_text(run[key]) if key in run else "(absent)" for run in row)
            values.append(", ".join(texts))
        if len({*values}) > 1:
            yield [Cell(key), *(Cell(value, strong=value != values[0]) for value in values)]


def _build_environment(content: Report) -> Iterator[Block]:
    """Text, protocol and machine: one value where all runs agree, else one for each group of rows."""
    rows = content.compared.rows
    keys = dict.fromkeys(key for row in rows for run in row.runs for key in mapping(run.get("environment")))
    cards = {**_FACTS, "Machine and versions": [f"environment.{key}" for key in keys]}
    blocks = []
    for title, names in cards.items():
        items = [(name.rpartition(".")[2].replace("_", " "), _share(rows, name)) for name in names]
        items = [(label, value) for label, value in items if value]
        if items:
            blocks.append(Facts(items, "card", title))
    if blocks:
        yield Blocks(blocks, small=True)


def _share(rows: Sequence[Row], name: str) -> str:
    """The value in which all rows agree, or every value with the names of the rows that have it."""
    by_value: dict[str, list[str]] = {}
    for row in rows:
        values = dict.fromkeys(_describe_value(run.get(*name.split("."))) for run in row.runs)
        by_value.setdefault(", ".join(filter(None, values)), []).append(row.name)
    if len(by_value) == 1:
        return next(iter(by_value))
    return "; ".join(f"{value or '-'} ({', '.join(names)})" for value, names in by_value.items())


def _describe_value(value: object) -> str:
    """`train 700,000, valid 40,000` of a mapping; nothing for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_describe_value(inner)}" for key, inner in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def _build_commands(content: Report) -> Iterator[Block]:
    """Commands that train runs again from the configurations saved with them."""
    compared = content.compared
    for row in compared.rows:
        run = row.first
        origin = [f"{word} {run.origin(word)}" for word in ("recipe", "row", "scale") if run.origin(word)]
        seeds = [str(run.seed) for run in row.runs if run.seed is not None]
        origin += [f"seeds {join_words(seeds)}"] if seeds else []
        commands = [_repeat_command(run) for run in row.runs]
        yield Code("\n".join(commands), f"{row.name}: {', '.join(origin)}", row.slot)
    if compared.rows:
        yield Paragraph(
            "Each command trains the resolved configuration saved with a run, seed included, into a new folder; the same "
            "figures need the same versions, device and number of threads.", "note",
        )  # fmt: skip


def _repeat_command(run: Run) -> str:
    folder = run.folder
    again = folder.with_name(f"{folder.name}-again") if folder.name not in ("", "..") else folder / "again"
    return shlex.join(["fullrank", _choose_verb(run), str(folder / "config.yaml"), "--out", str(again)])


def _choose_verb(run: Run) -> str:
    return "finetune" if run.finetunes else "train"


def _build_troubles(content: Report) -> Iterator[Block]:
    """Runs that are not finished, how far they are and how they go on; finished runs with damaged files."""
    compared = content.compared
    for run in compared.unfinished_runs:
        reasons = "; ".join([_describe_progress(compared, run), *run.problems])
        yield Paragraph(f"Not finished: {run.folder} ({reasons}). It goes on with", "note")
        yield Code(shlex.join(["fullrank", _choose_verb(run), str(run.folder)]))
    for run in compared.runs:
        if run.problems:
            yield Paragraph(f"Finished, damaged in part: {run.folder} ({'; '.join(run.problems)})", "note")


def _describe_progress(compared: Comparison, run: Run) -> str:
    steps = [step for step in (integer(line.get("step")) for line in run.metrics) if step is not None]
    if not steps:
        return "no step is recorded yet"
    measure = compared.groups[0].measure if compared.groups else PERPLEXITY
    values = [measure.logged_value(line) for line in run.metrics if line.get("split") == "valid"]
    values = [value for value in values if value is not None]
    last = f", last validation {measure.unit} {measure.show(values[-1])}" if values else ""
    remark = f" ({NOT_NEXT_TOKEN})" if last and run.sees_future else ""
    return f"reached step {max(steps):,}{last}{remark}"
