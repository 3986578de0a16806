"""The report as one self-contained HTML page: everything its templates show, and how it is written."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError, RunError
from fullrank.files import write_text
from fullrank.reporting import curves, format, provenance, tables
from fullrank.reporting import finetuning_tables as tuned
from fullrank.reporting.compare import MARK, Comparison, Row, best_row
from fullrank.reporting.curves import Curve, Reader, Series
from fullrank.reporting.drawing import COLOURS, NARROW, Drawing, Strip
from fullrank.reporting.drawing import curves as draw_curves
from fullrank.reporting.drawing import strips as draw_strips
from fullrank.reporting.finetuning import Task, Tuning
from fullrank.reporting.finetuning_tables import seeds_words
from fullrank.reporting.format import count, listed, plural
from fullrank.reporting.measure import BLEU, LAST_POSITION, Measure
from fullrank.reporting.provenance import Named
from fullrank.reporting.runs import (
    MASKED_MODELING,
    RunRecord,
    integer,
    number,
    row_names,
    seeds_of_rows,
)
from fullrank.reporting.summary import SPLIT_WORDS, signature_lines
from fullrank.reporting.summary import summarize as summarize_comparison
from fullrank.reporting.tables import Table

_BEGINNING = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'  # of every report; a report is known by it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def write(out: Path, page: str) -> Path:
    """Write a page to `out`, or to `report.html` in the folder `out`, and return its path.

    An older report is replaced; any other file of that name is an InputError. RunError if the page cannot be written.
    """
    out = out / "report.html" if out.is_dir() else out
    if out.exists():
        try:
            with out.open("rb") as file:
                beginning = file.read(len(_BEGINNING)).decode("utf-8", errors="replace")
        except OSError as error:
            raise RunError(f"{out}: cannot be read ({error.strerror}); choose another place for the report") from error
        if beginning not in ("", _BEGINNING):
            raise InputError(f"{out}: exists and is not a report of fullrank, so it is left alone; give another --out")
    write_text(out, page)
    return out


def render(content: Comparison | Tuning, title: str | None = None) -> str:
    """The page as text; equal inputs give equal bytes."""
    if isinstance(content, Tuning):
        template, values = "finetuning.html", _of_tuning(content)
    else:
        template, values = "comparison.html", _of_comparison(content)
    return _environment().get_template(template).render({**values, **({} if title is None else {"title": title})})


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fullrank.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined, finalize=_clean,
    )  # fmt: skip
    environment.globals |= {"colours": COLOURS, "MARK": MARK, "NOT_NEXT_TOKEN": NOT_NEXT_TOKEN}
    environment.filters |= {"readable": format.readable, "count": count, "shell": shlex.quote}
    return environment


def _clean(value: object) -> object:
    """Text that a document can hold: control characters replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


# -- a comparison -----------------------------------------------------------------------------------------------------


