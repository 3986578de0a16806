"""Fine-tuning over seeds: mean and deviation of every arm, and what can be said of its difference to its baseline."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.core.errors import InputError
from fullrank.evaluation import statistics as over_seeds
from fullrank.evaluation.statistics import Interval, welch_interval
from fullrank.reporting import format
from fullrank.reporting.finetuning.arms import (
    Runs,
    arms_of,
    baseline_of,
    metric_words,
    numbers_of,
    scores_of,
    task_of,
    term_remarks,
)
from fullrank.reporting.measure import paper_of
from fullrank.reporting.results import RunRecord, mapping, number, read_runs
from fullrank.reporting.stats import Stat, over_runs

# what the GLUE server's table has of a task, where it is not accuracy
_SERVER = {"glue/cola": "matthews_correlation", "glue/mrpc": "f1", "glue/qqp": "f1", "glue/stsb": "spearman"}


@dataclass(frozen=True)
class Paper:
    """A figure of the paper in points; `server`: the GLUE test server's, of examples that ours are not measured on."""

    mean: float
    deviation: float | None = None
    server: bool = False


@dataclass(frozen=True)
class Against:
    """An arm (b) against its baseline (a), in points. None is what so few seeds cannot tell.

    welch: 95 % interval of the difference of means for independent seeds; paired: where both arms have the same seeds.
    change: by how many percent the deviation is above the baseline's; f_interval: its 95 % interval for normal scores;
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
        """That by which the difference is judged: paired where it is known."""
        return self.paired or self.welch

    @property
    def decided(self) -> bool | None:
        """Whether 0 is outside the interval; None if there is none."""
        return None if self.interval is None else self.interval.low > 0 or self.interval.high < 0


@dataclass(frozen=True)
class Figure:
    """A score of an arm on a split, in points; `values` has one for each run, in the order of the arm's runs."""

    split: str
    metric: str
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
    baseline: str | None
    figures: Mapping[tuple[str, str], Figure]

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def result(self) -> Mapping[str, Any]:
        """That of the first run."""
        return mapping(self.runs[0].result)


@dataclass(frozen=True)
class TaskSummary:
    """The arms of one task, in the order given; `keys` are split and metric of its figures, the headline first."""

    task: str
    title: str
    arms: tuple[Arm, ...]
    keys: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]

    @property
    def compares(self) -> bool:
        """Whether an arm has another one to be compared with."""
        return any(arm.baseline is not None for arm in self.arms)

    def figures(self, key: tuple[str, str]) -> list[tuple[Arm, Figure]]:
        """The arms that have a figure."""
        return [(arm, arm.figures[key]) for arm in self.arms if key in arm.figures]

    def examples(self, split: str, *arms: Arm) -> str:
        """`1,043 examples`; of a part of the published split `400 examples (slice)`. Of all arms if none is given."""
        results = [arm.result for arm in arms or self.arms]
        counts = {number(mapping(result.get("examples")).get(split)) for result in results}
        slices = {bool(mapping(result.get("slice")).get(split)) for result in results}
        said = format.listed([format.count(count) for count in sorted(c for c in counts if c is not None)])
        return f"{said or 'unknown'} examples{' (slice)' if True in slices else ''}"


@dataclass(frozen=True)
class Summary:
    """Every task, and the runs that have not finished or have no figures."""

    tasks: tuple[TaskSummary, ...]
    unfinished: tuple[RunRecord, ...]

    @property
    def runs(self) -> list[RunRecord]:
        """Every finished run."""
        return [run for task in self.tasks for arm in task.arms for run in arm.runs]


def summary(folders: Sequence[Path | RunRecord]) -> Summary:
    """What runs of fine-tuning say over seeds, by task and arm.

    Raises InputError for a folder that is no run, and for a run that is not one of fine-tuning. One that has not finished
    is listed, never an error.
    """
    if not folders:
        raise InputError("no run folders given; name at least one, for example runs/mixhead-table5/cola-b-seed1")
    records = [run for run in folders if isinstance(run, RunRecord)]
    if len(records) != len(folders):
        records = read_runs([run.folder if isinstance(run, RunRecord) else Path(run) for run in folders])
    if (other := next((record for record in records if not record.finetunes), None)) is not None:
        raise InputError(
            f"{other.folder}: not a run of fine-tuning; `fullrank report` shows it with others of its kind"
        )
    records = [_checked(record) for record in records]
    finished = [record for record in records if record.result is not None]
    tasks = dict.fromkeys(task_of(record) for record in finished)
    return Summary(
        tuple(_task(task, [record for record in finished if task_of(record) == task]) for task in tasks),
        tuple(record for record in records if record.result is None),
    )


