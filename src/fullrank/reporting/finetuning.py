"""Runs of fine-tuning compared over seeds: by task, an arm for each setting, every arm against its baseline."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.config.load import flatten
from fullrank.evaluation.statistics import (
    SAMPLES,
    SEED,
    Interval,
    brown_forsythe,
    deviation_bootstrap,
    deviation_change,
    deviation_interval,
    paired_interval,
    welch_interval,
)
from fullrank.reporting import format
from fullrank.reporting.format import Stat, over_runs
from fullrank.reporting.runs import (
    CIRCUMSTANCES,
    RunRecord,
    integer,
    mapping,
    number,
    numbered,
    scores_of,
    seeds_of_rows,
)

Runs = tuple[RunRecord, ...]  # of one arm, each with another seed
Key = tuple[str, str]  # split and metric

UNKNOWN = "unknown"
# metrics of the GLUE server's table where they are not accuracy
_SERVER = {"glue/cola": "matthews_correlation", "glue/mrpc": "f1", "glue/qqp": "f1", "glue/stsb": "spearman"}
# a mixing parameter's learning rate belongs to the mechanism, whose paper says that it is larger
_MECHANISM = ("model.attention.", "model.layers", "train.mixing_learning_rate")
_LENGTH = ("train.epochs", "train.steps")
_MACHINE = ("torch", "transformers", "device", "cpu", "fullrank")


@dataclass(frozen=True)
class Paper:
    """A figure of the paper in points; `server`: of the GLUE test server's examples, on which ours is not measured."""

    mean: float
    deviation: float | None = None
    server: bool = False


@dataclass(frozen=True)
class Against:
    """An arm (b) against its baseline (a), in points. None is what so few seeds cannot tell.

    welch: 95 % interval of the difference of means for independent seeds; paired: where both arms have the same seeds.
    change: percent by which the deviation is above the baseline's; f_interval: its 95 % interval for normal scores;
    bootstrap: over seeds drawn with replacement (`pairs`: for both arms at once); p: of equal deviations (Brown-Forsythe).
    """

    baseline: str
    difference: float
    welch: Interval | None
    pairs: bool
    paired: Interval | None
    change: float | None
    f_interval: Interval | None
    bootstrap: Interval | None
    p: float | None

    @property
    def interval(self) -> Interval | None:
        """The interval by which the difference is judged: paired where it is known."""
        return self.paired or self.welch

    @property
    def decided(self) -> bool | None:
        """0 is outside the interval; None if there is no interval."""
        return None if self.interval is None else self.interval.low > 0 or self.interval.high < 0


@dataclass(frozen=True)
class Figure:
    """A score of an arm on a split, in points; `values` has one for each run, in the order of the arm's runs."""

    values: tuple[float, ...]
    stat: Stat
    paper: Paper | None
    papers_change: float | None
    against: Against | None


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but the seed."""

    name: str
    runs: Runs
    baseline: Arm | None
    figures: Mapping[Key, Figure]

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def result(self) -> Mapping[str, Any]:
        """Result of the first run."""
        return mapping(self.runs[0].result)


@dataclass(frozen=True)
class Task:
    """Arms of one task, plain ones first; `keys` are split and metric of its figures, the headline first."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    keys: tuple[Key, ...]
    remarks: tuple[str, ...]

    @property
    def compares(self) -> bool:
        """An arm has another one to be compared with."""
        return any(arm.baseline is not None for arm in self.arms)

    def figures(self, key: Key) -> list[tuple[int, Arm, Figure]]:
        """Arms that have a figure, each with its colour."""
        return [(slot, arm, arm.figures[key]) for slot, arm in enumerate(self.arms) if key in arm.figures]

    def headline(self, arm: Arm) -> tuple[Key, Figure] | None:
        """The first figure that an arm has."""
        return next(((key, arm.figures[key]) for key in self.keys if key in arm.figures), None)

    def examples(self, split: str, *arms: Arm) -> str:
        """`1,043 examples`; of a part of the published split `400 examples (slice)`. Of all arms if none is given."""
        results = [arm.result for arm in arms or self.arms]
        counts = {number(mapping(result.get("examples")).get(split)) for result in results}
        slices = {bool(mapping(result.get("slice")).get(split)) for result in results}
        said = format.listed(format.count(count) for count in sorted(c for c in counts if c is not None))
        return f"{said or UNKNOWN} examples{' (slice)' if True in slices else ''}"