def _of_comparison(compared: Comparison) -> dict[str, Any]:
    rows, measure = compared.rows, compared.measure
    named = [Named(row.name, slot, row.runs) for slot, row in enumerate(rows)]
    groups, taken = seeds_of_rows(compared.unfinished), {row.name for row in rows}
    for name, seeds in zip(row_names(groups), groups, strict=True):
        named.append(Named(f"{name} (unfinished)" if name in taken else name, len(named), seeds, False))
    parts = tables.parts_of_parameters(rows)
    part_names = list(dict.fromkeys(name for sizes in parts for name, size in sizes.items() if size))
    runs, labels = compared.runs, list(dict.fromkeys(row.label for row in rows if row.label))
    total = len(runs) + len(compared.unfinished)
    subtitle = [plural(len(rows), "row"), f"{len(runs)} finished"]
    if compared.unfinished:
        subtitle.append(f"{len(compared.unfinished)} not finished")
    # a model may be judged by next tokens at its end and not while it trains
    marked = {one.name for one in named if any(run.sees_future for run in one.runs)}
    shown = [one._replace(name=f"{one.name} {MARK}") if one.name in marked else one for one in named]
    damaged = [(run, "finished, damaged in part", list(run.problems)) for run in runs if run.problems]
    return {
        "title": plural(total, "run") + (f" on {listed(labels)}" if 0 < len(labels) < 3 else ""),
        "subtitle": "fullrank report · " + ", ".join(subtitle),
        "compared": compared,
        "summary": summarize_comparison(compared),
        "tiles": _tiles(compared) if compared.comparable and rows else [],
        "table": tables.comparison_table(compared) if rows else None,
        "notes": tables.notes_of(compared),
        "signatures": signature_lines(compared),
        "other_figures": tables.other_figures(compared),
        "differences": tables.differences_tables(compared),
        "differences_notes": tables.differences_notes(compared),
        "strips": _strips(compared) if compared.comparable and len(rows) > 1 else None,
        "folded": _folded(compared) if rows else [],
        "legend": shown,
        "judged": _translation_curves(compared, shown) if compared.translates else _validation_curves(compared, shown),
        "others": _training_curves(compared, shown),
        "marked": bool(marked),
        "bars": _bars(rows, parts, part_names),
        "parts": part_names,
        "parameters": tables.parameters_table(rows, part_names) if part_names else None,
        "configurations": provenance.configurations(named),
        "cards": provenance.cards_of_comparison(compared) if rows else [],
        "commands": [(one.name, one.slot, provenance.origin(one.runs), provenance.commands(one.runs)) for one in named],
        "troubles": [(run, "not finished", [_progress(run, measure), *run.problems]) for run in compared.unfinished]
        + damaged,
        "verb": "train",
    }


def _tiles(compared: Comparison) -> list[tuple[str, str, str]]:
    """Key figures: label, value, note."""
    rows, measure, split = compared.rows, compared.measure, compared.split
    first, best = rows[0], best_row(rows, measure, compared.split)
    several = sum(split in row.comparable_figures for row in rows) > 1
    shown = best or next(row for row in rows if split in row.figures)
    extreme = measure.extreme.capitalize() if several else "Final"
    value = shown.mark(measure.show(shown.figures[split].mean))
    tiles = [(f"{extreme} {SPLIT_WORDS[split]} {measure.words}", value, shown.name)]
    if not shown.next_token and (last := shown.last_position.get("final", {}).get(split)) is not None:
        tiles.append(("At last positions", LAST_POSITION.show(last.mean), "targets that are not read"))
    if several and split in shown.difference:
        base = f"{first.name}: {measure.show(first.figures[split].mean)}"
        tiles.append(("Against the first row", measure.show_difference(shown.difference[split]), base))
    if several and shown is not first and shown.extra_parameters is not None:
        tiles.append(("Parameters added", format.extra(shown.extra_parameters), f"to {count(first.parameters)}"))
    if split in first.unigram:
        tiles.append((f"Unigram {measure.words}", measure.show(first.unigram[split]), "same vocabulary"))
    seen = [tokens for run in compared.runs if (tokens := integer(run.of("tokens_seen"))) is not None]
    if seen:
        ends = dict.fromkeys(format.short_count(value) for value in (min(seen), max(seen)))
        tiles.append(("Training tokens", "–".join(ends), "per run"))
    return tiles


def _strips(compared: Comparison) -> Drawing:
    """Final figures: a dot for each seed."""
    measure, split = compared.measure, compared.split
    words = f"{SPLIT_WORDS[split]} {measure.words}"
    values = ", ".join(f"{row.name} {row.mark(measure.spread(row.figures.get(split)))}" for row in compared.rows)
    strips = [
        Strip(
            row.mark(row.name),
            slot,
            [value for run in row.runs if (value := measure.final(run, split)) is not None],
            row.figures.get(split),
        )
        for slot, row in enumerate(compared.rows)
    ]
    label = f"{words} ({measure.comparative} is better)"
    drawing = draw_strips(
        f"Final {words}", _dots_note(compared.several_seeds), strips, label, f"Final {words}: {values}."
    )
    if any(row.marked for row in compared.rows):
        drawing.notes.append(f"{MARK} {NOT_NEXT_TOKEN}.")
    return drawing


def _dots_note(several: bool) -> str:
    spread = "; beneath, the bar is the mean, the line mean ± standard deviation" if several else ""
    return f"A dot is one run{spread}. The axis does not start at zero."


