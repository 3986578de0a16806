"""The report of runs: what it says in words, a page for terminal and HTML file, and the same content as JSON."""

from __future__ import annotations

import contextlib
import shlex
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fullrank.comparison.compare import Comparison, Group, Row, build_report, compare_rows, compare_texts, identify_text
from fullrank.comparison.runs import PERPLEXITY, TRANSLATION, Run, integer
from fullrank.comparison.table import build_tables, drop_labels, find_curves
from fullrank.config.load import load
from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError, count_things
from fullrank.files import format_yaml
from fullrank.records import Table
from fullrank.render import blocks
from fullrank.render.blocks import Block, Cell, Details, Facts, Grid, Page, Paragraph, Section, build_grid, join_words
from fullrank.render.page import build_blocks, build_figure, write_page

_NOTE_WIDTH = 240  # characters of a recipe's notes on the terminal
_FACTS = (
    "corpus.name", "corpus.label", "corpus.is_slice", "corpus.tokens", "corpus.pairs", "corpus.vocabulary", "examples",
    "protocol", "checkpoint", "recipe", "scale", "paper", "kernel", "steps", "tokens_seen",
)  # fmt: skip
_RUN_KEYS = (
    "recipe", "scale", "protocol", "protocols", "checkpoint", "examples", "slice", "sha256", "steps",
    "epochs", "environment", "paper",
)  # fmt: skip

# -- in words ----------------------------------------------------------------------------------------------------------


def summarize(compared: Comparison) -> tuple[str, list[str]]:
    """Summarize a comparison in a headline and further sentences; every claim is one that the figures support."""
    groups = compared.groups
    claims = [write_headline(group) for group in groups]
    parts = len({group.part for group in groups})
    headline = claims[0] if claims else "No run has finished yet"
    sentences: list[str] = []
    if compared.mixed_texts or parts > 1:
        kind = "tasks" if groups[0].runs[0].finetunes else "models"
        headline = f"{parts} {kind} in one table: rows of each are compared with its first"
        names = [group.part or f"On {group.runs[0].label or 'a text that is not recorded'}" for group in groups]
        sentences = [f"{name}: {claim}." for name, claim in zip(names, claims, strict=True)]
    if compared.mixed_texts:
        headline = "Not one comparison: the runs differ in text, vocabulary or signature"
    return headline, sentences


def write_headline(group: Group) -> str:
    """Write the headline of a group.

    A row `is best` only where its interval leaves out 0.
    """
    measure = group.measure
    split = group.split
    names = join_words(row.name for row in group.rows)
    if undertrained := group.find_above("unigram"):
        below = join_words(row.name for row in undertrained)
        return f"{below}: undertrained, {measure.words} above that of a unigram model"
    if not group.ranking:
        return f"{names}: no {measure.words} to compare"
    best, *others = group.ranking
    figure = f"{split} {measure.words} {blocks.format_value(group.find_mean(best), measure.format)}"
    values = best.values(measure, split).values()
    if len(values) > 1:
        figure += f" ± {blocks.format_value(statistics.stdev(values), measure.format)}"
    if not others:
        return f"{best.name}: {figure}"
    baseline = group.find_baseline(best) or others[0]
    difference = compare_rows(best, baseline, measure, split)
    if difference is None or difference.value is None:
        return f"{best.name} is {measure.extreme}: {figure}"
    size = measure.show_difference(abs(difference.value)).removeprefix("+")
    figure += f", {size} {'above' if measure.higher else 'below'} {baseline.name}"
    if difference.interval is None:
        seeds = "one seed" if min(len(best.runs), len(baseline.runs)) == 1 else "no scatter over the seeds"
        return f"{best.name} is {measure.extreme}: {figure} ({seeds}, no interval)"
    low, high = difference.interval
    ends = [measure.show_difference(end).removesuffix(" points") for end in (low, high)]
    figure += f" (95 % interval {' to '.join(ends)})"
    if low <= 0 <= high:
        return f"{best.name} is {measure.extreme}, but other seeds might turn it round: {figure}"
    return f"{best.name} is best: {figure}"


def find_warnings(compared: Comparison) -> Iterator[str]:
    """Yield sentences about figures that do not compare, and about models that fail their check."""
    texts = compared.mixed_texts
    if texts:
        first, *others = (identify_text(row.first) for row in texts)
        fields = dict.fromkeys(field for other in others for field in compare_texts(first, other))
        labels = ", ".join(row.first.label or "a text not recorded" for row in texts)
        yield f"Not comparable: the runs differ in {', '.join(fields)}. Compare only within a table: {labels}."
    if compared.left_out:
        names = join_words(f"{run.name} ({run.folder})" for run in compared.left_out)
        yield f"Compared are runs of the task of the first; others are left out: {names}."
    for run in compared.runs:
        for when in ("before", "after"):
            if run.get(f"check.{when}.passes") is False:
                yield f"{run.name}: `fullrank check` fails {when} training. {run.get(f'check.{when}.headline')}"
    for group in compared.groups:
        apart = [row.name for row in group.rows if row.is_apart(group.measure)]
        if apart:
            yield f"{join_words(apart)}: {NOT_NEXT_TOKEN}, so it compares with no other."


