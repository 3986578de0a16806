"""The report as one self-contained HTML page: everything its templates show, and how it is written."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from fullrank.config.load import flatten
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.core.errors import InputError
from fullrank.reporting import drawing, figures, runs, summary, tables
from fullrank.reporting.compare import Comparison, best_row, signatures
from fullrank.reporting.drawing import COLOURS, NARROW, Curve, Drawing, Reader, Series, draw_curves, draw_strips
from fullrank.reporting.figures import BLEU, CHRF, LAST_POSITION, MISSING, Measure, count, listed
from fullrank.reporting.finetuning import UNKNOWN, Arm, Key, Task, Tuning, metric_words
from fullrank.reporting.resampled import translations
from fullrank.reporting.rows import MARK, Row
from fullrank.reporting.runs import SPLITS, RunGroup, RunRecord, integer, mapping, number
from fullrank.reporting.tables import SPLIT_WORDS, Cell, Column, Table

BEGINNING = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'  # of every report; a report is known by it
_SENTENCES = 3  # shown with their translations
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def render(content: Comparison | Tuning, title: str | None = None) -> str:
    """The page as text; equal inputs give equal bytes."""
    values = _of_tuning(content) if isinstance(content, Tuning) else _of_comparison(content)
    template = "finetuning.html" if isinstance(content, Tuning) else "comparison.html"
    values |= {"summary": summary.summarize(content), "notes": content.notes} | (
        {} if title is None else {"title": title}
    )
    return fill(template, **values)


def fill(template: str, **values: Any) -> str:
    """A page from one of the templates."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fullrank.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined, finalize=_clean,
    )  # fmt: skip
    environment.globals |= {"colours": COLOURS, "MARK": MARK, "NOT_NEXT_TOKEN": NOT_NEXT_TOKEN}
    environment.globals |= {"TRANSLATION": runs.TRANSLATION, "tables": tables, "words": summary}
    environment.filters |= {"readable": figures.readable, "count": count, "shell": shlex.quote}
    environment.filters |= {"mechanisms": runs.mechanism_words}
    return environment


def _clean(value: object) -> object:
    """Text that a document can hold: control characters replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


def _subtitle(groups: int, word: str, finished: int, unfinished: int) -> str:
    words = [_plural(groups, word), f"{finished} finished", *([f"{unfinished} not finished"] if unfinished else [])]
    return f"fullrank report · {', '.join(words)}"


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


# -- a comparison -----------------------------------------------------------------------------------------------------


def _of_comparison(compared: Comparison) -> dict[str, Any]:
    rows, finished, unfinished = compared.rows, compared.runs, compared.unfinished
    seeds, taken = runs.group_by_seed(unfinished), {row.name for row in rows}
    names = [f"{name} (unfinished)" if name in taken else name for name in runs.row_names(seeds)]
    groups = [*rows, *map(RunGroup, names, range(len(rows), len(rows) + len(names)), seeds)]
    # a model may be judged by next tokens at its end and not while it trains
    marked = [any(run.sees_future for run in group.runs) for group in groups]
    shown = [
        dataclasses.replace(group, name=f"{group.name} {MARK}") if sees_future else group
        for group, sees_future in zip(groups, marked, strict=True)
    ]
    labels = list(dict.fromkeys(row.label for row in rows if row.label))
    on = f" on {listed(labels)}" if 0 < len(labels) < 3 else ""
    validation = _translation_curves if compared.task == runs.TRANSLATION else _validation_curves
    parts = list(dict.fromkeys(part for row in rows for part, size in tables.parts_of_parameters(row).items() if size))
    troubles = [(run, "not finished", [_progress(run, compared.measure), *run.problems]) for run in unfinished]
    return {
        "title": _plural(len(finished) + len(unfinished), "run") + on,
        "subtitle": _subtitle(len(rows), "row", len(finished), len(unfinished)),
        "compared": compared,
        "tiles": list(_tiles(compared)) if compared.comparable and len(compared.groups) == 1 else [],
        "strips": _strips(compared) if compared.comparable and len(rows) > 1 else None,
        "spectra": _spectra(compared, shown),
        "analyses": list(_analyses([*finished, *unfinished])),
        "samples": list(_samples(rows)),
        "sentences": _sentences(compared),
        "legend": shown,
        "validation_curves": validation(compared, shown),
        "training_curves": _training_curves(compared, shown),
        "marked": any(marked),
        "bars": _bars(rows, parts),
        "parts": parts,
        "configurations": _configurations(groups),
        "cards": _comparison_cards(compared) if rows else [],
        "commands": [(group, _origin(group.runs), _commands(group.runs)) for group in groups],
        "troubles": troubles + [(run, "finished, damaged in part", run.problems) for run in finished if run.problems],
        "verb": "train",
    }


def _analyses(found: Sequence[RunRecord]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Figures that `fullrank analyze` has left in run folders: the run, and of each figure its name and a data URI."""
    for run in found:
        files = [file for file in sorted((run.folder / "analysis").glob("*.svg")) if not file.is_symlink()]
        if files:
            yield run.name, [(file.stem, base64.b64encode(file.read_bytes()).decode()) for file in files]


