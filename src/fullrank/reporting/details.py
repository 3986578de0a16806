"""The lower part of a report: parameters, configurations and their differences, environment, how to reproduce."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from fullrank.config.load import flatten
from fullrank.reporting import format
from fullrank.reporting.markup import Html, details, el, join, preformatted, section, swatch, table, td, th
from fullrank.reporting.measure import Measure
from fullrank.reporting.results import SPLITS, RunRecord, integer, mapping, number
from fullrank.reporting.table import Comparison, Row, parameters_by_part

_ABSENT = object()
Named = tuple[str, int, Sequence[RunRecord]]  # name, colour, runs


def parameters_section(rows: Sequence[Row]) -> Html:
    """A bar of the parts of each row, and the exact numbers."""
    parts = [parameters_by_part(row.runs[0]) for row in rows]
    names = list(dict.fromkeys(name for found in parts for name, size in found.items() if size))
    if not names:
        return Html("")
    largest = max((row.parameters or 0 for row in rows), default=0)
    bars = join(_bar(row, found, names, largest) for row, found in zip(rows, parts, strict=True))
    head = [
        th("Row"),
        *(th(_part_chip(names, name), format.readable(name), cls="num") for name in names),
        th("total", cls="num"),
    ]
    body = [
        [th(row.name, scope="row", cls="row-name"), *(td(format.count(found.get(name)), cls="num") for name in names),
         td(format.count(row.parameters), cls="num")]
        for row, found in zip(rows, parts, strict=True)
    ]  # fmt: skip
    return section("parameters", "Parameters by part", el("div", bars, cls="bars", attrs={"aria-hidden": "true"}),
                   table([head], body, caption="Parameters by part"))  # fmt: skip


def _bar(row: Row, parts: Mapping[str, int], names: Sequence[str], largest: int) -> Html:
    """The parts as shares of a bar whose width is the row's share of the largest total."""
    if not parts or row.parameters is None or sum(parts.values()) > row.parameters:
        return Html("")  # parts that overlap have no place in a stack
    cells = [
        el(
            "span",
            cls=f"part part-{names.index(name) % 8}",
            attrs={"style": f"flex-grow:{size}", "title": f"{format.readable(name)}: {size:,}"},
        )
        for name, size in parts.items()
        if size > 0
    ]
    rest = row.parameters - sum(parts.values())
    if rest > 0:
        cells.append(el("span", cls="part", attrs={"style": f"flex-grow:{rest}", "title": f"other: {rest:,}"}))
    bar = el("div", *cells, cls="bar", attrs={"style": f"width:{100 * row.parameters / largest:.2f}%"})
    return el("div", el("span", row.name, cls="bar-name"), bar, cls="bar-row")


def _part_chip(names: Sequence[str], name: str) -> Html:
    return el("span", cls=f"chip part-{names.index(name) % 8}", attrs={"aria-hidden": "true"})


def configuration_section(named: Sequence[Named]) -> Html:
    """The keys in which rows differ, then every resolved configuration."""
    return section("configuration", "Configuration", *configurations(named))


def configurations(named: Sequence[Named]) -> list[Html]:
    """The same without its section; nothing where no configuration is known."""
    known = [(name, slot, [run for run in runs if run.config]) for name, slot, runs in named]
    known = [entry for entry in known if entry[2]]
    if not known:
        return []
    parts: list[Html] = []
    if sum(len(runs) for _, _, runs in known) > 1:
        parts.append(_differences(known))
    for name, _, runs in known:
        text = yaml.safe_dump(
            dict(runs[0].config), sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
        )
        seeds = _seeds(runs)
        others = f" (seed {seeds[0]}; the other seeds differ in train.seed)" if len(seeds) > 1 else ""
        parts.append(details(f"Resolved configuration of {name}{others}", preformatted(text)))
    return parts