@dataclass(frozen=True)
class Tuning:
    """Every task, and the runs that have not finished or have no figures."""

    tasks: tuple[Task, ...]
    unfinished: tuple[RunRecord, ...]

    @property
    def runs(self) -> list[RunRecord]:
        """Every finished run."""
        return [run for task in self.tasks for arm in task.arms for run in arm.runs]


def compare(records: Sequence[RunRecord]) -> Tuning:
    """Runs of fine-tuning by task and arm."""
    finished = [record for record in records if record.result is not None]
    tasks = dict.fromkeys(record.task for record in finished)
    return Tuning(
        tuple(_task(task, [record for record in finished if record.task == task]) for task in tasks),
        tuple(record for record in records if record.result is None),
    )


# -- arms -------------------------------------------------------------------------------------------------------------


def attention_of(run: RunRecord) -> dict[str, Any]:
    """The grafted attention without what has no effect: `{"mix": "position_wise"}`; empty for the encoder as it was."""
    model = mapping(run.config.get("model"))
    graft, plain = mapping(model.get("attention")), {"mix": "none", "normalize": "softmax", "cross_head": 0}
    grafted = {key: graft[key] for key, value in plain.items() if graft.get(key, value) not in (value, {"name": value})}
    if grafted and model.get("layers") is not None:
        grafted["layers"] = model["layers"]
    return grafted


def attention_words(run: RunRecord) -> str:
    """The same in words: `position_wise, cross-head 0.1`; empty for the encoder as it was."""
    words = []
    for key, value in attention_of(run).items():
        if key == "layers":
            words.append(f"layers {' '.join(map(str, value)) if isinstance(value, list) else value}")
        elif key == "cross_head":
            words.append(f"cross-head {value}")
        elif isinstance(value, Mapping):
            options = ", ".join(f"{option} {one}" for option, one in value.items() if option != "name")
            words.append(f"{value.get('name')} ({options})" if options else str(value.get("name")))
        else:
            words.append(str(value))
    return ", ".join(words)


def encoder_of(run: RunRecord) -> str:
    """The pretrained encoder; the last name of a folder."""
    name = str(mapping(run.config.get("model")).get("pretrained") or "unknown encoder")
    return Path(name).name or name if name.startswith(("/", ".", "~")) else name


def _settings(run: RunRecord) -> dict[str, Any]:
    """The resolved configuration as dotted keys, without where and how a run was watched."""
    settings = {key: value for key, value in flatten(run.config).items() if key not in CIRCUMSTANCES}
    return {**settings, "model.pretrained": encoder_of(run)}


def _arm_names(arms: Sequence[Runs]) -> list[str]:
    """Row of the recipe or grafted attention, then as much more as it takes to tell an arm from the others."""
    runs = [arm[0] for arm in arms]
    attention = [attention_words(run) or "plain" for run in runs]
    settings = [_settings(run) for run in runs]
    names = [run.origin("row") or words for run, words in zip(runs, attention, strict=True)]
    more = [attention, [run.origin("scale") for run in runs], [run.origin("recipe") for run in runs]]
    for key in dict.fromkeys(key for flat in settings for key in flat):
        if not key.startswith("model.attention."):
            short = key.rpartition(".")[2].replace("mixing_learning_rate", "mixing rate")
            more.append([f"{short} {flat.get(key)}" for flat in settings])
    for words in more:
        same = {name: {word for other, word in zip(names, words, strict=True) if other == name} for name in names}
        names = [
            f"{name} · {word}" if len(same[name]) > 1 and word else name
            for name, word in zip(names, words, strict=True)
        ]
    return numbered(names)


def _baseline_of(index: int, arms: Sequence[Runs]) -> int | None:
    """Index of the arm that another is compared with: the plain one most like it, else the first arm.

    A plain arm is compared with the first plain one. None for an arm that is its own baseline.
    """
    plain = [other for other, arm in enumerate(arms) if not attention_of(arm[0])]
    if not plain or index in plain:
        first = plain[0] if plain else 0
        return None if index == first else first
    return min(plain, key=lambda other: (len(_unequal_terms(arms[index], arms[other])), other))


def _unequal_terms(arm: Runs, baseline: Runs) -> dict[str, tuple[Any, Any]]:
    """Settings besides the mechanism in which an arm differs from its baseline: of each key both values."""
    own, other = _settings(arm[0]), _settings(baseline[0])
    keys = [key for key in dict.fromkeys((*own, *other)) if not key.startswith(_MECHANISM)]
    return {key: (own.get(key), other.get(key)) for key in keys if own.get(key) != other.get(key)}