def _tiles(compared: Comparison) -> Iterator[tuple[str, str, str]]:
    """Key figures: label, value, note."""
    rows, measure, split = compared.rows, compared.measure, compared.split
    first, best = rows[0], best_row(rows, measure, compared.split)
    several = sum(split in row.comparable_figures for row in rows) > 1
    shown = best or next(row for row in rows if split in row.figures)
    extreme = measure.extreme.capitalize() if several else "Final"
    value = shown.mark(measure.show(shown.figures[split].mean))
    yield (f"{extreme} {SPLIT_WORDS[split]} {measure.words}", value, shown.name)
    last = shown.by_checkpoint(LAST_POSITION).get("final", {}).get(split)
    if not shown.next_token and last is not None:
        yield "At last positions", LAST_POSITION.show(last.mean), "targets that are not read"
    if several and split in shown.difference:
        known = shown.intervals.get(split)
        sure = f"95 % interval {measure.show_interval(*known)}" if known else "no interval"
        yield f"Against {first.name}", measure.show_difference(shown.difference[split]), sure
    if several and shown is not first and shown.extra_parameters is not None:
        yield "Parameters added", figures.extra(shown.extra_parameters), f"to {count(first.parameters)}"
    unigrams = {measure.show(row.unigram[split]) for row in compared.rows if split in row.unigram}
    if len(unigrams) == 1:
        yield f"Unigram {measure.words}", unigrams.pop(), "same vocabulary"
    seen = [tokens for run in compared.runs if (tokens := integer(run.get("tokens_seen"))) is not None]
    if seen:
        ends = dict.fromkeys(figures.short_count(value) for value in (min(seen), max(seen)))
        yield "Training tokens", "–".join(ends), "per run"


def _samples(rows: Sequence[Row]) -> Iterator[tuple[Row, str, str, str]]:
    """A text that each row has written: its prompt, what follows, and how it was drawn."""
    for row in rows:
        sample = mapping(row.get("sample"))
        prompt, text = str(sample.get("prompt", "")), str(sample.get("text", ""))
        if text:
            drawn = f"{sample.get('tokens')} tokens, temperature {sample.get('temperature')}, seed {sample.get('seed')}"
            beginning = prompt if text.startswith(prompt) else ""
            yield row, beginning, text.removeprefix(beginning), drawn


def _sentences(compared: Comparison) -> list[tuple[str, list[tuple[Row, str]]]]:
    """The first references of the test split, or of validation, each with the translation of every row that kept any."""
    kept: list[tuple[Row, list[str], list[str]]] = []
    for row in compared.rows if compared.measure is BLEU else ():
        with contextlib.suppress(InputError):
            kept.append((row, *translations(row.runs[0].folder, compared.split)))
    kept = [(row, hypotheses, wanted) for row, hypotheses, wanted in kept if wanted == kept[0][2]]
    references = kept[0][2][:_SENTENCES] if kept else []
    return [(wanted, [(row, hypotheses[i]) for row, hypotheses, _ in kept]) for i, wanted in enumerate(references)]


