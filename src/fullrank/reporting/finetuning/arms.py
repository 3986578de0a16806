"""Runs of fine-tuning gathered: which are seeds of one arm, what an arm is called, which one is its baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullrank.config.load import flatten
from fullrank.reporting import format
from fullrank.reporting.grouping import CIRCUMSTANCES, seeds_of_rows
from fullrank.reporting.results import RunRecord, integer, mapping, number

Runs = tuple[RunRecord, ...]  # of one arm, each with another seed

POINTS = 100.0  # scores are fractions, and shown as papers show them

_METRICS = {
    "matthews_correlation": "Matthews correlation",
    "accuracy": "accuracy",
    "f1": "F1",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
    "exact_match": "exact match",
    "loss": "loss",
}
# a mixing parameter's learning rate belongs to the mechanism, whose paper says that it is larger
_MECHANISM = ("model.attention.", "model.layers", "train.mixing_learning_rate")
_LENGTH = ("train.epochs", "train.steps")


def metric_words(metric: str) -> str:
    """What a score is called."""
    return _METRICS.get(metric, format.readable(metric))


def task_of(run: RunRecord) -> str:
    """`glue/cola`, `squad` .., from the result or else from the configuration."""
    return str(mapping(run.result).get("task") or mapping(run.config.get("data")).get("name") or "unknown task")


def scores_of(run: RunRecord) -> dict[tuple[str, str], float]:
    """Every score of a finished run in points, by split and metric; the headline of the first split comes first."""
    result = mapping(run.result)
    metrics = result.get("metrics")
    found: dict[tuple[str, str], float] = {}
    for split, figures in mapping(result.get("final")).items():
        for metric in metrics if isinstance(metrics, list) else ():
            if (value := number(mapping(figures).get(metric))) is not None:
                found[str(split), str(metric)] = POINTS * value
    return found


def attention_of(run: RunRecord) -> dict[str, Any]:
    """What was grafted in, without what is at rest: `{"mix": "position_wise"}`; empty for the encoder as it was."""
    model = mapping(run.config.get("model"))
    graft, at_rest = mapping(model.get("attention")), {"mix": "none", "normalize": "softmax", "cross_head": 0}
    found = {key: graft[key] for key, value in at_rest.items() if graft.get(key, value) not in (value, {"name": value})}
    if found and model.get("layers") is not None:
        found["layers"] = model["layers"]
    return found


def attention_words(run: RunRecord) -> str:
    """The same in words: `position_wise, cross-head 0.1`; `plain` for the encoder as it was."""
    return ", ".join(_stage_words(key, value) for key, value in attention_of(run).items()) or "plain"


def _stage_words(key: str, value: Any) -> str:
    if key == "layers":
        return f"layers {' '.join(map(str, value))}" if isinstance(value, list) else f"layers {value}"
    if key == "cross_head":
        return f"cross-head {value}"
    if isinstance(value, Mapping):
        options = ", ".join(f"{option} {given}" for option, given in value.items() if option != "name")
        return f"{value.get('name')} ({options})" if options else str(value.get("name"))
    return str(value)


def encoder_of(run: RunRecord) -> str:
    """The pretrained encoder; of a folder its last name only."""
    name = str(mapping(run.config.get("model")).get("pretrained") or "unknown encoder")
    return Path(name).name or name if name.startswith(("/", ".", "~")) else name


def settings_of(run: RunRecord) -> dict[str, Any]:
    """The resolved configuration as dotted keys, without where and how a run was watched."""
    found = {key: value for key, value in flatten(run.config).items() if key not in CIRCUMSTANCES}
    return {**found, "model.pretrained": encoder_of(run)}


def arms_of(runs: Sequence[RunRecord]) -> list[tuple[str, Runs]]:
    """The arms of one task with their names: plain ones first, else in order of first appearance; runs by seed."""
    arms = [tuple(sorted(arm, key=lambda run: run.seed or 0)) for arm in seeds_of_rows(runs)]
    arms.sort(key=lambda arm: bool(attention_of(arm[0])))
    return list(zip(_names(arms), arms, strict=True))


def _names(arms: Sequence[Runs]) -> list[str]:
    """Its row in the recipe, or what was grafted in; and as much more as it takes to tell it from the others."""
    names = [arm[0].origin("row") or attention_words(arm[0]) for arm in arms]
    names = _told_apart(names, [attention_words(arm[0]) for arm in arms])  # of a row that was overridden
    for more in ("scale", "recipe"):
        names = _told_apart(names, [arm[0].origin(more) for arm in arms])
    settings = [settings_of(arm[0]) for arm in arms]
    differ = [key for key in dict.fromkeys(key for flat in settings for key in flat)
              if len({repr(flat.get(key)) for flat in settings}) > 1 and not key.startswith("model.attention.")]  # fmt: skip
    for key in differ:
        names = _told_apart(names, [f"{_short(key)} {flat.get(key)}" for flat in settings])
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        names[place] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def _short(key: str) -> str:
    return key.rpartition(".")[2].replace("mixing_learning_rate", "mixing rate")


def _told_apart(names: Sequence[str], more: Sequence[str]) -> list[str]:
    """Names that several arms have, with a word that tells these arms apart; the others as they are."""
    words = {name: {word for other, word in zip(names, more, strict=True) if other == name} for name in names}
    return [
        f"{name} · {word}" if len(words[name]) > 1 and word else name for name, word in zip(names, more, strict=True)
    ]


def baseline_of(place: int, arms: Sequence[Runs]) -> int | None:
    """The arm that another is compared with, by place: the plain one that is most like it, else the first arm.

    A plain arm is compared with the first plain one. None for an arm that is its own baseline.
    """
    plain = [other for other, arm in enumerate(arms) if not attention_of(arm[0])]
    if not plain:
        return None if place == 0 else 0
    if place in plain:
        return None if place == plain[0] else plain[0]
    return min(plain, key=lambda other: (len(terms(arms[place], arms[other])), other))


def terms(arm: Runs, baseline: Runs) -> dict[str, tuple[Any, Any]]:
    """The settings besides the mechanism in which an arm differs from its baseline: of each key both values."""
    own, other = settings_of(arm[0]), settings_of(baseline[0])
    keys = [key for key in dict.fromkeys((*own, *other)) if not key.startswith(_MECHANISM)]
    return {key: (own.get(key), other.get(key)) for key in keys if own.get(key) != other.get(key)}


def term_remarks(name: str, arm: Runs, baseline_name: str, baseline: Runs) -> list[str]:
    """What besides the mechanism makes an arm differ from its baseline, a sentence each."""
    remarks = []
    steps, other = numbers_of(arm, "steps"), numbers_of(baseline, "steps")
    if steps != other:
        remarks.append(
            f"Not equal terms: {name} has {_counts(steps)} training steps, {baseline_name} {_counts(other)}."
        )
    keys = {key: both for key, both in terms(arm, baseline).items() if key not in _LENGTH or steps == other}
    if keys:
        said = "; ".join(f"{key} is {own} in {name}, {base} in {baseline_name}" for key, (own, base) in keys.items())
        remarks.append(f"Not equal terms: {said}.")
    if files := _other_files(arm, baseline):
        remarks.append(f"Not equal terms: {name} and {baseline_name} read other {format.listed(files)} examples.")
    return remarks


def numbers_of(arm: Runs, key: str) -> list[int]:
    """Every whole number that stands at a key of the results of an arm, once."""
    return sorted({value for run in arm if (value := integer(mapping(run.result).get(key))) is not None})


def _counts(values: Sequence[int]) -> str:
    return format.listed([format.count(value) for value in values]) or "an unknown number of"


def _other_files(arm: Runs, baseline: Runs) -> list[str]:
    own, other = (mapping(mapping(runs[0].result).get("sha256")) for runs in (arm, baseline))
    return [str(split) for split in own if split in other and own[split] != other[split]]
