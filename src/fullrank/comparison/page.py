"""The report of runs: a page for the terminal and as one HTML file, and the same content as JSON."""

from __future__ import annotations

import contextlib
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import yaml

from fullrank.comparison.compare import Comparison
from fullrank.comparison.curves import find_curves
from fullrank.comparison.measures import PERPLEXITY
from fullrank.comparison.rows import Row, find_signatures
from fullrank.comparison.runs import Run, integer
from fullrank.comparison.table import build_table, drop_labels
from fullrank.comparison.words import find_cautions, find_warnings, summarize
from fullrank.config.recipe import load
from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError
from fullrank.records import Column, Record, Table
from fullrank.render.blocks import (
    Block,
    Cell,
    Code,
    Details,
    Facts,
    Grid,
    Group,
    Heading,
    Legend,
    Page,
    Paragraph,
    Section,
)
from fullrank.render.page import build_blocks, build_figure
from fullrank.render.tables import build_grid, format_label, join_words

_NOTE_WIDTH = 240  # characters of a recipe's notes on the terminal
_FACTS = (
    "corpus.name", "corpus.label", "corpus.is_slice", "corpus.tokens", "corpus.pairs", "corpus.vocabulary", "examples",
    "protocol", "checkpoint", "recipe", "scale", "paper", "kernel", "steps", "tokens_seen",
)  # fmt: skip
_RUN_KEYS = (
    "recipe", "scale", "protocol", "protocols", "training", "checkpoint", "examples", "slice", "sha256", "steps",
    "epochs", "environment", "paper",
)  # fmt: skip


def report_to_dict(compared: Comparison) -> dict[str, Any]:
    """Plain values for JSON, numbers in full precision."""
    runs = []
    for group in compared.groups:
        for row in group.rows:
            baseline = group.find_baseline(row)
            runs += [_describe_run(row, run, baseline) for run in row.runs]
    unfinished = [
        {"folder": str(run.folder), "name": run.name, "seed": run.seed, "problems": list(run.problems)}
        for run in compared.unfinished_runs
    ]
    return {
        "headline": summarize(compared)[0],
        "records": [record.to_dict() for record in compared.records],
        "runs": runs,
        "unfinished": unfinished,
        "warnings": list(find_warnings(compared)),
        "notes": _read_notes(compared),
    }


def _describe_run(row: Row, run: Run, baseline: Row | None) -> dict[str, Any]:
    """The entry of a finished run in JSON, but for its figures."""
    remark = None
    if not run.next_token:
        remark = NOT_NEXT_TOKEN if row.is_marked(PERPLEXITY) else MASKED_TOKEN
    return {
        "folder": str(run.folder),
        "row": row.name,
        "part": row.part or None,
        "text": row.text,
        **{name: getattr(run, name) for name in ("name", "seed", "task", "is_slice", "problems")},
        **{key: run.get(key) for key in _RUN_KEYS},
        "next_token": None if run.finetunes else run.next_token,
        "corpus": run.label,
        "baseline": baseline and baseline.name,
        "remark": remark,
        "bleu_signature": next(iter(find_signatures([run])), None),
    }


def _read_notes(compared: Comparison) -> dict[str, str]:
    """Notes of the recipes on their figures, by recipe; none of a recipe that is no longer there."""
    notes = {}
    for run in (*compared.runs, *compared.unfinished_runs):
        name = str(run.get("recipe") or "")
        with contextlib.suppress(InputError):
            notes[name] = load(name).notes
    return {name: text for name, text in notes.items() if text}


def build_page(compared: Comparison, title: str | None = None) -> Page:
    """The page. Equal runs give equal pages."""
    finished = compared.runs
    unfinished = compared.unfinished_runs
    labels = list(dict.fromkeys(run.label or run.task for run in finished))
    on = f" on {join_words(labels)}" if 0 < len(labels) < 3 else ""
    headline, sentences = summarize(compared)
    first = [Paragraph(warning, "warning") for warning in find_warnings(compared)]
    sections = []
    for name, build in _SECTIONS.items():
        blocks = list(build(compared))
        if blocks:
            page_only = name not in ("Comparison", "Unfinished")
            sections.append(Section(name, blocks, page_only=page_only))
    return Page(
        title or f"{len(finished) + len(unfinished)} runs{on}",
        f"fullrank report · {len(compared.rows)} rows, {len(finished)} finished, {len(unfinished)} not finished",
        headline,
        [*first, *map(Paragraph, sentences)],
        sections,
    )


