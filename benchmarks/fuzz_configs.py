"""Random configurations over the whole schema, for `fuzz.py`: drawn from the types of every key of all four tasks."""

from __future__ import annotations

import copy
import random
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml

from fault_runs import KINDS, Settings
from fullrank.config.finetune import FinetuneConfig
from fullrank.config.load import build_any
from fullrank.config.run import RunConfig
from fullrank.core.errors import FullRankError
from fullrank.core.section import ByKind, Section, Slot, hints_of, keys_of, section_in
from fuzz import Case

# values that no key, or hardly any, is made for
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30), 0.0, -0.5, 1e-300, 1e300, 1e-46,
    float("nan"), float("inf"), -float("inf"), "", " ", "nan", "1e400", "9" * 400, "9" * 5000, "0x10", "1_000", "a" * 300,
    "../" * 30, "/dev/zero", "/proc/self/mem", "/nonexistent/folder", "\u202e\ud7ff\u0007", "{}", "none", "null", "[1, 2]",
    [], [[]], [0], [-1, 2], [1] * 1000, [2**40], ["a", None], {}, {"name": "none"}, {"name": None}, {"kind": "x"}, {"": 1},
    {"a": {"b": {"c": []}}}, {1: 2}, {"name": "random", "std": 1e30}, {"name": "relative", "clamp_length": 2**31 - 1},
]  # fmt: skip
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31]
LARGE = [64, 1000, 65_536, 10**6, 2**30, 2**31 - 1]
NUMBERS = [1e-300, 1e-8, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 0.999999, 1.0, 1.5, 2.0, 10.0, 1e4, 1e30, 1e300]
WORDS = [
    "cpu",
    "auto",
    "cuda",
    "cuda:7",
    "meta",
    "de",
    "en",
    "train.txt",
    "valid.txt",
    "train",
    "en.codes",
    ".",
    "none",
    "linear",
    "uniform",
    "not_first",
    "not_last",
    "not_first_or_last",
    "listed",
    "minilm",
    "random",
    "main",
    "cola",
]
CORPORA = [
    "text",
    "parallel",
    "builtin",
    "synthetic-translation",
    "ptb",
    "enwik8",
    "lm1b",
    "iwslt14-de-en",
    "glue/cola",
    "squad",
]
RARE = {"compile": 0.02, "cuda_graphs": 0.05}  # minutes each, or never on a CPU
TASKS = {"plain": RunConfig, "masked": RunConfig, "translation": RunConfig, "fine-tuning": FinetuneConfig}


