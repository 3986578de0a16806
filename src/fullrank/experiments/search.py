"""Search for the best values of a few keys by successive halving, within a fixed budget.

All n_0 combinations train to a first rung. After each rung the better n_(k+1) = max(1, floor(n_k / eta)) go on, by validation
nll, until one is left (n_K = 1), which trains to the end. With R updates in a full training, rung k ends after

    r_k = eta^k floor(R / eta^K)  for k < K,    r_K = R

updates. A rung is the beginning of a run whose schedules are those of R updates: it pauses there and later goes on, so nothing
is trained twice, and the winner is the run that `fullrank train` makes of its configuration. A run that pauses is never
measured on test text. Every run is evaluated after each floor(R / eta^K) updates (`eval.every_steps`), so at every rung.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

from fullrank.config.load import parse_yaml, to_yaml
from fullrank.config.recipe import Resolved, resolve
from fullrank.config.run import RunConfig
from fullrank.config.training import read_budget
from fullrank.core.errors import InputError, RunError
from fullrank.core.section import Count
from fullrank.experiments.queue import Training, TrainingsFailed, train_all
from fullrank.experiments.run import TEXT_TASKS, Cell
from fullrank.experiments.run_folder import absolute, finished_result
from fullrank.experiments.speed import Speed, measure_speed
from fullrank.experiments.task import Parts, Say
from fullrank.files import parse_json, read_json, write_json, write_text
from fullrank.reporting.runs import read_run
from fullrank.training.device import is_locked, prepare_machine
from fullrank.training.loop import NOT_FINITE
from fullrank.training.phases import Plan, make_plan

FILE = "search.json"
_STARTUP = 7.0  # seconds of a process until it trains
_EQUAL = ("data.", "eval.", *(f"train.{key}." for key in ("steps", "epochs", "tokens", "seed", "threads")))
_OWN = ("train.seed", "eval.every_steps", "eval.every_epochs")
Arm = dict[str, Any]  # a combination: name, settings; rungs, nll: by rung; dropped: the rung that it left after


class _Arm(TypedDict):
    name: str
    settings: dict[str, Any]
    rungs: list[Count]
    nll: list[float | None]
    dropped: int | None


class _Winner(TypedDict):
    settings: dict[str, Any]
    folders: list[str]
    nll: dict[str, float]


class _Search(TypedDict):
    """The content of search.json."""

    request: dict[str, Any]
    left: list[Count]
    shares: list[float]
    arms: list[_Arm]
    winner: _Winner | None
    epochs: float
    full_trainings: float


@dataclass(frozen=True)
class Request:
    """A search. values: texts `key=value,value`; a value `low..high` is a range, of which one is drawn.

    epochs: length of a full training; None: that of the configuration. minutes: of the whole search, which decide the length.
    draws: the number of combinations drawn with the first seed; None: all.
    """

    config: str
    values: Sequence[str]
    overrides: Sequence[str] = ()
    row: str | None = None
    scale: str | None = None
    seeds: Sequence[int] = (1,)
    eta: int = 2
    epochs: float | None = None
    minutes: float | None = None
    draws: int | None = None


def search(request: Request, out: Path, cores: Sequence[int], say: Say = print) -> dict[str, Any]:
    """Search in the folder `out`, or go on there; the content of its search.json.

    InputError before anything is trained: a combination cannot be, or `out` holds something else. RunError: a training failed;
    one that diverges is dropped, unless all do. Interrupted: as `train_all`. In both cases the same command goes on.
    """
    content = _begun(request, out) or _planned(request, len(cores), say)
    write_json(out / FILE, content)
    say(budget_in_words(content))
    for rung in range(len(content["left"])):
        going = [arm for arm in content["arms"] if arm["dropped"] is None and len(arm["nll"]) == rung]
        if going:
            _train_rung(request, out, content, going, cores, say)
    if content["winner"] is None:
        raise InputError(f"{out / FILE}: damaged (every combination is done, and winner is null); give another --out")
    return content


# -- combinations and plan ---------------------------------------------------------------------------------------------


def minutes_of(text: str) -> float:
    """Minutes of a time on the wall, `90 minutes` or `2 hours`, written as in `train.budget`."""
    budget = read_budget(text)
    if budget is None or budget.seconds is None or budget.cpu:
        raise InputError(f"--budget: a time on the wall such as '90 minutes' or '2 hours', given {text!r}")
    return budget.seconds / 60


def combinations(request: Request) -> list[dict[str, Any]]:
    """The settings of each combination; InputError for a key that is not searched, and for fewer than two combinations."""
    keys: dict[str, list[Any]] = {}
    for text in request.values:
        key, _, values = text.partition("=")
        if not key or not values:
            raise InputError(f"--set {text}: give a key with its values, as in train.learning_rate=1e-4,3e-4")
        if f"{key}.".startswith(_EQUAL):
            raise InputError(f"--set {key}: text, budget, seeds and evaluation are the same for all combinations")
        keys.setdefault(key, []).extend(parse_yaml(f"[{values}]", f"--set {key}"))
    for text in request.overrides:
        if (key := text.partition("=")[0].strip()) in (*keys, *_OWN):
            raise InputError(f"{key}: set by the search (--set, --seeds, an evaluation at each rung); leave out {text}")
    found: dict[str, dict[str, Any]] = {}
    draw, most = random.Random(request.seeds[0]), request.draws
    chosen: Iterable[Sequence[Any]] = itertools.product(*keys.values())
    if most is not None:
        chosen = ([draw.choice(values) for values in keys.values()] for _ in range(100 * most))
    for one in chosen:
        settings = {
            key: _drawn(key, value, None if most is None else draw) for key, value in zip(keys, one, strict=True)
        }
        if most is None or len(found) < most:
            found.setdefault(json.dumps(settings), settings)
    if len(found) < 2:
        raise InputError(f"--set: a search has at least two combinations, given {len(found)}; use `fullrank train`")
    return list(found.values())


def _drawn(key: str, value: Any, draw: random.Random | None) -> Any:
    """`value`; of a range `low..high` one whose logarithm is uniform, with three digits."""
    if not isinstance(value, str) or ".." not in value:
        return value
    ends = [parse_yaml(end, f"--set {key}") for end in value.split("..", 1)]
    if draw is None or not all(isinstance(end, int | float) for end in ends) or not 0 < ends[0] < ends[1]:
        raise InputError(
            f"--set {key}: a range is low..high with 0 < low < high, and goes with --random N, given {value}"
        )
    return float(f"{ends[0] * (ends[1] / ends[0]) ** draw.random():.3g}")


def left_at(number: int, eta: int) -> list[int]:
    """The number of combinations in each rung."""
    return [number] if number == 1 else [number, *left_at(max(1, number // eta), eta)]


def _begun(request: Request, out: Path) -> dict[str, Any] | None:
    """The content of search.json in `out`; None where nothing is. InputError if `out` holds another search, or no search."""
    if not (out / FILE).is_file():
        if out.exists() and (not out.is_dir() or any(not path.name.startswith(".") for path in out.iterdir())):
            raise InputError(f"{out} is not empty and holds no search; give another --out")
        return None
    there = read_json(out / FILE).get("request")
    if not isinstance(there, dict):
        raise InputError(f"{out / FILE}: damaged (request: a mapping, given {there!r}); give another --out")
    here = parse_json(json.dumps(dataclasses.asdict(request)))
    for key, value in here.items():
        if there.get(key) != value:
            raise InputError(
                f"{out} holds another search: {key} is {there.get(key)} there, {value} here; give another --out"
            )
    content: dict[str, Any] = read_json(out / FILE, _Search)
    return content


def _planned(request: Request, cores: int, say: Say) -> dict[str, Any]:
    """The content of search.json before anything is trained."""
    settings = combinations(request)
    left = left_at(len(settings), request.eta)
    pieces = request.eta ** (len(left) - 1)
    shares = [request.eta**rung / pieces for rung in range(len(left))]
    configs = [_resolved(request, own, request.epochs)[0] for own in settings]  # every fault before a text is read
    plans, epochs = list[Plan](), request.epochs
    speeds, epoch, evaluation = dict[Any, Speed](), list[float](), list[float]()
    for config in configs:
        parts, plan = _parts(config, say)
        plans.append(plan)
        if request.minutes is not None:
            shape = sum(p.numel() for p in parts.model.parameters()), plan.batches_per_epoch
            speed = speeds[shape] = speeds.get(shape) or measure_speed(parts, clock=time.perf_counter)
            epoch.append(speed.step * plan.batches_per_epoch)
            evaluation.append(speed.evaluation)
    if request.minutes is not None:
        rounds = [math.ceil(number * len(request.seeds) / cores) for number in left]  # trainings one after another
        evaluations = _trainings_in(rounds, shares) / shares[0] * fmean(evaluation)
        seconds = 60 * request.minutes - sum(rounds) * _STARTUP - evaluations
        epochs = max(0.0, float(f"{seconds / (_trainings_in(rounds, shares) * fmean(epoch)):.4g}"))
        plans = [dataclasses.replace(plan, total_steps=round(epochs * plan.steps_per_epoch)) for plan in plans]
    totals = [plan.total_steps for plan in plans]
    if min(totals) < pieces:
        raise InputError(
            f"a full training would have {min(totals)} updates, and {len(left)} rungs with --eta {request.eta} need {pieces}: "
            "give a larger --budget, more --epochs or fewer combinations"
        )
    arms: list[Arm] = [
        {"name": _name(number, own), "settings": own,
         "rungs": [*(total // pieces * request.eta**rung for rung in range(len(left) - 1)), total], "nll": [], "dropped": None}
        for number, own, total in zip(itertools.count(1), settings, totals, strict=False)
    ]  # fmt: skip
    shares = [step / totals[0] for step in arms[0]["rungs"]]
    return {
        "request": dataclasses.asdict(request), "left": left, "shares": shares, "arms": arms, "winner": None,
        "epochs": epochs or plans[0].total_steps / plans[0].steps_per_epoch,
        "full_trainings": _trainings_in(left, shares) * len(request.seeds),
    }  # fmt: skip


def _name(number: int, settings: Mapping[str, Any]) -> str:
    words = "-".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
    return f"{number:02d}-" + re.sub(r"[^\w.+=-]+", "_", words)[:100]


def _trainings_in(left: Sequence[int], shares: Sequence[float]) -> float:
    """Full trainings that the rungs add up to."""
    return sum(number * (share - before) for number, share, before in zip(left, shares, [0, *shares], strict=False))


def _resolved(
    request: Request, settings: Mapping[str, Any], epochs: float | None, *more: str
) -> tuple[Resolved[RunConfig], tuple[str, ...]]:
    """The checked configuration of a combination, and the overrides that make it."""
    end = [] if epochs is None else [f"train.epochs={epochs}"]
    own = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    overrides = (*request.overrides, *end, *own, "train.threads=1", "eval.every_epochs=null", *more)
    return resolve(request.config, request.row, request.scale, overrides), overrides


def _parts(resolved: Resolved[RunConfig], say: Say) -> tuple[Parts, Plan]:
    """The parts of a training and its plan; InputError where model and text do not go together."""
    config, device = absolute(resolved.config), prepare_machine(resolved.config.train)
    assert isinstance(config, RunConfig)
    task = TEXT_TASKS[config.task]
    task.check(config)
    parts = task.parts(task.prepare(config, {}, resolved.scale != "paper", say), Path(), device)
    return parts, make_plan(parts.options, parts.eval_options, parts.batches)


# -- training ------------------------------------------------------------------------------------------------------------


def _train_rung(
    request: Request, out: Path, content: dict[str, Any], going: Sequence[Arm], cores: Sequence[int], say: Say
) -> None:
    """Train the combinations that are left to their next rung, drop the worse ones, and write search.json."""
    rung, last = len(going[0]["nll"]), len(content["left"]) - 1
    length = content["epochs"] if request.epochs or request.minutes else None
    runs: dict[str, list[Training]] = {arm["name"]: [] for arm in going}
    for arm, seed in itertools.product(going, request.seeds):
        every = f"eval.every_steps={arm['rungs'][0]}"
        resolved, overrides = _resolved(request, arm["settings"], length, every, f"train.seed={seed}")
        cell = Cell(resolved, out / f"{arm['name']}-seed{seed}")
        runs[arm["name"]].append(Training(cell, overrides, None, until=arm["rungs"][rung] if rung < last else None))
    every_run = list(itertools.chain(*runs.values()))
    while any(is_locked(one.cell.folder) for one in every_run):
        say("waiting for trainings of this search that go on in another process, as after a kill")
        time.sleep(5)
    diverged = set[Path]()
    try:
        asyncio.run(train_all(every_run, cores, lambda folder: None, say))
    except TrainingsFailed as failure:
        diverged = {folder for folder, output in failure.outputs.items() if NOT_FINITE in output}
        if len(diverged) < len(failure.outputs):
            raise
    for arm in going:
        folders = [one.cell.folder for one in runs[arm["name"]]]
        value = fmean(_nll(one, arm["rungs"][rung]) for one in folders) if diverged.isdisjoint(folders) else None
        arm["nll"].append(value)
    ranked = sorted((arm for arm in going if arm["nll"][rung] is not None), key=lambda arm: arm["nll"][rung])
    if not ranked:
        raise RunError(f"every combination of rung {rung + 1} diverged; lower train.learning_rate")
    better = ranked[: content["left"][min(rung + 1, last)]]
    for arm in going:
        arm["dropped"] = None if arm in better else rung + 1
    if rung == last:
        content["winner"] = _winner(out, better[0], runs[better[0]["name"]])
    write_json(out / FILE, content)


def _nll(folder: Path, step: int) -> float:
    """The lowest validation nll of a run up to an update: that of the checkpoint that would be measured."""
    return min(line["nll"] for line in read_run(folder).metrics if line["split"] == "valid" and line["step"] <= step)


def _winner(out: Path, arm: Arm, runs: Sequence[Training]) -> dict[str, Any]:
    """The winner and the means of its final figures; writes its configuration as winner.yaml."""
    write_text(out / "winner.yaml", to_yaml(runs[0].cell.resolved.config))
    finals = [(finished_result(one.cell.folder) or {})["final"] for one in runs]
    nll = {split: fmean(final[split]["nll"] for final in finals) for split in ("valid", "test")}
    return {"settings": arm["settings"], "folders": [str(one.cell.folder) for one in runs], "nll": nll}


# -- words ---------------------------------------------------------------------------------------------------------------


def budget_in_words(content: Mapping[str, Any]) -> str:
    """The budget of each rung, the same for all combinations in it."""
    left, seeds = content["left"], len(content["request"]["seeds"])
    rungs = ", ".join(
        f"{n} to {share * content['epochs']:.3g}" for n, share in zip(left, content["shares"], strict=True)
    )
    return (
        f"{left[0]} combinations, {seeds} seed{'s' * (seeds > 1)}, equal budgets in each rung: {rungs} epochs; in all "
        f"{content['full_trainings']:.3g} full trainings instead of {left[0] * seeds}"
    )


def outcome_of(arm: Arm) -> str:
    """Outcome of a combination: winner, or the rung that it left after."""
    if arm["dropped"] is None:
        return "winner"
    return f"{'diverged in' if arm['nll'][-1] is None else 'dropped after'} rung {arm['dropped']}"
