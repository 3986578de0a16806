"""Runs of fine-tuning compared over seeds: by task, an arm for each setting, every arm against its baseline."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.config.load import flatten
from fullrank.evaluation import statistics as over_seeds
from fullrank.evaluation.statistics import Interval
from fullrank.reporting import figures, runs
from fullrank.reporting.figures import Stat, over_runs
from fullrank.reporting.runs import RunGroup, RunRecord, integer, mapping, number, recipe_notes, scores_of

Runs = tuple[RunRecord, ...]  # of one arm, each with another seed
Key = tuple[str, str]  # split and metric

UNKNOWN = "unknown"
SERVER = "test server"
# metrics of the GLUE server's table where they are not accuracy
_SERVER_METRICS = {"glue/cola": "matthews_correlation", "glue/mrpc": "f1", "glue/qqp": "f1", "glue/stsb": "spearman"}
_METRIC_WORDS = {
    "matthews_correlation": "Matthews correlation", "f1": "F1", "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}  # fmt: skip
# a mixing parameter's learning rate belongs to the mechanism, whose paper says that it is larger
_MECHANISM = ("model.attention.", "model.layers", "train.mixing_learning_rate")
_LENGTH = ("train.epochs", "train.steps")
_MACHINE = ("torch", "transformers", "device", "cpu", "fullrank")


@dataclass(frozen=True)
class Paper:
    """A figure of the paper in points; `deviation_change_percent`: from its baseline's deviation to its own.

    `of`: the development split, or the GLUE test server, on whose examples ours is not measured.
    """

    mean: float
    deviation: float | None
    of: str
    deviation_change_percent: float | None = None


@dataclass(frozen=True)
class Against:
    """An arm (b) against its baseline (a), in points. None is what so few seeds cannot tell.

    welch: 95 % interval of the difference of means for independent seeds; paired: where both arms have the same seeds.
    deviation_change_percent: from the baseline's deviation to this one; deviation_f_interval: its 95 % interval for normal
    scores; deviation_bootstrap: over seeds drawn with replacement (`pairs`: for both arms at once);
    brown_forsythe_p: of equal deviations.
    """

    baseline: str
    difference: float
    pairs: bool
    welch: Interval | None
    paired: Interval | None
    deviation_change_percent: float | None
    deviation_f_interval: Interval | None
    deviation_bootstrap: Interval | None
    brown_forsythe_p: float | None

    @property
    def interval(self) -> Interval | None:
        """The interval by which the difference is judged: paired where it is known."""
        return self.paired or self.welch

    @property
    def decimals(self) -> int:
        """The decimals with which the difference and its interval are shown."""
        low, high = (None, None) if self.interval is None else self.interval
        return figures.decimals_of(self.difference, low, high)

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
    against: Against | None

    @property
    def words(self) -> str:
        """Mean ± standard deviation over seeds."""
        return figures.spread(self.stat, figures.score)


@dataclass(frozen=True)
class Arm(RunGroup):
    """Runs of a task that differ in nothing but the seed."""

    baseline: Arm | None = None
    figures: Mapping[Key, Figure] = dataclasses.field(default_factory=dict)

    def numbers(self, key: str) -> list[int]:
        """Distinct whole numbers at a key of the results."""
        return sorted({value for run in self.runs if (value := integer(run.get(key))) is not None})

    def numbers_words(self, key: str, unknown: str = UNKNOWN) -> str:
        return figures.listed(map(figures.count, self.numbers(key))) or unknown

    @property
    def seeds_words(self) -> str:
        """`1–5, 7`."""
        known = figures.ranges(seed for seed in self.seeds if seed is not None)
        return ", ".join(filter(None, (known, UNKNOWN if None in self.seeds else "")))


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

    def examples(self, split: str, *arms: Arm) -> str:
        """`1,043 examples`; of a part of the published split `400 examples (slice)`. Of all arms if none is given."""
        arms = arms or self.arms
        counts = {number(arm.get("examples", split)) for arm in arms}
        words = figures.listed(figures.count(count) for count in sorted(c for c in counts if c is not None))
        return f"{words or UNKNOWN} examples{' (slice)' if any(arm.get('slice', split) for arm in arms) else ''}"

    def caption(self, key: Key) -> str:
        """`glue/cola, dev, 1,043 examples: Matthews correlation x 100`."""
        return f"{self.name}, {key[0]}, {self.examples(key[0])}: {metric_words(key[1])} x 100"


def metric_words(metric: str) -> str:
    """Name of a score."""
    return _METRIC_WORDS.get(metric, figures.readable(metric))


@dataclass(frozen=True)
class Tuning:
    """Every task, and the runs that have not finished or have no figures."""

    tasks: tuple[Task, ...]
    unfinished: tuple[RunRecord, ...]

    @property
    def arms(self) -> list[Arm]:
        return [arm for task in self.tasks for arm in task.arms]

    @property
    def runs(self) -> list[RunRecord]:
        """Every finished run."""
        return [run for arm in self.arms for run in arm.runs]

    def as_json(self) -> dict[str, Any]:
        """The arms by their keys in a JSON document: numbers in full precision, no paths of this machine.

        Scores and their differences are in points, 100 times the fractions of results; what so few seeds cannot tell is
        null.
        """
        return {
            "kind": "finetuning",
            "tasks": [
                {"task": task.name, "title": task.title, "points_per_unit": 100.0,
                 "arms": [_arm_as_json(arm) for arm in task.arms], "remarks": task.remarks}
                for task in self.tasks
            ],
            "unfinished": [{"name": run.name, "seed": run.seed, "problems": run.problems} for run in self.unfinished],
            "notes": self.notes,
        }  # fmt: skip

    @property
    def notes(self) -> dict[str, str]:
        """Notes of the recipes on their figures, by recipe."""
        return recipe_notes([*self.runs, *self.unfinished])


def compare(records: Sequence[RunRecord]) -> Tuning:
    """Runs of fine-tuning by task and arm."""
    finished = [record for record in records if record.result is not None]
    tasks = dict.fromkeys(record.task for record in finished)
    return Tuning(
        tuple(_task(task, [record for record in finished if record.task == task]) for task in tasks),
        tuple(record for record in records if record.result is None),
    )


def _task(name: str, records: Sequence[RunRecord]) -> Task:
    groups = [tuple(sorted(arm, key=lambda run: run.seed or 0)) for arm in runs.group_by_seed(records)]
    groups.sort(key=lambda arm: bool(attention_of(arm[0])))
    bare = [
        Arm(arm_name, slot, arm) for slot, (arm_name, arm) in enumerate(zip(_arm_names(groups), groups, strict=True))
    ]
    arms = []
    for arm in bare:
        baseline = _baseline_of(arm, bare)
        keys = dict.fromkeys(key for run in arm.runs for key in scores_of(run))
        values = {key: _figure(name, arm, key, baseline) for key in keys}
        arms.append(dataclasses.replace(arm, baseline=baseline, figures=values))
    title = next((str(title) for run in records if (title := run.get("title"))), name)
    keys = dict.fromkeys(key for run in records for key in scores_of(run))
    return Task(name, title, tuple(arms), tuple(keys), tuple(dict.fromkeys(_remarks(arms))))


# -- arms -------------------------------------------------------------------------------------------------------------


def attention_of(run: RunRecord) -> dict[str, Any]:
    """The injected attention without options that have no effect; empty for the encoder as it was."""
    model = mapping(run.config.get("model"))
    attention, plain = mapping(model.get("attention")), {"mix": "none", "normalize": "softmax", "cross_head": 0}
    injected = {
        key: attention[key] for key, value in plain.items() if attention.get(key, value) not in (value, {"name": value})
    }
    if injected and model.get("layers") is not None:
        injected["layers"] = model["layers"]
    return injected


def attention_words(run: RunRecord) -> str:
    """Grafted attention in words: `position_wise, cross-head 0.1`; empty for the encoder as it was."""
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
    settings = {key: value for key, value in flatten(run.config).items() if key not in runs.CIRCUMSTANCES}
    return {**settings, "model.pretrained": encoder_of(run)}


def _arm_names(arms: Sequence[Runs]) -> list[str]:
    """Row of the recipe or injected attention, then as much more as it takes to tell an arm from the others."""
    first = [arm[0] for arm in arms]
    attention = [attention_words(run) or "plain" for run in first]
    settings = [_settings(run) for run in first]
    names = [run.origin("row") or words for run, words in zip(first, attention, strict=True)]
    more = [attention, [run.origin("scale") for run in first], [run.origin("recipe") for run in first]]
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
    return runs.numbered(names)


def _baseline_of(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """The arm that another is compared with: the plain one most like it, else the first arm.

    A plain arm is compared with the first plain one. None for an arm that is its own baseline.
    """
    plain = [other for other in arms if not attention_of(other.runs[0])]
    if plain and arm not in plain:
        return min(plain, key=lambda other: len(_unequal_terms(arm, other)))
    first = (plain or arms)[0]
    return None if arm is first else first


def _unequal_terms(arm: Arm, baseline: Arm) -> dict[str, tuple[Any, Any]]:
    """Settings besides the mechanism in which an arm differs from its baseline: of each key both values."""
    own, other = _settings(arm.runs[0]), _settings(baseline.runs[0])
    keys = [key for key in dict.fromkeys((*own, *other)) if not key.startswith(_MECHANISM)]
    return {key: (own.get(key), other.get(key)) for key in keys if own.get(key) != other.get(key)}


def _differences(arm: Arm) -> Iterator[str]:
    """Differences from the baseline besides the mechanism."""
    if (baseline := arm.baseline) is None:
        return
    name, base = arm.name, baseline.name
    equally_long = arm.numbers("steps") == baseline.numbers("steps")
    if not equally_long:
        own, theirs = (one.numbers_words("steps", "an unknown number of") for one in (arm, baseline))
        yield f"{name} has {own} training steps, {base} {theirs}"
    terms = [
        f"{key} is {own} in {name}, {theirs} in {base}"
        for key, (own, theirs) in _unequal_terms(arm, baseline).items()
        if key not in _LENGTH or equally_long
    ]
    if terms:
        yield "; ".join(terms)
    files, others = mapping(arm.get("sha256")), mapping(baseline.get("sha256"))
    if splits := [str(split) for split in files if split in others and files[split] != others[split]]:
        yield f"{name} and {base} read other {figures.listed(splits)} examples"


def _remarks(arms: Sequence[Arm]) -> Iterator[str]:
    """Reservations about the figures: unequal terms, then others."""
    yield from (f"Not equal terms: {difference}." for arm in arms for difference in _differences(arm))
    if any(arm.get("checkpoint") == "best" for arm in arms):
        yield "Figures are of the best evaluation, which was chosen on the very split that they are of: it flatters them."
    for arm in arms:
        if len(arm.numbers("steps")) > 1:
            yield f"The seeds of {arm.name} have not all the same number of training steps."
        if arm.baseline is not None:
            both = f"{arm.name} and {arm.baseline.name}"
            if set(arm.seeds) != set(arm.baseline.seeds):
                yield f"{both} have not the same seeds, so nothing is paired."
            if _machines(arm) != _machines(arm.baseline):
                yield f"{both} were not trained on one kind of machine and software."


def _machines(arm: Arm) -> set[str]:
    return {str(run.get("environment", key)) for run in arm.runs for key in _MACHINE}


# -- figures ----------------------------------------------------------------------------------------------------------


def _figure(task: str, arm: Arm, key: Key, baseline: Arm | None) -> Figure:
    values = _values(arm, key)
    stat, paper, against = over_runs(values.values()), _paper(arm, task, key), None
    assert stat is not None
    if baseline is not None and (others := _values(baseline, key)):
        against = _against(baseline.name, others, values)
        other = _paper(baseline, task, key)
        if paper and other and paper.deviation is not None and other.deviation:
            change = 100 * (paper.deviation / other.deviation - 1)
            paper = dataclasses.replace(paper, deviation_change_percent=change)
    return Figure(tuple(values.values()), stat, paper, against)


def _values(arm: Arm, key: Key) -> dict[int | str, float]:
    """Scores by seed; by folder where a run has none recorded."""
    scores = {str(run.folder) if run.seed is None else run.seed: scores_of(run).get(key) for run in arm.runs}
    return {seed: value for seed, value in scores.items() if value is not None}


def _against(name: str, base: Mapping[int | str, float], own: Mapping[int | str, float]) -> Against:
    pairs = set(base) == set(own)
    a = list(base.values())
    b = [own[seed] for seed in base] if pairs else list(own.values())
    spread = min(len(a), len(b)) > 1 and statistics.stdev(a) + statistics.stdev(b) > 0
    return Against(
        baseline=name,
        difference=statistics.fmean(b) - statistics.fmean(a),
        pairs=pairs,
        welch=over_seeds.welch_interval(a, b) if spread else None,
        paired=over_seeds.paired_interval(a, b) if pairs else None,
        deviation_change_percent=over_seeds.deviation_change(a, b),
        deviation_f_interval=over_seeds.deviation_interval(a, b),
        deviation_bootstrap=over_seeds.deviation_bootstrap(a, b, paired=pairs),
        brown_forsythe_p=over_seeds.brown_forsythe(a, b),
    )


def _paper(arm: Arm, task: str, key: Key) -> Paper | None:
    """The recipe's statement of the paper's figure: `59.8`, or `[59.8, 1.2]` with its deviation.

    `{matthews_correlation: 59.8}` is of the development split; `test`, `test_mismatched` are the server's scores of the
    splits that ours stand for.
    """
    (split, metric), paper, source = key, arm.runs[0].paper, "development split"
    value = paper.get(metric) if split == "dev" else mapping(paper.get(split)).get(metric)
    if value is None and split.startswith("dev") and metric == _SERVER_METRICS.get(task, "accuracy"):
        value, source = paper.get(split.replace("dev", "test", 1)), SERVER
    mean, deviation = value if isinstance(value, list) and len(value) == 2 else (value, None)
    stated = number(mean)
    return None if stated is None else Paper(stated, number(deviation), source)


# -- JSON -------------------------------------------------------------------------------------------------------------


def _arm_as_json(arm: Arm) -> dict[str, Any]:
    of_the_first = ("recipe", "row", "scale", "checkpoint", "protocol", "parameters", "examples", "slice", "sha256")
    by_split: dict[str, dict[str, Any]] = {}
    for (split, metric), figure in arm.figures.items():
        by_split.setdefault(split, {})[metric] = _figure_as_json(figure)
    splits = dict.fromkeys(split for run in arm.runs for split in mapping(run.get("final")))
    losses = {split: over_runs(run.final(split, "loss") for run in arm.runs) for split in splits}
    return {
        "name": arm.name,
        "baseline": None if arm.baseline is None else arm.baseline.name,
        **{key: arm.get(key) for key in of_the_first},
        "training": {key: arm.get("training", key) for key in ("recipe", "row")} if arm.get("training") else None,
        "encoder": encoder_of(arm.runs[0]),
        "attention": attention_of(arm.runs[0]),
        "seeds": arm.seeds,
        **{key: [run.get(key) for run in arm.runs] for key in ("steps", "epochs", "wall_seconds")},
        "figures": by_split,
        "loss": {split: {"mean": loss.mean, "deviation": loss.deviation} for split, loss in losses.items() if loss},
        "environment": arm.get("environment"),
    }


def _figure_as_json(figure: Figure) -> dict[str, Any]:
    against = None if figure.against is None else dict(vars(figure.against))
    if against is not None:
        drawn = {"samples": over_seeds.SAMPLES, "seed": over_seeds.SEED, "pairs": against.pop("pairs")}
        if interval := against["deviation_bootstrap"]:
            against["deviation_bootstrap"] = interval._asdict() | drawn
    return {"values": figure.values, **vars(figure.stat), "paper": figure.paper, "against": against}
