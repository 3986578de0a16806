"""The report of runs: a page for the terminal and as one HTML file, and the same content as JSON."""

from __future__ import annotations

import contextlib
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fullrank.comparison.compare import Comparison, compare
from fullrank.comparison.curves import find_curves
from fullrank.comparison.rows import Row, find_signatures
from fullrank.comparison.runs import Analysis, Run, integer, read_runs
from fullrank.comparison.table import build_table, drop_labels
from fullrank.comparison.words import Summary, name_split, summarize
from fullrank.config.recipe import load
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError
from fullrank.records import Column, Dots, Record, Table
from fullrank.render.blocks import Block, Cell, Code, Details, Facts, Grid, Heading, Legend, Page, Paragraph, Section
from fullrank.render.blocks import Group as Blocks
from fullrank.render.page import build_blocks, build_figure, write_page
from fullrank.render.plots import find_points
from fullrank.render.tables import build_grid, format_label, join_words

_NOTE_WIDTH = 240  # characters of a recipe's notes on the terminal
_FACTS = (
    "corpus.name", "corpus.label", "corpus.is_slice", "corpus.tokens", "corpus.pairs", "corpus.vocabulary", "examples",
    "protocol", "checkpoint", "recipe", "scale", "paper", "kernel", "steps", "tokens_seen",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """Finished runs compared: the same content as page and as JSON."""

    compared: Comparison

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.compared)

    @cached_property
    def records(self) -> list[Record]:
        """Every number of the report."""
        return self.compared.collect_records()

    @property
    def notes(self) -> dict[str, str]:
        """Notes of the recipes on their figures, by recipe; none of a recipe that is no longer there."""
        notes = {}
        for run in (*self.compared.runs, *self.compared.unfinished_runs):
            name = str(run.get("recipe") or "")
            with contextlib.suppress(InputError):
                notes[name] = load(name).notes
        return {name: text for name, text in notes.items() if text}

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
        compared, summary = self.compared, self.summary
        finished, unfinished = compared.runs, compared.unfinished_runs
        labels = list(dict.fromkeys(run.label or run.task for run in finished))
        on = f" on {join_words(labels)}" if 0 < len(labels) < 3 else ""
        counts = f"{len(compared.rows)} rows, {len(finished)} finished, {len(unfinished)} not finished"
        first = [Paragraph(warning, "warning") for warning in summary.warnings]
        first += [Paragraph(paragraph) for paragraph in summary.paragraphs]
        sections = []
        for name, build in _SECTIONS.items():
            blocks = list(build(self))
            if blocks:
                sections.append(Section(name, blocks, page_only=name not in ("Comparison", "Unfinished")))
        return Page(
            title or f"{len(finished) + len(unfinished)} runs{on}",
            f"fullrank report · {counts}",
            summary.headline,
            first,
            sections,
        )

    def write(self, path: Path, title: str | None = None) -> Path:
        """Write the page to `path`, or to `report.html` in the folder `path`, and return where it is."""
        return write_page(self.build_page(title), Path(path))


def build_report(folders: Sequence[Path], table: str | None = None) -> Report:
    """The report of run folders; the first one's row is the one that others are compared with.

    table: a table of several recipes, in each of which the first row is the one that its others are compared with.
    Raises InputError for none at all and for a folder that is no run. A run that is unfinished or damaged is listed in the
    report, never an error.
    """
    if not folders:
        raise InputError("no run folders given; name at least one, for example runs/demo/plain")
    return Report(compare(read_runs(folders), table))


def _build_comparison(content: Report) -> Iterator[Block]:
    """The tables of all groups, their seeds as dots, and what weakens the comparison."""
    compared = content.compared
    slots = {row.name: row.slot for row in compared.rows}
    for group in compared.groups:
        yield build_table(group, content.records, len(compared.groups) > 1)
    plots = [plot for plot in _declare_dots(compared) if find_points(plot, content.records)]
    if plots:
        yield Blocks([build_figure(plot, content.records, slots) for plot in plots])
    yield from (Paragraph(f"BLEU: sacreBLEU, {signature}.", "note") for signature in find_signatures(compared.runs))
    protocols = dict.fromkeys(str(run.get("protocol") or "") for run in compared.runs)
    yield from (Paragraph(f"Protocol: {protocol}.", "note") for protocol in protocols if protocol)
    yield from (Paragraph(caution, "note") for caution in content.summary.cautions)
    for recipe, text in content.notes.items():
        note = f"Notes of {recipe}: {text}"
        rest = f" ... (`fullrank recipes show {recipe}`)"
        yield Paragraph(note, "note", textwrap.shorten(note, _NOTE_WIDTH, placeholder=rest))
    of_runs = drop_labels([record for record in content.records if "run" in record.labels], "part")
    if of_runs:
        grid = build_grid(Table(("row", "seed", "run", "split")), of_runs)
        yield Details(f"Single runs ({len(compared.runs)})", [grid])


def _declare_dots(compared: Comparison) -> Iterator[Dots]:
    """A plot of the seeds of each group with several rows, of the split by which they are judged."""
    subtitle = "A dot is one run, the bar their mean. The axis does not start at zero."
    for group in compared.groups:
        if len(group.rows) > 1 and not group.is_marked:
            where = {"split": group.split, "checkpoint": "final"}
            where |= {"part": group.part} if group.part else {}
            for measure in group.measures:
                title = f"{group.part} {name_split(group.split)} {measure.words}".strip()
                yield Dots("row", measure.key, where, title, subtitle)


# -- curves, analyses, samples -----------------------------------------------------------------------------------------