def _task(name: str, runs: Sequence[RunRecord]) -> Task:
    groups = [tuple(sorted(arm, key=lambda run: run.seed or 0)) for arm in seeds_of_rows(runs)]
    groups.sort(key=lambda arm: bool(attention_of(arm[0])))
    bare = [Arm(arm_name, group, None, {}) for arm_name, group in zip(_arm_names(groups), groups, strict=True)]
    arms = []
    for index, arm in enumerate(bare):
        base = _baseline_of(index, groups)
        baseline = None if base is None else bare[base]
        keys = dict.fromkeys(key for run in arm.runs for key in scores_of(run))
        figures = {key: _figure(name, arm.runs, key, baseline) for key in keys}
        arms.append(dataclasses.replace(arm, baseline=baseline, figures=figures))
    remarks = [remark for arm in arms for remark in _term_remarks(arm)] + _more_remarks(arms)
    title = next((str(title) for run in runs if (title := run.of("title"))), name)
    keys = dict.fromkeys(key for run in runs for key in scores_of(run))
    return Task(name, title, tuple(arms), tuple(keys), tuple(dict.fromkeys(remarks)))


def distinct_numbers(runs: Runs, key: str) -> list[int]:
    """Distinct whole numbers at a key of the results."""
    return sorted({value for run in runs if (value := integer(run.of(key))) is not None})


def counts_words(values: Sequence[int], unknown: str = UNKNOWN) -> str:
    return format.listed(format.count(value) for value in values) or unknown


def _term_remarks(arm: Arm) -> list[str]:
    """Differences from the baseline besides the mechanism, a sentence each."""
    if arm.baseline is None:
        return []
    name, base = arm.name, arm.baseline.name
    steps, other = distinct_numbers(arm.runs, "steps"), distinct_numbers(arm.baseline.runs, "steps")
    remarks = []
    if steps != other:
        unknown = "an unknown number of"
        own = counts_words(steps, unknown)
        remarks.append(f"Not equal terms: {name} has {own} training steps, {base} {counts_words(other, unknown)}.")
    terms = _unequal_terms(arm.runs, arm.baseline.runs)
    said = [
        f"{key} is {own} in {name}, {theirs} in {base}"
        for key, (own, theirs) in terms.items()
        if key not in _LENGTH or steps == other
    ]
    if said:
        remarks.append(f"Not equal terms: {'; '.join(said)}.")
    files, theirs = mapping(arm.result.get("sha256")), mapping(arm.baseline.result.get("sha256"))
    if others := [str(split) for split in files if split in theirs and files[split] != theirs[split]]:
        remarks.append(f"Not equal terms: {name} and {base} read other {format.listed(others)} examples.")
    return remarks


def _more_remarks(arms: Sequence[Arm]) -> list[str]:
    """What is to be known of the figures besides unequal terms."""
    remarks = []
    if any(arm.result.get("checkpoint") == "best" for arm in arms):
        remarks.append(
            "Figures are of the best evaluation, which was chosen on the very split that they are of: it flatters them."
        )
    for arm in arms:
        if len(distinct_numbers(arm.runs, "steps")) > 1:
            remarks.append(f"The seeds of {arm.name} have not all the same number of training steps.")
        if arm.baseline is not None:
            base = arm.baseline
            if set(arm.seeds) != set(base.seeds):
                remarks.append(f"{arm.name} and {base.name} have not the same seeds, so nothing is paired.")
            machines = [
                {str(mapping(run.of("environment")).get(key)) for run in one.runs for key in _MACHINE}
                for one in (arm, base)
            ]
            if machines[0] != machines[1]:
                remarks.append(f"{arm.name} and {base.name} were not trained on one kind of machine and software.")
    return remarks


def _figure(task: str, runs: Runs, key: Key, baseline: Arm | None) -> Figure:
    values = _values(runs, key)
    stat = over_runs(values.values())
    assert stat is not None
    paper, against, change = _paper(runs[0], task, key), None, None
    if baseline is not None and (others := _values(baseline.runs, key)):
        against = _against(baseline.name, others, values)
        other = _paper(baseline.runs[0], task, key)
        if paper and other and paper.deviation is not None and other.deviation:
            change = 100 * (paper.deviation / other.deviation - 1)
    return Figure(tuple(values.values()), stat, paper, change, against)


def _values(runs: Runs, key: Key) -> dict[int | str, float]:
    """Scores by seed; by folder where a run has none recorded."""
    scores = {str(run.folder) if run.seed is None else run.seed: scores_of(run).get(key) for run in runs}
    return {seed: value for seed, value in scores.items() if value is not None}