def _checked(record: RunRecord) -> RunRecord:
    """A result without any score is no result: the run diverged or the file is not ours."""
    if record.result is None or scores_of(record):
        return record
    problem = "result.json holds no finite score under `final`: the run diverged or the file is damaged"
    return dataclasses.replace(record, result=None, problems=(*record.problems, problem))


def _task(task: str, runs: Sequence[RunRecord]) -> TaskSummary:
    named = arms_of(runs)
    names, groups = [name for name, _ in named], [group for _, group in named]
    bases = [baseline_of(place, groups) for place in range(len(groups))]
    arms = []
    remarks: dict[str, None] = {}
    for name, group, base in zip(names, groups, bases, strict=True):
        keys = dict.fromkeys(key for run in group for key in scores_of(run))
        before = None if base is None else (names[base], groups[base])
        figures = {key: _figure(task, group, key, before) for key in keys}
        arms.append(Arm(name, group, None if base is None else names[base], figures))
        if base is not None:
            remarks |= dict.fromkeys(term_remarks(name, group, names[base], groups[base]))
    title = next((str(t) for run in runs if (t := mapping(run.result).get("title"))), task)
    keys = dict.fromkeys(key for run in runs for key in scores_of(run))
    return TaskSummary(task, title, tuple(arms), tuple(keys), (*remarks, *_more_remarks(arms)))


def _more_remarks(arms: Sequence[Arm]) -> list[str]:
    """What is to be known of the figures besides unequal terms."""
    found = []
    if any(arm.result.get("checkpoint") == "best" for arm in arms):
        found.append(
            "Figures are of the best evaluation, which was chosen on the very split that they are of: it flatters them."
        )
    for arm in arms:
        if len(numbers_of(arm.runs, "steps")) > 1:
            found.append(f"The seeds of {arm.name} have not all the same number of training steps.")
        if arm.baseline is not None:
            base = next(other for other in arms if other.name == arm.baseline)
            if set(arm.seeds) != set(base.seeds):
                found.append(f"{arm.name} and {base.name} have not the same seeds, so nothing is paired.")
            machines, others = (
                {str(mapping(mapping(run.result).get("environment")).get(key)) for run in runs for key in _MACHINE}
                for runs in (arm.runs, base.runs)
            )
            if machines != others:
                found.append(f"{arm.name} and {base.name} were not trained on one kind of machine and software.")
    return found


_MACHINE = ("torch", "transformers", "device", "cpu", "fullrank")


def _figure(task: str, runs: Runs, key: tuple[str, str], base: tuple[str, Runs] | None) -> Figure:
    values = _values(runs, key)
    stat = over_runs(values.values())
    assert stat is not None
    paper, against, change = _paper(runs[0], task, key), None, None
    if base is not None and (others := _values(base[1], key)):
        against = _against(base[0], others, values)
        other = _paper(base[1][0], task, key)
        if paper and other and paper.deviation is not None and other.deviation:
            change = 100 * (paper.deviation / other.deviation - 1)
    return Figure(*key, tuple(values.values()), stat, paper, change, against)


def _values(runs: Runs, key: tuple[str, str]) -> dict[int | str, float]:
    """Scores by seed; by folder where a run has none recorded."""
    found = {str(run.folder) if run.seed is None else run.seed: scores_of(run).get(key) for run in runs}
    return {seed: value for seed, value in found.items() if value is not None}


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
        paired=over_seeds.paired_interval(a, b) if pairs else None,
        change=over_seeds.deviation_change(a, b),
        f_interval=over_seeds.deviation_interval(a, b),
        bootstrap=over_seeds.deviation_bootstrap(a, b, paired=pairs),
        p=over_seeds.brown_forsythe(a, b),
    )


def _paper(run: RunRecord, task: str, key: tuple[str, str]) -> Paper | None:
    """What the recipe says that the paper has of a figure.

    `{matthews_correlation: 59.8}` or `[mean, deviation]` is of the development split; `test`, `test_mismatched` are the
    server's scores of the splits that ours stand for.
    """
    paper, (split, metric) = paper_of(run), key
    stated = paper.get(metric) if split == "dev" else mapping(paper.get(split)).get(metric)
    if stated is None and split.startswith("dev") and metric == _SERVER.get(task, "accuracy"):
        found = _stated(paper.get(split.replace("dev", "test", 1)))
        return None if found is None else dataclasses.replace(found, server=True)
    return _stated(stated)


def _stated(value: Any) -> Paper | None:
    """`54.9`, or `[59.8, 1.2]`: mean and deviation."""
    mean, deviation = value if isinstance(value, list) and len(value) == 2 else (value, None)
    found = number(mean)
    return None if found is None else Paper(found, number(deviation))


def points_words(metric: str) -> str:
    """`Matthews correlation x 100`."""
    return f"{metric_words(metric)} x 100"