_MACHINES = "The runs were not all made on the same kind of machine; tokens/s, ms and wall time do not compare."
# what the runs of a comparison should share, as keys of their results, and what is said where they do not
_SHARED = {
    "protocol": "Rows were not all evaluated by the same protocol; part of a difference may come from that.",
    "environment.cpu": _MACHINES,
    "environment.device": _MACHINES,
    "environment.threads": _MACHINES,
}


def find_cautions(compared: Comparison) -> Iterator[str]:
    """Yield sentences about what part of a difference may come from; some come again for each group."""
    for group in compared.groups:
        first = group.runs[0]
        is_reduced = first.is_slice or any(run.get("scale") not in (None, "paper") for run in group.runs)
        if is_reduced and not first.finetunes and any(run.get("paper") for run in group.runs):
            yield f"The paper's figures are of scale paper and the full corpus: on {first.label} the levels do not compare."
        if above := group.find_above("fourgram"):
            names = join_words(row.name for row in above)
            yield f"{names}: {group.measure.words} above that of counting 4-grams, so that a difference says little yet."
        for key, sentence in _SHARED.items():
            if len({run.get(key) for run in group.runs}) > 1:
                yield sentence
        tokens = [integer(run.get("tokens_seen")) or 0 for run in group.runs]
        # streams of random lengths, and batches of whole sentences, do not end at the same token with every seed
        if first.task != TRANSLATION and max(tokens) > 1.01 * min(tokens):
            yield "The runs did not train on equally many tokens."
    reports = [report for run in compared.runs for report in run.get_mapping("check").values() if report]
    if reports and all(report["passes"] for report in reports):
        when = "before and after training: no token depends on later ones, and all ways to compute agree"
        yield f"Every model was checked {when}."
    if any(run.finetunes and run.get("checkpoint") == "best" for run in compared.runs):
        yield "Figures are of the best evaluation, which was chosen on the very split that they are of: it flatters them."


# -- page and JSON -----------------------------------------------------------------------------------------------------


def report_to_dict(compared: Comparison) -> dict[str, Any]:
    """Describe a comparison in plain values for JSON, numbers in full precision."""
    runs = []
    for group in compared.groups:
        for row in group.rows:
            baseline = group.find_baseline(row)
            runs += [_describe_run(row, run, baseline) for run in row.runs]
    unfinished = [
        {
            "folder": str(run.folder),
            "name": run.name,
            "seed": run.seed,
            "problems": run.problems,
        }
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
    remark = None
    if not run.next_token:
        remark = NOT_NEXT_TOKEN if row.is_apart(PERPLEXITY) else MASKED_TOKEN
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
        "bleu_signature": run.bleu_signature,
    }


def _read_notes(compared: Comparison) -> dict[str, str]:
    """Read the notes of the recipes on their figures, by recipe; none of a recipe that is no longer there."""
    notes = {}
    for run in (*compared.runs, *compared.unfinished_runs):
        name = run.get("recipe") or ""
        with contextlib.suppress(InputError):
            if text := load(name).notes:
                notes[name] = text
    return notes


def write_report(
    folders: Sequence[Path], path: Path, title: str | None = None, table: str | None = None
) -> tuple[Page, dict[str, Any]]:
    """Write the report of runs to a file.

    Args:
        folders: run folders.
        path: file of the page.
        title: title of the page; None for the number of runs and their text.
        table: the table of several recipes that the runs belong to; None without.

    Returns:
        The page, and its content as JSON.
    """
    compared = build_report(folders, table)
    page = build_page(compared, title)
    return page, {"report": str(write_page(page, path)), **report_to_dict(compared)}


def build_page(compared: Comparison, title: str | None = None) -> Page:
    """Build the page; equal runs give equal pages."""
    finished = compared.runs
    unfinished = compared.unfinished_runs
    labels = dict.fromkeys(run.label or run.task for run in finished)
    on = f" on {join_words(labels)}" if 0 < len(labels) < 3 else ""
    headline, sentences = summarize(compared)
    warnings = [Paragraph(warning, "warning") for warning in find_warnings(compared)]
    sections = [
        Section("Comparison", [*_build_comparison(compared)]),
        Section("Curves", [*_build_curves(compared)], page_only=True),
        Section("Analyses", [*_build_analyses(compared)], page_only=True),
        Section("Settings", [*_build_settings(compared)], page_only=True),
        Section("Unfinished", [*_build_troubles(compared)]),
    ]
    runs = count_things(len(finished) + len(unfinished), "run")
    rows = count_things(len(compared.rows), "row")
    return Page(
        title or f"{runs}{on}",
        f"fullrank report · {rows}, {len(finished)} finished, {len(unfinished)} not finished",
        headline,
        [*warnings, *map(Paragraph, sentences)],
        [section for section in sections if section.blocks],
    )


