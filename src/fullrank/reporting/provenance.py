"""Lower part of a page: configurations and their differences, environment, commands that train again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from fullrank.config.load import flatten
from fullrank.reporting import format
from fullrank.reporting.compare import Comparison
from fullrank.reporting.finetuning import UNKNOWN, Arm, Tuning
from fullrank.reporting.format import MISSING, count, listed
from fullrank.reporting.runs import SPLITS, RunRecord, integer, mapping
from fullrank.reporting.tables import Cell, Column, Table


class Named(NamedTuple):
    """Runs of a row or arm with its name and colour."""

    name: str
    slot: int
    runs: Sequence[RunRecord]
    finished: bool = True


class Shared(NamedTuple):
    """A value and the names of the rows that have it; no names where all agree."""

    value: str
    names: str


Card = tuple[str, list[tuple[str, list[Shared]]]]  # heading; label and values of each fact
NamedRuns = Sequence[tuple[str, RunRecord]]  # every run with the name of its row
Fact = tuple[str, Callable[[RunRecord], object]]  # label, and how a run knows it


def configurations(named: Sequence[Named]) -> dict[str, Any]:
    """The keys in which rows differ (None if all agree), and every resolved configuration with its heading."""
    known = [one._replace(runs=[run for run in one.runs if run.config]) for one in named]
    known = [one for one in known if one.runs]
    resolved = []
    for one in known:
        seeds = [run.seed for run in one.runs if run.seed is not None]
        others = f" (seed {seeds[0]}; the other seeds differ in train.seed)" if len(seeds) > 1 else ""
        config = dict(one.runs[0].config)
        text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)
        resolved.append((f"Resolved configuration of {one.name}{others}", text))
    several = sum(len(one.runs) for one in known) > 1
    return {"several": several, "differences": _differences(known) if several else None, "resolved": resolved}


def _differences(named: Sequence[Named]) -> Table | None:
    flat = [[flatten(run.config) for run in one.runs] for one in named]
    rows = []
    for key in dict.fromkeys(key for runs in flat for run in runs for key in run):
        values = [list(dict.fromkeys(_text(run[key]) if key in run else "(absent)" for run in runs)) for runs in flat]
        if len({value for row in values for value in row}) > 1:
            rows.append((Cell(key), *(Cell(_of_seeds(row), strong=row != values[0]) for row in values)))
    columns = (Column("Key", left=True), *(Column(one.name, left=True) for one in named))
    return Table("Keys in which the configurations differ", columns, tuple(rows)) if rows else None


def _of_seeds(values: Sequence[str]) -> str:
    """Values of the seeds of a row; many whole numbers as ranges."""
    if len(values) > 5 and all(value.isdecimal() for value in values):
        return format.ranges(map(int, values))
    return ", ".join(values)


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def cards_of_comparison(compared: Comparison) -> list[Card]:
    """Text, protocol and machine: one value where all runs agree, else one for each group of rows."""
    measure = compared.measure
    unigrams = {
        row.name: " / ".join(measure.show(row.unigram.get(split)) for split in SPLITS) if row.unigram else ""
        for row in compared.rows
    }
    runs = [(row.name, run) for row in compared.rows for run in row.runs]
    text: list[Fact] = [
        ("corpus", lambda run: run.corpus.get("name")),
        ("label", lambda run: run.corpus.get("label")),
        ("slice", lambda run: "yes" if run.corpus.get("is_slice") else "no"),
        ("tokens (train / valid / test)", lambda run: _by_split(run, "tokens")),
        ("sentence pairs (train / valid / test)", lambda run: _by_split(run, "pairs")),
        ("source tokens (train / valid / test)", lambda run: _by_split(run, "tokens", "source")),
        ("target tokens (train / valid / test)", lambda run: _by_split(run, "tokens", "target")),
        ("vocabulary", _vocabulary),
    ]
    training: list[Fact] = [
        ("protocol", lambda run: run.of("protocol")),
        ("BLEU", lambda run: _signature(run, "bleu_signature")),
        ("chrF", lambda run: _signature(run, "chrf_signature")),
        ("recipe", lambda run: run.of("recipe")),
        ("scale", lambda run: run.of("scale")),
        ("steps", lambda run: _count(run.of("steps"))),
        ("tokens seen", lambda run: _count(run.of("tokens_seen"))),
    ]
    seeds = ("seeds", _shared([(name, run.seed) for name, run in runs], ", "))
    unigram = (f"unigram {measure.words} (valid / test)", _shared(list(unigrams.items())))
    return _card("Text", [*_facts(runs, text), unigram]) + _rest(runs, training, [seeds])


def cards_of_tuning(found: Tuning) -> list[Card]:
    """Protocol, examples and machine."""
    runs = [(arm.name, run) for task in found.tasks for arm in task.arms for run in arm.runs]
    keys = ("recipe", "scale", "protocol", "checkpoint", "kernel")
    splits = dict.fromkeys(split for _, run in runs for split in mapping(run.of("sha256")))
    examples = [
        (f"{task.name}, {split}", [Shared(said, "")])
        for task in found.tasks
        for split in splits
        if not (said := task.examples(split)).startswith(UNKNOWN)
    ]
    return _card("Examples", examples) + _rest(runs, [(key, _reader(key)) for key in keys])


def _reader(*keys: str) -> Callable[[RunRecord], object]:
    return lambda run: run.of(*keys)


def _rest(runs: NamedRuns, training: Sequence[Fact], first: Sequence[tuple[str, list[Shared]]] = ()) -> list[Card]:
    environments = dict.fromkeys(str(key) for _, run in runs for key in mapping(run.of("environment")))
    machine = [(format.readable(key), _reader("environment", key)) for key in environments]
    training_card = _card("Training and protocol", [*first, *_facts(runs, training)])
    return training_card + _card("Machine and versions", _facts(runs, machine))


def _facts(runs: NamedRuns, facts: Sequence[Fact]) -> list[tuple[str, list[Shared]]]:
    return [(label, _shared([(name, read(run)) for name, run in runs])) for label, read in facts]


def _card(heading: str, facts: Sequence[tuple[str, list[Shared]]]) -> list[Card]:
    """A card with the facts that are known; nothing where none is."""
    known = [(label, values) for label, values in facts if values]
    return [(heading, known)] if known else []


def _shared(values: Sequence[tuple[str, object]], separator: str = " and ") -> list[Shared]:
    """The value in which all agree, or every value with the names of the rows that have it; empty if nobody has one."""
    rows: dict[str, dict[str, None]] = {}
    for name, value in values:
        rows.setdefault(name, {})["" if value is None or value == "" else _text(value)] = None
    by_value: dict[str, list[str]] = {}
    for name, texts in rows.items():
        by_value.setdefault(separator.join(filter(None, texts)), []).append(name)
    if len(by_value) == 1:
        return [Shared(value, "") for value in by_value if value]
    return [Shared(value or MISSING, listed(names)) for value, names in by_value.items()]


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


def _signature(run: RunRecord, key: str) -> str:
    ways = [run.of("final", split, key) for split in SPLITS]
    return " and ".join(dict.fromkeys(str(way) for way in ways if way))


def origin(runs: Sequence[RunRecord]) -> str:
    """`recipe mos/table2, row k5, scale small, seeds 1 and 2`."""
    words = [f"{word} {known}" for word in ("recipe", "row", "scale") if (known := runs[0].origin(word))]
    if seeds := [str(run.seed) for run in runs if run.seed is not None]:
        words.append(f"seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}")
    return ", ".join(words)


def commands(runs: Sequence[RunRecord], verb: str = "train") -> str:
    """Commands that train runs again from the configurations saved with them."""
    lines = []
    for run in runs:
        folder = run.folder
        again = folder.with_name(f"{folder.name}-again") if folder.name not in ("", "..") else folder / "again"
        lines.append(f"fullrank {verb} {shlex.quote(str(folder / 'config.yaml'))} --out {shlex.quote(str(again))}")
    return "\n".join(lines)


def arm_commands(arm: Arm) -> str:
    """One command for seeds 1 to N of fine-tuning, else one for each run."""
    runs = arm.runs
    if len(runs) == 1 or list(arm.seeds) != list(range(1, len(runs) + 1)):
        return commands(runs, "finetune")
    again = runs[0].folder.parent / f"{arm.name.replace(' ', '-')}-again"
    words = [str(runs[0].folder / "config.yaml"), "--seeds", str(len(runs)), "--out", str(again)]
    return f"fullrank finetune {shlex.join(words)}"