def _folded(compared: Comparison) -> list[Table]:
    """Tables that are closed until asked for."""
    every = [tables.every_score(compared)] if compared.measure is BLEU else []
    rest = tables.rest_of_paper(compared.rows)
    return [*every, *([] if rest is None else [rest]), tables.single_runs(compared)]


def _series(named: Sequence[Named], read: Callable[[RunRecord], Curve | None]) -> list[Series]:
    drawn = [(one, tuple(c for run in one.runs if (c := read(run)) is not None)) for one in named]
    return [Series(one.name, one.slot, seeds, one.finished) for one, seeds in drawn if seeds]


def _two_halves(
    heading: str, note: str, series: Sequence[Series], unit: str, x: str, measure: Measure, *, log: bool = False
) -> list[Drawing]:
    """The whole training, and its second half alone."""
    if any(len(one.curves) > 1 for one in series):
        note += " Thin lines are single seeds, the thick one is their mean."
    half = "The same curves from half of the longest training on; the axis does not start at zero."
    both = (
        draw_curves(heading, note, series, unit, x, log=log, show=measure.tick),
        draw_curves(f"{heading}, second half", half, curves.second_half(series), unit, x, show=measure.tick),
    )
    return [drawing for drawing in both if drawing is not None]


def _validation_curves(compared: Comparison, named: Sequence[Named]) -> list[Drawing]:
    """The validation figure over training tokens."""
    measure = compared.measure

    def read(line: Mapping[str, Any]) -> float | None:
        value = measure.of_line(line)
        return value if value and value > 0 else None

    series = _series(named, lambda run: curves.validation(run, read))
    ends = [value for one in series for curve in one.curves for value in (curve.y.min(), curve.y.max())]
    wide = bool(ends) and not measure.in_bits and max(ends) > 4 * min(ends)  # bits are logarithms already
    note = f"Whole training{', logarithmic axis' if wide else ''}."
    return _two_halves(f"Validation {measure.unit}", note, series, measure.unit, "training tokens", measure, log=wide)


def _translation_curves(compared: Comparison, named: Sequence[Named]) -> list[Drawing]:
    """Validation BLEU (as Mixhead's Fig. 2) and validation loss, by epoch where its length is known."""
    lengths = [length for run in compared.runs if (length := curves.steps_per_epoch(run)) is not None]
    # an unfinished run does not say how long its epochs are; those of the same text are as long
    usual = lengths[0] if compared.comparable and lengths else None
    x = "training tokens" if usual is None else "epochs"

    def series(read: Reader) -> list[Series]:
        return _series(
            named, lambda run: curves.validation(run, read, usual and (curves.steps_per_epoch(run) or usual))
        )

    bleu, loss = series(BLEU.of_line), series(lambda line: number(line.get("nll")))
    note = "Nats per target token; lower is better."
    return [
        *_two_halves("Validation BLEU", "As measured while training; higher is better.", bleu, BLEU.unit, x, BLEU),
        *_two_halves("Validation loss", note, loss, "nats per token", x, BLEU),
    ]


def _training_curves(compared: Comparison, named: Sequence[Named]) -> list[Drawing]:
    """Training loss, learning rate and speed."""
    kind = "masked token" if compared.task == MASKED_MODELING else "token"
    lines = [sum(line.get("split") == "train" for line in run.metrics) for one in named for run in one.runs]
    widest = max((curves.window(number) for number in lines if number), default=1)
    smooth = (
        "Not smoothed."
        if widest == 1
        else f"Smoothed lightly: centred moving average over up to {widest} logged values."
    )
    drawings = (
        draw_curves(
            "Training loss", f"Nats per {kind}. {smooth}", _series(named, curves.training_loss), f"nats per {kind}",
            "training tokens", width=NARROW,
        ),
        draw_curves(
            "Learning rate", "As set at each logged step.", curves.merged(_series(named, curves.learning_rate)),
            "learning rate", "training tokens", from_zero=True, width=NARROW,
        ),
        draw_curves(
            "Speed", f"Training tokens per second. {smooth}", _series(named, curves.speed), "tokens per second",
            "minutes of training", from_zero=True, width=NARROW,
        ),
    )  # fmt: skip
    return [drawing for drawing in drawings if drawing is not None]