def _differences(known: Sequence[Named]) -> Html:
    flat = [[flatten(run.config) for run in runs] for _, _, runs in known]
    keys = dict.fromkeys(key for runs in flat for run in runs for key in run)
    rows: list[list[Html]] = []
    for key in keys:
        texts = [list(dict.fromkeys(_value(run.get(key, _ABSENT)) for run in runs)) for runs in flat]
        if len({text for row in texts for text in row}) < 2:
            continue
        cells = [td(el("code", _all(row)), cls="" if row == texts[0] else "differs") for row in texts]
        rows.append([th(el("code", key), scope="row", cls="row-name"), *cells])
    if not rows:
        return el("p", "All configurations are the same.", cls="note")
    head = [th("Key"), *(th(swatch(slot), name) for name, slot, _ in known)]
    note = "All other keys are the same. Values unlike those of the first column are tinted."
    return join([table([head], rows, caption="Keys in which the configurations differ"), el("p", note, cls="note")])


def _all(values: Sequence[str]) -> str:
    """Values of the seeds of a row; many whole numbers as ranges."""
    if len(values) > 5 and all(value.isdecimal() for value in values):
        return format.ranges(map(int, values))
    return ", ".join(values)


def _value(value: object) -> str:
    if value is _ABSENT:
        return "(absent)"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def _seeds(runs: Sequence[RunRecord]) -> list[int]:
    return [run.seed for run in runs if run.seed is not None]


def environment_section(compared: Comparison) -> Html:
    """Text, protocol and machine: one value where all runs agree, else one for each group of runs."""
    rows = compared.rows
    if not rows:
        return Html("")
    results = [(row.name, mapping(run.result)) for row in rows for run in row.runs]
    measure = compared.measure
    unigrams = shared([(row.name, row.unigram) for row in rows], lambda found: _unigram(found, measure))
    cards = [
        card(
            "Text",
            [
                *((label, shared(results, read)) for label, read in _TEXT),
                (f"unigram {measure.words} (valid / test)", unigrams),
            ],
        ),
        card(
            "Training and protocol",
            [("seeds", _seeds_line(rows)), *((label, shared(results, read)) for label, read in _TRAINING)],
        ),
        machine_card(results),
    ]
    return section("environment", "Environment", el("div", *cards, cls="cards"))


