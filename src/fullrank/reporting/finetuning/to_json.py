"""Fine-tuning over seeds as plain objects, for `--json`."""

from __future__ import annotations

from typing import Any

from fullrank.evaluation.statistics import SAMPLES, SEED, Interval
from fullrank.reporting.finetuning.arms import POINTS, attention_of, encoder_of
from fullrank.reporting.finetuning.comparing import Against, Arm, Figure, Paper, Summary, TaskSummary
from fullrank.reporting.results import RunRecord, mapping, number
from fullrank.reporting.stats import over_runs

_OF_THE_FIRST = ("recipe", "row", "scale", "checkpoint", "protocol", "parameters", "examples", "slice", "sha256")


def as_json(found: Summary) -> dict[str, Any]:
    """The summary as plain objects for one JSON document: numbers in full precision, no paths of this machine.

    Scores and their differences are in points, 100 times the fractions of results; what so few seeds cannot tell is null.
    """
    return {
        "kind": "finetuning",
        "tasks": [_task(task) for task in found.tasks],
        "unfinished": [
            {"name": run.name, "seed": run.seed, "problems": list(run.problems)} for run in found.unfinished
        ],
    }


def _task(task: TaskSummary) -> dict[str, Any]:
    return {
        "task": task.task,
        "title": task.title,
        "points_per_unit": POINTS,
        "arms": [_arm(arm) for arm in task.arms],
        "remarks": list(task.remarks),
    }


def _arm(arm: Arm) -> dict[str, Any]:
    results = [mapping(run.result) for run in arm.runs]
    figures: dict[str, dict[str, Any]] = {}
    for (split, metric), figure in arm.figures.items():
        figures.setdefault(split, {})[metric] = _figure(figure)
    return {
        "name": arm.name,
        "baseline": arm.baseline,
        **{key: arm.result.get(key) for key in _OF_THE_FIRST},
        "encoder": encoder_of(arm.runs[0]),
        "attention": attention_of(arm.runs[0]),
        "seeds": list(arm.seeds),
        "steps": [result.get("steps") for result in results],
        "epochs": [result.get("epochs") for result in results],
        "wall_seconds": [result.get("wall_seconds") for result in results],
        "figures": figures,
        "loss": _losses(arm.runs),
        "environment": arm.result.get("environment"),
    }


def _losses(runs: tuple[RunRecord, ...]) -> dict[str, Any]:
    """Mean and deviation of the loss, by split."""
    finals = [mapping(mapping(run.result).get("final")) for run in runs]
    found: dict[str, Any] = {}
    for split in dict.fromkeys(split for final in finals for split in final):
        stat = over_runs(number(mapping(final.get(split)).get("loss")) for final in finals)
        if stat is not None:
            found[split] = {"mean": stat.mean, "deviation": stat.deviation}
    return found


def _figure(figure: Figure) -> dict[str, Any]:
    against = figure.against
    return {
        "values": list(figure.values),
        "mean": figure.stat.mean,
        "deviation": figure.stat.deviation,
        "count": figure.stat.count,
        "paper": _paper(figure.paper, figure.papers_change),
        "against": against
        and {
            "baseline": against.baseline,
            "difference": against.difference,
            "welch": _interval(against.welch),
            "paired": _interval(against.paired),
            "deviation_change_percent": against.change,
            "deviation_f_interval": _interval(against.f_interval),
            "deviation_bootstrap": _bootstrap(against),
            "brown_forsythe_p": against.p,
        },
    }


def _bootstrap(against: Against) -> dict[str, Any] | None:
    if against.bootstrap is None:
        return None
    return {**against.bootstrap._asdict(), "samples": SAMPLES, "seed": SEED, "pairs": against.pairs}


def _paper(paper: Paper | None, change: float | None) -> dict[str, Any] | None:
    if paper is None:
        return None
    return {
        "mean": paper.mean,
        "deviation": paper.deviation,
        "deviation_change_percent": change,
        "of": "test server" if paper.server else "development split",
    }


def _interval(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else found._asdict()