def _build_comparison(compared: Comparison) -> Iterator[Block]:
    for group in compared.groups:
        yield from build_tables(group, compared.records, len(compared.groups) > 1)
    protocols = dict.fromkeys(run.get("protocol") for run in compared.runs)
    signatures = dict.fromkeys(run.bleu_signature for run in compared.runs if run.bleu_signature)
    sentences = [f"BLEU: sacreBLEU, {signature}." for signature in signatures]
    sentences += [f"Protocol: {protocol}." for protocol in protocols if protocol]
    sentences += dict.fromkeys(find_cautions(compared))
    yield from (Paragraph(sentence, "note") for sentence in sentences)
    for recipe, text in _read_notes(compared).items():
        note = f"Notes of {recipe}: {text}"
        where_to_read = f" ... (`fullrank recipes show {recipe}`)"
        yield Paragraph(note, "note", textwrap.shorten(note, _NOTE_WIDTH, placeholder=where_to_read))
    run_records = drop_labels([record for record in compared.records if "run" in record.labels], "part")
    if run_records:
        grid = build_grid(Table(("row", "seed", "run", "split")), run_records)
        yield Details(f"Single runs ({len(compared.runs)})", [grid])


def _build_curves(compared: Comparison) -> Iterator[Block]:
    rows = compared.all_rows
    slots = {row.curve_name: row.slot for row in rows}
    figures = [build_figure(plot, records, slots) for plot, records in find_curves(compared)]
    if not figures:
        return
    if compared.mixed_texts:
        yield Paragraph("Curves measured on different texts do not compare.", "warning")
    yield blocks.Legend([(row.slot, row.curve_name) for row in rows])
    yield blocks.Group(figures)


def _build_analyses(compared: Comparison) -> Iterator[Block]:
    analyses: dict[str, dict[str, Any]] = {}
    slots = {}
    for row in compared.all_rows:
        for run in row.runs:
            model = row.curve_name if len(row.runs) == 1 else f"{row.curve_name}, seed {run.seed}"
            for analysis in run.analyses:
                slots[model] = row.slot
                shown = analyses.setdefault(analysis["measurement"], {**analysis, "records": []})
                shown["records"] += [record.with_labels(model=model) for record in analysis["records"]]
    if len(slots) > 1:
        yield blocks.Legend([(slot, model) for model, slot in slots.items()])
    for name, shown in analyses.items():
        yield Paragraph(f"{name}: {shown['text']}, segments of {shown['segment_length']} tokens.")
        try:
            yield from build_blocks(shown["tables"], shown["plots"], shown["records"], slots)
        except ValueError as error:  # of a table or plot that does not fit its records
            yield Paragraph(f"{name} cannot be shown: {error}", "warning")


def _build_settings(compared: Comparison) -> Iterator[Block]:
    rows = compared.all_rows
    configured = dict.fromkeys(key for row in rows for key in row.first.settings)
    machine = dict.fromkeys(f"environment.{key}" for row in rows for key in row.first.get_mapping("environment"))
    names = ["key", *(row.name for row in rows)]
    headings = [blocks.Heading(name, left=True) for name in names]
    different = []
    shared = []
    for key in (*configured, *_FACTS, *machine):
        values = [_describe_values(row, key) for row in rows]
        # a fact that is not recorded is no difference
        compared_values = values if key in configured else filter(None, values)
        distinct = dict.fromkeys(compared_values)
        if len(distinct) > 1:
            cells = [Cell(value, strong=value != values[0]) for value in values]
            different.append([Cell(key), *cells])
        elif key not in configured:
            shared += [(key, value) for value in distinct]
    if different:
        yield Grid(headings, different, notes=["All other keys are the same."])
    yield Facts(shared)
    for row in rows:
        text = format_yaml(row.first.config, default_flow_style=None)
        yield Details(f"Resolved configuration of {row.name}", [blocks.Code(text)])


def _describe_values(row: Row, key: str) -> str:
    values = [run.settings.get(key, run.get(key)) for run in row.runs]
    return ", ".join(dict.fromkeys(map(blocks.format_setting, values)))


def _build_troubles(compared: Comparison) -> Iterator[Block]:
    for run in compared.unfinished_runs:
        last_step = max((integer(line.get("step")) or 0 for line in run.metrics), default=0)
        reasons = "; ".join([f"reached step {last_step:,}", *run.problems])
        yield Paragraph(f"Not finished: {run.folder} ({reasons}). It goes on with", "note")
        yield blocks.Code(shlex.join(["fullrank", "train", str(run.folder)]))
    for run in compared.runs:
        if run.problems:
            yield Paragraph(f"Finished, damaged in part: {run.folder} ({'; '.join(run.problems)})", "note")