def machine_card(results: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    """Machine and versions: `results` are those of all runs, each with the name of its row."""
    environments = [(name, mapping(result.get("environment"))) for name, result in results]
    keys = dict.fromkeys(key for _, environment in environments for key in environment)
    facts = [
        (
            format.readable(str(key)),
            shared([(name, {"value": found.get(key)}) for name, found in environments], value_of),
        )
        for key in keys
    ]
    return card("Machine and versions", facts)


def _corpus(result: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(result.get("corpus"))


def _split_tokens(result: Mapping[str, Any], side: str | None = None) -> str:
    """Tokens of each split; of sentence pairs those of one `side`."""
    tokens = mapping(_corpus(result).get("tokens"))
    found = {split: mapping(value).get(side) if side else value for split, value in tokens.items()}
    return _splits(found)


def _splits(found: Mapping[str, Any]) -> str:
    counts = [integer(found.get(split)) for split in ("train", *SPLITS)]
    return " / ".join(map(format.count, counts)) if any(value is not None for value in counts) else ""


def _vocabulary(result: Mapping[str, Any]) -> str:
    """Its size; of sentence pairs that of source and target."""
    found = _corpus(result).get("vocabulary")
    sides = [f"{size} {side}" for side in ("source", "target") if (size := _count(mapping(found).get(side)))]
    return " / ".join(sides) or _count(found)


def _signature(result: Mapping[str, Any], key: str) -> str:
    final = mapping(result.get("final"))
    return " and ".join(dict.fromkeys(str(way) for split in SPLITS if (way := mapping(final.get(split)).get(key))))


def _unigram(found: Mapping[str, Any], measure: Measure) -> str:
    return " / ".join(measure.show(number(found.get(split))) for split in SPLITS) if found else ""


def _plain(value: object) -> str:
    if value is None or value == "":
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def value_of(found: Mapping[str, Any]) -> str:
    """What stands under `value`."""
    return _plain(found.get("value"))


def _count(value: object) -> str:
    found = integer(value)
    return "" if found is None else format.count(found)


_Reader = Callable[[Mapping[str, Any]], str]
_TEXT: tuple[tuple[str, _Reader], ...] = (
    ("corpus", lambda result: _plain(_corpus(result).get("name"))),
    ("label", lambda result: _plain(_corpus(result).get("label"))),
    ("slice", lambda result: "yes" if _corpus(result).get("is_slice") else "no"),
    ("tokens (train / valid / test)", _split_tokens),
    ("sentence pairs (train / valid / test)", lambda result: _splits(mapping(_corpus(result).get("pairs")))),
    ("source tokens (train / valid / test)", lambda result: _split_tokens(result, "source")),
    ("target tokens (train / valid / test)", lambda result: _split_tokens(result, "target")),
    ("vocabulary", _vocabulary),
)
_TRAINING: tuple[tuple[str, _Reader], ...] = (
    ("protocol", lambda result: _plain(result.get("protocol"))),
    ("BLEU", lambda result: _signature(result, "bleu_signature")),
    ("chrF", lambda result: _signature(result, "chrf_signature")),
    ("recipe", lambda result: _plain(result.get("recipe"))),
    ("scale", lambda result: _plain(result.get("scale"))),
    ("steps", lambda result: _count(result.get("steps"))),
    ("tokens seen", lambda result: _count(result.get("tokens_seen"))),
)


def _seeds_line(rows: Sequence[Row]) -> Html:
    return shared(
        [(row.name, {"seed": run.seed}) for row in rows for run in row.runs],
        lambda found: _plain(found["seed"]),
        joined=True,
    )


def shared(named: Sequence[tuple[str, Mapping[str, Any]]], read: _Reader, joined: bool = False) -> Html:
    """The value all agree in, or every value with the rows that have it; empty if nobody has one."""
    rows: dict[str, list[str]] = {}
    for name, found in named:
        values = rows.setdefault(name, [])
        if (text := read(found)) not in values:
            values.append(text)
    separator = ", " if joined else " and "
    by_value: dict[str, list[str]] = {}
    for name, values in rows.items():
        by_value.setdefault(separator.join(filter(None, values)), []).append(name)
    if len(by_value) == 1:
        return join(by_value)
    return join(
        el("span", f"{value or format.MISSING} ", el("small", format.listed(names)), cls="variant")
        for value, names in by_value.items()
    )


def card(heading: str, facts: Sequence[tuple[str, Html]]) -> Html:
    """Names and values of one kind; nothing where no value is known."""
    known = [(label, value) for label, value in facts if value]
    if not known:
        return Html("")
    return el(
        "div",
        el("h3", heading),
        el("dl", join(join([el("dt", label), el("dd", value)]) for label, value in known)),
        cls="card",
    )


def reproduce_section(named: Sequence[Named]) -> Html:
    """Commands that train each row again from the configuration saved with it."""
    items: list[Html] = []
    for name, slot, runs in named:
        origin = [f"{word} {known}" for word in ("recipe", "row", "scale") if (known := runs[0].origin(word))]
        if seeds := _seeds(runs):
            origin.append(f"seed{'s' if len(seeds) > 1 else ''} {format.listed([str(seed) for seed in seeds])}")
        commands = "\n".join(_command(run) for run in runs)
        items.append(
            el("li", swatch(slot), el("b", name), f" {', '.join(origin)}" if origin else "", preformatted(commands))
        )
    note = (
        "Each command trains the resolved configuration saved with a run, seed included, into a new folder; "
        "the same figures need the same versions, device and number of threads."
    )
    resume = el(
        "p",
        "An unfinished run goes on exactly where it was with ",
        el("code", "fullrank train FOLDER"),
        ".",
        cls="note",
    )
    return section("reproduce", "How to reproduce", el("p", note, cls="note"), el("ul", *items, cls="commands"), resume)


def _command(run: RunRecord) -> str:
    folder = run.folder
    again = folder.with_name(f"{folder.name}-again") if folder.name not in ("", "..") else folder / "again"
    return f"fullrank train {shlex.quote(str(folder / 'config.yaml'))} --out {shlex.quote(str(again))}"