def _build_comparison(compared: Comparison) -> Iterator[Block]:
    """The tables of all groups, and what weakens the comparison."""
    for group in compared.groups:
        yield build_table(group, compared.records, len(compared.groups) > 1)
    protocols = dict.fromkeys(str(run.get("protocol") or "") for run in compared.runs)
    sentences = [f"BLEU: sacreBLEU, {signature}." for signature in find_signatures(compared.runs)]
    sentences += [f"Protocol: {protocol}." for protocol in protocols if protocol]
    sentences += dict.fromkeys(find_cautions(compared))
    yield from (Paragraph(sentence, "note") for sentence in sentences)
    for recipe, text in _read_notes(compared).items():
        note = f"Notes of {recipe}: {text}"
        rest = f" ... (`fullrank recipes show {recipe}`)"
        short_note = textwrap.shorten(note, _NOTE_WIDTH, placeholder=rest)
        yield Paragraph(note, "note", short_note)
    of_runs = [record for record in compared.records if "run" in record.labels]
    of_runs = drop_labels(of_runs, "part")
    if of_runs:
        grid = build_grid(Table(("row", "seed", "run", "split")), of_runs)
        yield Details(f"Single runs ({len(compared.runs)})", [grid])


# -- curves, analyses, samples -----------------------------------------------------------------------------------------


def _build_curves(compared: Comparison) -> Iterator[Block]:
    rows = compared.all_rows
    slots = {row.curve_name: row.slot for row in rows}
    figures = [build_figure(plot, records, slots) for plot, records in find_curves(compared)]
    if not figures:
        return
    if compared.mixed_texts:
        yield Paragraph("Curves measured on different texts do not compare.", "warning")
    if any(run.sees_future for row in rows for run in row.runs):
        yield Paragraph(f"† {NOT_NEXT_TOKEN}; such a curve compares with no other.", "warning")
    yield Legend([(row.slot, row.curve_name) for row in rows])
    yield Group(figures)


def _build_analyses(compared: Comparison) -> Iterator[Block]:
    """Tables and plots that `fullrank analyze` has left in run folders, all runs of one measurement together."""
    analyses: dict[str, dict[str, Any]] = {}
    records: dict[str, list[Record]] = {}
    for row in compared.all_rows:
        for run in row.runs:
            model = row.name if len(row.runs) == 1 else f"{row.name}, seed {run.seed}"
            for analysis in run.analyses:
                name = analysis["measurement"]
                analyses.setdefault(name, analysis)
                of_measurement = records.setdefault(name, [])
                for record in analysis["records"]:
                    of_measurement.append(record.with_labels(model=model))
    for name, analysis in analyses.items():
        yield Paragraph(f"{name}: {analysis['text']}, segments of {analysis['segment_length']} tokens.")
        yield from build_blocks(analysis["tables"], analysis["plots"], records[name])


def _build_samples(compared: Comparison) -> Iterator[Block]:
    """A text that each row has written."""
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


def _build_parameters(compared: Comparison) -> Iterator[Block]:
    records = [record for record in compared.records if record.measure == "parameters"]
    records.sort(key=lambda record: record.labels["component"] == "total")
    names = dict.fromkeys(format_label(record.labels["component"]) for record in records if record.value)
    columns = [
        Column(
            "parameters",
            name.replace("_", " "),
            {"component": name},
            ",d",
        )
        for name in names
    ]
    if columns:
        yield build_grid(Table("row", tuple(columns)), drop_labels(records, "part"))


def _build_settings(compared: Comparison) -> Iterator[Block]:
    """Configuration, text, protocol and machine: in which keys rows differ, what all share, and each configuration."""
    rows = compared.all_rows
    configured = dict.fromkeys(key for row in rows for key in row.first.settings)
    machine = dict.fromkeys(f"environment.{key}" for row in rows for key in row.first.get_mapping("environment"))
    names = ["key", *(row.name for row in rows)]
    headings = [Heading(name, left=True) for name in names]
    different, shared = [], []
    for key in (*configured, *_FACTS, *machine):
        values = [_describe_values(row, key) for row in rows]
        if len(set(values)) > 1:
            cells = [Cell(value, strong=value != values[0]) for value in values]
            different.append([Cell(key), *cells])
        elif values[0] and key not in configured:
            shared.append((key, values[0]))
    if different:
        yield Grid(headings, different, notes=["All other keys are the same."])
    yield Facts(shared)
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
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def _build_troubles(compared: Comparison) -> Iterator[Block]:
    """Runs that are not finished, how far they are and how they go on; finished runs with damaged files."""
    for run in compared.unfinished_runs:
        steps = [integer(line.get("step")) or 0 for line in run.metrics]
        last_step = max(steps, default=0)
        reasons = "; ".join([f"reached step {last_step:,}", *run.problems])
        yield Paragraph(f"Not finished: {run.folder} ({reasons}). It goes on with", "note")
        command = "finetune" if run.finetunes else "train"
        yield Code(shlex.join(["fullrank", command, str(run.folder)]))
    for run in compared.runs:
        if run.problems:
            yield Paragraph(f"Finished, damaged in part: {run.folder} ({'; '.join(run.problems)})", "note")


_SECTIONS: dict[str, Callable[[Comparison], Iterable[Block]]] = {
    "Comparison": _build_comparison,
    "Curves": _build_curves,
    "Analyses": _build_analyses,
    "Samples": _build_samples,
    "Parameters": _build_parameters,
    "Settings": _build_settings,
    "Unfinished": _build_troubles,
}