def word_of(draw: random.Random, hint: Any, name: str) -> Any:
    """A value of about the type of a key, mostly one that is allowed."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        slots = [mark for mark in args[1:] if isinstance(mark, Slot)]
        return stage(draw, slots[0]) if slots else word_of(draw, args[0], name)
    if origin in (types.UnionType, typing.Union):
        return word_of(draw, draw.choice(args), name)
    if origin is Literal:
        return draw.choice(args)
    if origin in (list, tuple):
        count = len(args) if origin is tuple else draw.choice([0, 1, 1, 2, 2, 3, 5])
        values = [word_of(draw, args[0], name) for _ in range(count)]
        return sorted(values) if all(isinstance(one, int) for one in values) and draw.random() < 0.7 else values
    if origin is dict:
        return {draw.choice(WORDS): draw.choice(SIZES)}
    if hint is types.NoneType:
        return None
    if hint is bool:
        return draw.random() < RARE.get(name, 0.5)
    if hint is int:
        return draw.choice(LARGE) if draw.random() < 0.1 else draw.choice(SIZES)
    if hint is float:
        return draw.choice(NUMBERS)
    if isinstance(hint, type) and issubclass(hint, Section):
        return section(draw, hint, draw.choice([0.1, 0.3]))
    return draw.choice(CORPORA) if name == "name" else draw.choice(WORDS)


def stage(draw: random.Random, slot: Slot) -> Any:
    """A stage by name, now and then with options."""
    name = draw.choice(slot.names())
    config = slot.built_in.get(name)
    if config is None or draw.random() < 0.6:
        return name
    return {"name": name} | {
        one.name: word_of(draw, hints_of(config)[one.name], one.name) for one in fields(config) if draw.random() < 0.5
    }


def section(draw: random.Random, cls: type[Section], share: float) -> Settings:
    """A section with this share of its keys; one that `kind` decides about has mostly the keys of one kind."""
    known, made = keys_of(cls), {}
    if issubclass(cls, ByKind):
        member = draw.choice(cls.MEMBERS)
        made["kind"] = member.kind
        known = known if draw.random() < 0.1 else hints_of(member)
    for name, hint in known.items():
        if name != "kind" and draw.random() < share:
            made[name] = word_of(draw, hint, name)
    return made


def paths_of(cls: type[Section], before: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every key of a configuration with its type, leaves and sections."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, hint in keys_of(cls).items():
        path = (*before, name)
        inner = section_in(hint)
        found.append((path, hint))
        found += paths_of(inner, path) if inner else []
    return found


def lay(settings: Settings, path: tuple[str, ...], value: Any) -> None:
    """Set a key, all the way down."""
    for name in path[:-1]:
        if not isinstance(settings.get(name), dict):
            settings[name] = {}
        settings = settings[name]
    settings[path[-1]] = value


BOMBS: list[Callable[[random.Random], str]] = [
    lambda draw: "[" * draw.choice([50, 2000, 100_000]),
    lambda draw: "a: " * draw.choice([50, 5000]) + "1",
    lambda draw: "{a: " * draw.choice([50, 5000]) + "1" + "}" * draw.choice([50, 5000]),
    lambda draw: "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}, *{p}]\n" for p, c in pairwise("abcdefghijklmnopq")),
    lambda draw: "model: &m {attention: *m}\n",
    lambda draw: "model: {hidden_size: " + "9" * draw.choice([400, 5000, 10**6]) + "}\n",
    lambda draw: "train: {seed: 1" + ":59" * draw.choice([3, 400]) + "}\n",
    lambda draw: "? [a, b]\n: 1\n? {c: d}\n: 2\n",
    lambda draw: "model: !!python/object/apply:os.system ['true']\n",
    lambda draw: "data: {name: 2024-02-30}\ntrain: {steps: 2024-01-01}\n",
    lambda draw: "\ufeffmodel: {hidden_size: 8}\n---\nmodel: {}\n",
    lambda draw: "model:\n\thidden_size: 8\n",
    lambda draw: "# " + "x" * (1 << 21),
    lambda draw: "<<: [{model: {hidden_size: 8}}, 3]\n",
    lambda draw: "model: {hidden_size: 8, hidden_size: 16}\n",
    lambda draw: "model: {attention: {mix: {name: !!binary aGFsbG8=}}}\ntrain: {betas: !!set {0.1, 0.2}}\n",
]  # fmt: skip


def text_of(draw: random.Random, settings: Settings) -> str:
    """The YAML of a configuration; now and then a bomb instead, or around it."""
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    if draw.random() < 0.04:
        bomb = draw.choice(BOMBS)(draw)
        return bomb if draw.random() < 0.5 else f"{text}\n{bomb}"
    return text


def accepted(settings: Settings) -> bool:
    """The configuration is not refused; where checking it fails in another way, training is to show that."""
    try:
        build_any(settings)
    except FullRankError:
        return False
    except Exception:  # a bug, which the case is to show
        return True
    return True


def cases(place: Path) -> Callable[[int, int], Case]:
    """Write the data of every task into `place`; the maker of a case from the seed and its number."""
    bases: dict[str, Settings] = {}
    for task in TASKS:
        source = place / "data" / task
        source.mkdir(parents=True)
        bases[task] = yaml.safe_load(KINDS[task].write(source).read_text(encoding="utf-8"))
        bases[task]["train"] |= {"steps": 2, "save_every_steps": 1, "log_every_steps": 1}
        bases[task]["eval"] |= {"every_steps": 2}
    bases["fine-tuning"]["train"]["steps"] = 1
    known = {task: paths_of(cls) for task, cls in TASKS.items()}

    def make(seed: int, number: int) -> Case:
        draw = random.Random(f"{seed} config {number}")
        task = draw.choices(list(TASKS), [6, 3, 3, 2])[0]
        settings, told = copy.deepcopy(bases[task]), []
        picky = draw.random() < 0.8  # only changes that make a configuration that is accepted
        for _ in range(draw.choice([1, 2, 4, 8, 16, 32] if picky else [0, 1, 2, 3])):  # of about the right type
            path, hint = draw.choice(known[task])
            changed = copy.deepcopy(settings)
            lay(changed, path, word_of(draw, hint, path[-1]))
            if not picky or accepted(changed):
                settings = changed
                told.append(".".join(path))
        for _ in range(draw.choice([0, 0, 0, 0, 0, 1, 2])):  # of any
            path, _ = draw.choice(known[task])
            if draw.random() < 0.05:
                path = (*path[:-1], draw.choice(["", "hiden_size", "a.b", "model", "\u00fc"]))
            lay(settings, path, draw.choice(HOSTILE))
            told.append(f"{'.'.join(path)}!")
        folder = place / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(text_of(draw, settings), encoding="utf-8", errors="surrogatepass")
        return Case(
            f"config:{number}",
            folder,
            ["train", "config.yaml", "--out", "run", "--quiet"],
            f"{task}: {', '.join(told)}",
        )

    return make