def _bars(rows: Sequence[Row], parts: Sequence[Mapping[str, int]], names: Sequence[str]) -> list[dict[str, Any]]:
    """For each row its parts as shares of a bar whose width is the row's share of the largest total."""
    largest = max((row.parameters or 0 for row in rows), default=0)
    bars = []
    for row, sizes in zip(rows, parts, strict=True):
        total = row.parameters
        if not sizes or total is None or sum(sizes.values()) > total:
            continue  # parts that overlap have no place in a stack
        shares: list[tuple[int | None, str, int]] = [
            (names.index(name) % COLOURS, name, size) for name, size in sizes.items() if size > 0
        ]
        if (rest := total - sum(sizes.values())) > 0:
            shares.append((None, "other", rest))
        bars.append({"name": row.name, "width": f"{100 * total / largest:.2f}", "parts": shares})
    return bars


def _progress(run: RunRecord, measure: Measure) -> str:
    """How far an unfinished run has come."""
    steps = [step for line in run.metrics if (step := integer(line.get("step"))) is not None]
    if not steps:
        return "no step is recorded yet"
    lines = (line for line in run.metrics if line.get("split") == "valid")
    values = [value for line in lines if (value := measure.of_line(line)) is not None]
    last = f"; last validation {measure.unit} {measure.show(values[-1])}" if values else ""
    remark = f" ({NOT_NEXT_TOKEN})" if last and run.sees_future else ""
    return f"reached step {max(steps):,}{last}{remark}"


# -- fine-tuning ------------------------------------------------------------------------------------------------------


def _of_tuning(found: Tuning) -> dict[str, Any]:
    runs, names = len(found.runs) + len(found.unfinished), [task.name for task in found.tasks]
    on = f" on {listed(names)}" if 0 < len(names) < 4 else f" on {len(names)} tasks" if names else ""
    arms = [arm for task in found.tasks for arm in task.arms]
    subtitle = [plural(len(arms), "arm"), f"{len(found.runs)} finished"]
    if found.unfinished:
        subtitle.append(f"{len(found.unfinished)} not finished")
    return {
        "title": f"Fine-tuning: {plural(runs, 'run')}{on}",
        "subtitle": "fullrank report · " + ", ".join(subtitle),
        "summary": tuned.summarize(found),
        "tiles": [],
        "tasks": [_of_task(task) for task in found.tasks],
        "cards": provenance.cards_of_tuning(found) if arms else [],
        "commands": [
            (arm.name, slot, f"seeds {seeds_words(arm.seeds)}", provenance.arm_commands(arm))
            for task in found.tasks
            for slot, arm in enumerate(task.arms)
        ],
        "troubles": [(run, "not finished", list(run.problems)) for run in found.unfinished],
        "verb": "finetune",
    }


def _of_task(task: Task) -> dict[str, Any]:
    scores, strips = [], []
    for key in task.keys:
        figures = task.figures(key)
        unknown = task.compares and not any(figure.stat.count > 1 for _, _, figure in figures)
        scores.append((tuned.scores_table(task, key), unknown))
        values = ", ".join(f"{arm.name} {tuned.ours(figure)}" for _, arm, figure in figures)
        label = f"{key[0]} {tuned.metric_words(key[1])} x 100 (higher is better)"
        several = any(figure.stat.count > 1 for _, _, figure in figures)
        rows = [Strip(arm.name, slot, figure.values, figure.stat) for slot, arm, figure in figures]
        heading = f"{key[0]}: {tuned.metric_words(key[1])}"
        alt = f"{tuned.caption_of(task, key)}: {values}."
        strips.append(draw_strips(heading, _dots_note(several), rows, label, alt))
    return {
        "id": f"task-{task.name.replace('/', '-')}",
        "name": task.name,
        "heading": task.title if task.title == task.name else f"{task.name}: {task.title}",
        "protocol": tuned.protocol_lines(task),
        "scores": scores,
        "strips": strips,
        "arms": tuned.arms_table(task),
        "runs": tuned.single_runs(task),
        "configurations": provenance.configurations(
            [Named(arm.name, slot, arm.runs) for slot, arm in enumerate(task.arms)]
        ),
    }