def _strips(compared: Comparison) -> Drawing:
    """Final figures: a dot for each seed."""
    measure, split = compared.measure, compared.split
    words = f"{SPLIT_WORDS[split]} {measure.words}"
    values = ", ".join(f"{row.name} {row.mark(measure.spread(row.figures.get(split)))}" for row in compared.rows)
    strips = []
    for row in compared.rows:
        dots = [value for run in row.runs if (value := measure.final(run, split)) is not None]
        strips.append((row.mark(row.name), row.slot, dots))
    label, alt = f"{words} ({measure.comparative} is better)", f"Final {words}: {values}."
    strip = draw_strips(f"Final {words}", strips, label, alt)
    if any(row.marked for row in compared.rows):
        strip.notes.append(f"{MARK} {NOT_NEXT_TOKEN}.")
    return strip


def _series(groups: Sequence[RunGroup], read: Callable[[RunRecord], Curve | None]) -> list[Series]:
    drawn = [(group, tuple(c for run in group.runs if (c := read(run)) is not None)) for group in groups]
    return [Series(group.name, group.slot, curves, group.finished) for group, curves in drawn if curves]


def _two_halves(
    heading: str, note: str, series: Sequence[Series], unit: str, x: str, *, log: bool = False
) -> list[Drawing]:
    """The whole training, and its second half alone."""
    if any(one.band for one in series):
        note += " Over several seeds a line is the mean, its band ± the standard deviation."
    half = "The same curves from half of the longest training on; the axis does not start at zero."
    return [
        *draw_curves(heading, note, series, unit, x, log=log),
        *draw_curves(f"{heading}, second half", half, drawing.second_half(series), unit, x),
    ]


def _validation_curves(compared: Comparison, groups: Sequence[RunGroup]) -> list[Drawing]:
    """The validation figure over training tokens."""
    measure = compared.measure

    def read(line: Mapping[str, Any]) -> float | None:
        value = measure.logged_figure(line)
        return value if value and value > 0 else None

    series = _series(groups, lambda run: drawing.validation(run, read))
    ends = [value for one in series for curve in one.curves for value in (curve.y.min(), curve.y.max())]
    wide = bool(ends) and not measure.in_bits and max(ends) > 4 * min(ends)  # bits are logarithms already
    note = f"Whole training{', logarithmic axis' if wide else ''}."
    return _two_halves(f"Validation {measure.unit}", note, series, measure.unit, "training tokens", log=wide)


def _translation_curves(compared: Comparison, groups: Sequence[RunGroup]) -> list[Drawing]:
    """Validation BLEU (as Mixhead's Fig. 2) and validation loss, by epoch where its length is known."""
    lengths = [length for run in compared.runs if (length := drawing.steps_per_epoch(run)) is not None]
    # an unfinished run does not say how long its epochs are; those of the same text are as long
    usual = lengths[0] if compared.comparable and lengths else None
    x = "training tokens" if usual is None else "epochs"

    def series(read: Reader) -> list[Series]:
        return _series(
            groups, lambda run: drawing.validation(run, read, usual and (drawing.steps_per_epoch(run) or usual))
        )

    bleu, loss = series(BLEU.logged_figure), series(lambda line: number(line.get("nll")))
    note = "Nats per target token; lower is better."
    return [
        *_two_halves("Validation BLEU", "As measured while training; higher is better.", bleu, BLEU.unit, x),
        *_two_halves("Validation loss", note, loss, "nats per token", x),
    ]


def _training_curves(compared: Comparison, groups: Sequence[RunGroup]) -> list[Drawing]:
    """Training loss, learning rate and speed."""
    unit, tokens = f"nats per {'masked token' if compared.task == runs.MASKED_MODELING else 'token'}", "training tokens"
    lines = [sum(line.get("split") == "train" for line in run.metrics) for group in groups for run in group.runs]
    widest = max((drawing.window(number) for number in lines if number), default=1)
    smooth = f"Smoothed lightly: centred moving average over up to {widest} logged values."
    smooth = "Not smoothed." if widest == 1 else smooth
    losses = _series(groups, functools.partial(drawing.training, key="nll", smooth=True))
    rates = drawing.merged(_series(groups, functools.partial(drawing.training, key="lr")))
    speeds = _series(groups, functools.partial(drawing.training, key="tokens_per_second", smooth=True))
    zero = functools.partial(draw_curves, from_zero=True, width=NARROW)
    return [
        *draw_curves("Training loss", f"N{unit[1:]}. {smooth}", losses, unit, tokens, width=NARROW),
        *zero("Learning rate", "As set at each logged step.", rates, "learning rate", tokens),
        *zero("Speed", f"Training tokens per second. {smooth}", speeds, "tokens per second", tokens),
    ]