def _build_curves(content: Report) -> Iterator[Block]:
    compared = content.compared
    rows = [*compared.rows, *compared.unfinished]
    slots = {row.curve_name: row.slot for row in rows}
    figures = [build_figure(plot, records, slots) for plot, records in find_curves(compared)]
    if not figures:
        return
    if compared.mixed_texts:
        yield Paragraph("Curves measured on different texts do not compare.", "warning")
    if any(run.sees_future for row in rows for run in row.runs):
        yield Paragraph(f"† {NOT_NEXT_TOKEN}; such a curve compares with no other.", "warning")
    yield Legend([(row.slot, row.curve_name) for row in rows])
    yield Blocks(figures)


def _build_analyses(content: Report) -> Iterator[Block]:
    """Tables and plots that `fullrank analyze` has left in run folders, all runs of one measurement together."""
    compared = content.compared
    analyses: dict[str, Analysis] = {}
    records: dict[str, list[Record]] = {}
    for row in (*compared.rows, *compared.unfinished):
        for run in row.runs:
            model = row.name if len(row.runs) == 1 else f"{row.name}, seed {run.seed}"
            for analysis in run.analyses:
                name = analysis.measurement
                analyses.setdefault(name, analysis)
                records.setdefault(name, []).extend(record.with_labels(model=model) for record in analysis.records)
    for name, analysis in analyses.items():
        yield Paragraph(f"{name}: {analysis.source}.")
        yield from build_blocks(analysis.tables, analysis.plots, records[name])


def _build_samples(content: Report) -> Iterator[Block]:
    """A text that each row has written."""
    compared = content.compared
    texts = []
    for row in compared.rows:
        sample = row.first.get_mapping("sample")
        if sample.get("text"):
            drawn = f"{sample.get('tokens')} tokens, temperature {sample.get('temperature')}, seed {sample.get('seed')}"
            texts.append((f"{row.name} ({drawn})", str(sample["text"])))
    if texts:
        yield Facts(texts, "samples")
        yield Paragraph("By the best checkpoint of the first seed. They show the road, not a ranking.", "note")


# -- parameters, settings, unfinished runs ------------------------------------------------------------------------------


def _build_parameters(content: Report) -> Iterator[Block]:
    records = [record for record in content.records if record.measure == "parameters"]
    records.sort(key=lambda record: record.labels["component"] == "total")
    names = dict.fromkeys(format_label(record.labels["component"]) for record in records if record.value)
    columns = [Column("parameters", name.replace("_", " "), {"component": name}, ",d") for name in names]
    if columns:
        yield build_grid(Table("row", tuple(columns)), drop_labels(records, "part"))


def _build_settings(content: Report) -> Iterator[Block]:
    """Configuration, text, protocol and machine: in which keys rows differ, then what all share."""
    rows = [*content.compared.rows, *content.compared.unfinished]
    configured = dict.fromkeys(key for row in rows for key in row.first.settings)
    machine = dict.fromkeys(f"environment.{key}" for row in rows for key in row.first.get_mapping("environment"))
    headings = [Heading(name, left=True) for name in ("key", *(row.name for row in rows))]
    different, shared = [], []
    for key in (*configured, *_FACTS, *machine):
        values = [_describe_values(row, key) for row in rows]
        if len(set(values)) > 1:
            different.append([Cell(key), *(Cell(value, strong=value != values[0]) for value in values)])
        elif values[0] and key not in configured:
            shared.append((key.rpartition(".")[2].replace("_", " "), values[0]))
    if different:
        yield Grid(headings, different, notes=["All other keys of the configurations are the same."])
    yield Facts(shared, "card")
    for row in rows:
        text = yaml.safe_dump(dict(row.first.config), sort_keys=False, default_flow_style=None, allow_unicode=True)
        yield Details(f"Resolved configuration of {row.name}", [Code(text)])


def _describe_values(row: Row, key: str) -> str:
    values = [run.settings.get(key, run.get(key)) for run in row.runs]
    return ", ".join(dict.fromkeys(map(_describe_value, values)))


def _describe_value(value: object) -> str:
    """`train 700,000, valid 40,000` of a mapping; nothing for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_describe_value(inner)}" for key, inner in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def _build_troubles(content: Report) -> Iterator[Block]:
    """Runs that are not finished, how far they are and how they go on; finished runs with damaged files."""
    compared = content.compared
    for run in compared.unfinished_runs:
        reasons = "; ".join([_describe_progress(compared, run), *run.problems])
        yield Paragraph(f"Not finished: {run.folder} ({reasons}). It goes on with", "note")
        yield Code(shlex.join(["fullrank", "finetune" if run.finetunes else "train", str(run.folder)]))
    for run in compared.runs:
        if run.problems:
            yield Paragraph(f"Finished, damaged in part: {run.folder} ({'; '.join(run.problems)})", "note")


def _describe_progress(compared: Comparison, run: Run) -> str:
    steps = [step for step in (integer(line.get("step")) for line in run.metrics) if step is not None]
    if not steps:
        return "no step is recorded yet"
    measure = compared.measure
    logged = [measure.read_logged(line) for line in run.metrics if line.get("split") == "valid"]
    values = [value for value in logged if value is not None]
    last = f", last validation {measure.logged_unit} {measure.show(values[-1])}" if values else ""
    remark = f" ({NOT_NEXT_TOKEN})" if last and run.sees_future else ""
    return f"reached step {max(steps):,}{last}{remark}"


_SECTIONS: dict[str, Callable[[Report], Iterable[Block]]] = {
    "Comparison": _build_comparison,
    "Curves": _build_curves,
    "Analyses": _build_analyses,
    "Samples": _build_samples,
    "Parameters": _build_parameters,
    "Settings": _build_settings,
    "Unfinished": _build_troubles,
}