def _against(name: str, base: Mapping[int | str, float], own: Mapping[int | str, float]) -> Against:
    pairs = set(base) == set(own)
    a = list(base.values())
    b = [own[seed] for seed in base] if pairs else list(own.values())
    low, high = welch_interval(a, b)
    spread = min(len(a), len(b)) > 1 and statistics.stdev(a) + statistics.stdev(b) > 0
    return Against(
        baseline=name,
        difference=statistics.fmean(b) - statistics.fmean(a),
        welch=Interval(low, high) if spread and low is not None and high is not None else None,
        pairs=pairs,
        paired=paired_interval(a, b) if pairs else None,
        change=deviation_change(a, b),
        f_interval=deviation_interval(a, b),
        bootstrap=deviation_bootstrap(a, b, paired=pairs),
        p=brown_forsythe(a, b),
    )


def _paper(run: RunRecord, task: str, key: Key) -> Paper | None:
    """The recipe's statement of the paper's figure: `59.8`, or `[59.8, 1.2]` with its deviation.

    `{matthews_correlation: 59.8}` is of the development split; `test`, `test_mismatched` are the server's scores of the
    splits that ours stand for.
    """
    split, metric = key
    value, server = run.paper.get(metric) if split == "dev" else mapping(run.paper.get(split)).get(metric), False
    if value is None and split.startswith("dev") and metric == _SERVER.get(task, "accuracy"):
        value, server = run.paper.get(split.replace("dev", "test", 1)), True
    mean, deviation = value if isinstance(value, list) and len(value) == 2 else (value, None)
    stated = number(mean)
    return None if stated is None else Paper(stated, number(deviation), server)


# -- JSON -------------------------------------------------------------------------------------------------------------


def as_json(found: Tuning) -> dict[str, Any]:
    """The arms as plain objects for one JSON document: numbers in full precision, no paths of this machine.

    Scores and their differences are in points, 100 times the fractions of results; what so few seeds cannot tell is null.
    """
    return {
        "kind": "finetuning",
        "tasks": [
            {"task": task.name, "title": task.title, "points_per_unit": 100.0,
             "arms": [_arm_as_json(arm) for arm in task.arms], "remarks": list(task.remarks)}
            for task in found.tasks
        ],
        "unfinished": [
            {"name": run.name, "seed": run.seed, "problems": list(run.problems)} for run in found.unfinished
        ],
    }  # fmt: skip


def _arm_as_json(arm: Arm) -> dict[str, Any]:
    of_the_first = ("recipe", "row", "scale", "checkpoint", "protocol", "parameters", "examples", "slice", "sha256")
    figures: dict[str, dict[str, Any]] = {}
    for (split, metric), figure in arm.figures.items():
        figures.setdefault(split, {})[metric] = _figure_as_json(figure)
    splits = dict.fromkeys(split for run in arm.runs for split in mapping(run.of("final")))
    losses = {split: over_runs(run.final(split, "loss") for run in arm.runs) for split in splits}
    return {
        "name": arm.name,
        "baseline": None if arm.baseline is None else arm.baseline.name,
        **{key: arm.result.get(key) for key in of_the_first},
        "encoder": encoder_of(arm.runs[0]),
        "attention": attention_of(arm.runs[0]),
        "seeds": list(arm.seeds),
        **{key: [run.of(key) for run in arm.runs] for key in ("steps", "epochs", "wall_seconds")},
        "figures": figures,
        "loss": {split: {"mean": loss.mean, "deviation": loss.deviation} for split, loss in losses.items() if loss},
        "environment": arm.result.get("environment"),
    }


def _figure_as_json(figure: Figure) -> dict[str, Any]:
    def ends(interval: Interval | None) -> dict[str, float] | None:
        return None if interval is None else interval._asdict()

    paper, against = figure.paper, figure.against
    return {
        "values": list(figure.values),
        "mean": figure.stat.mean,
        "deviation": figure.stat.deviation,
        "count": figure.stat.count,
        "paper": paper and {
            "mean": paper.mean,
            "deviation": paper.deviation,
            "deviation_change_percent": figure.papers_change,
            "of": "test server" if paper.server else "development split",
        },
        "against": against and {
            "baseline": against.baseline,
            "difference": against.difference,
            "welch": ends(against.welch),
            "paired": ends(against.paired),
            "deviation_change_percent": against.change,
            "deviation_f_interval": ends(against.f_interval),
            "deviation_bootstrap": against.bootstrap
            and {**against.bootstrap._asdict(), "samples": SAMPLES, "seed": SEED, "pairs": against.pairs},
            "brown_forsythe_p": against.p,
        },
    }  # fmt: skip