def _spectra(compared: Comparison, groups: Sequence[RunGroup]) -> list[Drawing]:
    """How much of the attention weights their largest singular values hold, where `fullrank analyze spectrum` measured it."""
    series = _series(groups, drawing.spectrum)
    note = "After mixing; mean over heads and layers. The sooner a curve rises, the lower the rank (Mixhead, Fig. 1 and 3)."
    if open_rows := [group.name for group in groups if group.name not in {one.name for one in series}]:
        note += f" Not measured: {listed(open_rows)}."
    of_sum, of_values = "share of their sum", "share of the singular values"
    return draw_curves("Singular values of attention weights", note, series, of_sum, of_values, from_zero=True)


def _bars(rows: Sequence[Row], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """For each row its parts as shares of a bar whose width is the row's share of the largest total."""
    largest = max((row.parameters or 0 for row in rows), default=0)
    for row in rows:
        sizes, total = tables.parts_of_parameters(row), row.parameters
        if not sizes or total is None or sum(sizes.values()) > total:
            continue  # parts that overlap have no place in a stack
        parts = [(names.index(name) % COLOURS, name, size) for name, size in sizes.items() if size > 0]
        rest = total - sum(sizes.values())
        yield {"name": row.name, "width": f"{100 * total / largest:.2f}", "parts": parts, "rest": rest}


def _progress(run: RunRecord, measure: Measure) -> str:
    """Progress of an unfinished run."""
    steps = [step for line in run.metrics if (step := integer(line.get("step"))) is not None]
    if not steps:
        return "no step is recorded yet"
    lines = (line for line in run.metrics if line.get("split") == "valid")
    values = [value for line in lines if (value := measure.logged_figure(line)) is not None]
    last = f"; last validation {measure.unit} {measure.show(values[-1])}" if values else ""
    remark = f" ({NOT_NEXT_TOKEN})" if last and run.sees_future else ""
    return f"reached step {max(steps):,}{last}{remark}"


# -- fine-tuning ------------------------------------------------------------------------------------------------------


def _of_tuning(tuning: Tuning) -> dict[str, Any]:
    finished, unfinished, names = len(tuning.runs), len(tuning.unfinished), [task.name for task in tuning.tasks]
    on = f" on {listed(names)}" if 0 < len(names) < 4 else f" on {len(names)} tasks" if names else ""
    return {
        "title": f"Fine-tuning: {_plural(finished + unfinished, 'run')}{on}",
        "subtitle": _subtitle(len(tuning.arms), "arm", finished, unfinished),
        "tiles": [],
        "tasks": tuning.tasks,
        "score_strips": _score_strips,
        "configurations_of": _configurations,
        "cards": _tuning_cards(tuning) if tuning.arms else [],
        "commands": [(arm, f"seeds {arm.seeds_words}", _arm_commands(arm)) for arm in tuning.arms],
        "troubles": [(run, "not finished", run.problems) for run in tuning.unfinished],
        "verb": "finetune",
    }


def _score_strips(task: Task, key: Key) -> Drawing:
    """Scores of every arm: a dot for each seed."""
    arms = [(arm, arm.figures[key]) for arm in task.arms if key in arm.figures]
    words = f"{key[0]} {metric_words(key[1])} x 100 (higher is better)"
    alt = f"{task.caption(key)}: {', '.join(f'{arm.name} {figure.words}' for arm, figure in arms)}."
    rows = [(arm.name, arm.slot, figure.values) for arm, figure in arms]
    return draw_strips(f"{key[0]}: {metric_words(key[1])}", rows, words, alt)


# -- configurations, environment, commands ----------------------------------------------------------------------------


def _configurations(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """The keys in which rows differ (None if all agree), and every resolved configuration with its heading."""
    known = [(group.name, runs) for group in groups if (runs := [run for run in group.runs if run.config])]
    resolved = []
    for name, runs in known:
        seeds = [run.seed for run in runs if run.seed is not None]
        others = f" (seed {seeds[0]}; the other seeds differ in train.seed)" if len(seeds) > 1 else ""
        config = dict(runs[0].config)
        text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)
        resolved.append((f"Resolved configuration of {name}{others}", text))
    several = sum(len(runs) for _, runs in known) > 1
    return {"several": several, "differences": _config_differences(known) if several else None, "resolved": resolved}


def _config_differences(known: Sequence[tuple[str, Sequence[RunRecord]]]) -> Table | None:
    flat = {name: [flatten(run.config) for run in seeds] for name, seeds in known}
    rows: list[tables.Cells] = []
    for key in dict.fromkeys(key for seeds in flat.values() for run in seeds for key in run):
        texts = [[_text(run[key]) if key in run else "(absent)" for run in seeds] for seeds in flat.values()]
        values = [list(dict.fromkeys(row)) for row in texts]
        if len({value for row in values for value in row}) > 1:
            cells = [Cell(_of_seeds(row), strong=row != values[0]) for row in values]
            columns = [Column(name, words=True) for name in flat]
            rows.append([("Key", Cell(key)), *zip(columns, cells, strict=True)])
    return tables.table("Keys in which the configurations differ", rows) if rows else None


def _of_seeds(values: Sequence[str]) -> str:
    """Values of the seeds of a row; many whole numbers as ranges."""
    if len(values) > 5 and all(value.isdecimal() for value in values):
        return figures.ranges(map(int, values))
    return ", ".join(values)


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


Facts = dict[str, str | Callable[[RunRecord], object]]  # by label: the dotted key of a result, or a function of a run
Shared = list[tuple[str, str]]  # a value and the names of the rows that have it; no names where all agree
Card = tuple[str, list[tuple[str, Shared]]]  # heading; label and values of each fact


def _comparison_cards(compared: Comparison) -> list[Card]:
    """Text, protocol and machine: one value where all runs agree, else one for each group of rows."""
    measure = compared.measure

    def unigram(run: RunRecord) -> str:
        known = measure.unigrams(run)
        return " / ".join(measure.show(known.get(split)) for split in SPLITS) if known else ""

    text: Facts = {
        "corpus": "corpus.name",
        "label": "corpus.label",
        "slice": lambda run: "yes" if run.corpus.get("is_slice") else "no",
        "tokens (train / valid / test)": lambda run: _by_split(run, "tokens"),
        "sentence pairs (train / valid / test)": lambda run: _by_split(run, "pairs"),
        "source tokens (train / valid / test)": lambda run: _by_split(run, "tokens", "source"),
        "target tokens (train / valid / test)": lambda run: _by_split(run, "tokens", "target"),
        "vocabulary": _vocabulary,
        f"unigram {measure.words} (valid / test)": unigram,
    }
    training: Facts = {
        "seeds": lambda run: run.seed,
        "protocol": "protocol",
        "BLEU": lambda run: " and ".join(signatures([run]).get(BLEU.key, ())),
        "chrF": lambda run: " and ".join(signatures([run]).get(CHRF.key, ())),
        "recipe": "recipe",
        "scale": "scale",
        "steps": lambda run: _count(run.get("steps")),
        "tokens seen": lambda run: _count(run.get("tokens_seen")),
    }
    return _cards({"Text": text, "Training and protocol": training}, compared.rows)


def _tuning_cards(tuning: Tuning) -> list[Card]:
    """Protocol, examples and machine."""
    splits = dict.fromkeys(split for run in tuning.runs for split in mapping(run.get("sha256")))
    examples = [(f"{task.name}, {split}", task.examples(split)) for task in tuning.tasks for split in splits]
    known = [(label, [(words, "")]) for label, words in examples if not words.startswith(UNKNOWN)]
    training: Facts = {key: key for key in ("recipe", "scale", "protocol", "checkpoint", "kernel")}
    return [("Examples", known)] * bool(known) + _cards({"Training and protocol": training}, tuning.arms)


def _cards(cards: dict[str, Facts], groups: Sequence[RunGroup]) -> list[Card]:
    """Cards with the facts that are known, and the machine."""
    runs: dict[str, list[RunRecord]] = {}  # by name: arms of several tasks may have the same
    for group in groups:
        runs.setdefault(group.name, []).extend(group.runs)
    keys = dict.fromkeys(str(key) for group in groups for run in group.runs for key in mapping(run.get("environment")))
    cards["Machine and versions"] = {figures.readable(key): f"environment.{key}" for key in keys}
    known = [
        (heading, [(label, shared) for label, read in facts.items() if (shared := _shared(runs, label, read))])
        for heading, facts in cards.items()
    ]
    return [(heading, facts) for heading, facts in known if facts]


def _shared(runs: Mapping[str, Sequence[RunRecord]], label: str, read: str | Callable[[RunRecord], object]) -> Shared:
    """The value in which all agree, or every value with the names of the rows that have it; empty if nobody has one."""
    separator, by_value = ", " if label == "seeds" else " and ", dict[str, list[str]]()
    for name, group in runs.items():
        values = [run.get(*read.split(".")) if isinstance(read, str) else read(run) for run in group]
        texts = dict.fromkeys(_text(value) for value in values if value not in (None, ""))
        by_value.setdefault(separator.join(texts), []).append(name)
    if len(by_value) == 1:
        return [(value, "") for value in by_value if value]
    return [(value or MISSING, listed(names)) for value, names in by_value.items()]


def _count(value: object) -> str:
    whole = integer(value)
    return "" if whole is None else count(whole)


def _by_split(run: RunRecord, key: str, side: str | None = None) -> str:
    """Counts of the splits of the corpus; of sentence pairs those of one `side`."""
    sizes: Mapping[str, Any] = mapping(run.corpus.get(key))
    splits = [mapping(sizes.get(split)).get(side) if side else sizes.get(split) for split in ("train", *SPLITS)]
    numbers = [integer(value) for value in splits]
    return " / ".join(map(count, numbers)) if any(value is not None for value in numbers) else ""


def _vocabulary(run: RunRecord) -> str:
    """Size of the vocabulary; of sentence pairs those of source and target."""
    size = run.corpus.get("vocabulary")
    sides = [f"{_count(mapping(size).get(side))} {side}" for side in ("source", "target") if mapping(size).get(side)]
    return " / ".join(sides) or _count(size)


def _origin(runs: Sequence[RunRecord]) -> str:
    """`recipe mos/table2, row k5, scale small, seeds 1 and 2`."""
    words = [f"{word} {known}" for word in ("recipe", "row", "scale") if (known := runs[0].origin(word))]
    if seeds := [str(run.seed) for run in runs if run.seed is not None]:
        words.append(f"seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}")
    return ", ".join(words)


def _commands(runs: Sequence[RunRecord], verb: str = "train") -> str:
    """Commands that train runs again from the configurations saved with them."""
    lines = []
    for run in runs:
        folder = run.folder
        again = folder.with_name(f"{folder.name}-again") if folder.name not in ("", "..") else folder / "again"
        lines.append(shlex.join(["fullrank", verb, str(folder / "config.yaml"), "--out", str(again)]))
    return "\n".join(lines)


def _arm_commands(arm: Arm) -> str:
    """One command for seeds 1 to N of fine-tuning, else one for each run."""
    runs = arm.runs
    if len(runs) == 1 or list(arm.seeds) != list(range(1, len(runs) + 1)):
        return _commands(runs, "finetune")
    again = runs[0].folder.parent / f"{arm.name.replace(' ', '-')}-again"
    words = [str(runs[0].folder / "config.yaml"), "--seeds", str(len(runs)), "--out", str(again)]
    return f"fullrank finetune {shlex.join(words)}"
