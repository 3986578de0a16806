"""The trainings of a plan, one after another on given cores. Each is `fullrank train` in a process of its own.

A plan that was stopped, by a signal or with its machine, goes on where it was: finished runs are left alone, and a run that
was stopped is resumed exactly. A training that fails is reported, and the next one begins.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.load import build_any, flatten, lay, read_yaml, undotted
from fullrank.config.plan import PlanEntry, PlanFile
from fullrank.config.recipe import Resolved, chosen_rows, resolve_any, tables
from fullrank.core.errors import InputError, Interrupted, RunError
from fullrank.experiments.run import Cell
from fullrank.experiments.run_folder import absolute, default_folder, finished_result
from fullrank.experiments.task import Say
from fullrank.files import digest
from fullrank.reporting.figures import duration
from fullrank.reporting.runs import CIRCUMSTANCES
from fullrank.seal import DamagedError, read_record
from fullrank.training.device import catch_signals, is_locked

_WITHOUT_FOLDER = ("builtin", "text", "parallel", "synthetic-translation")  # corpora that --from need not hold
_LONGEST_SUFFIX = 120  # characters of a folder's name that say which settings differ
_NICENESS = 10
_POLL_SECONDS = 0.2
_LAST_LINES = 6


@dataclass(frozen=True)
class Training:
    """One training of a plan: a row with a seed, its folder, and the settings by which the entry differs from the recipe."""

    cell: Cell
    entry: PlanEntry
    overrides: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The words after `python` that train it."""
        resolved = self.cell.resolved
        folder = self.cell.folder
        chosen = [("--row", resolved.row), ("--scale", resolved.scale), ("--out", str(folder))]
        chosen += [("--reuse", str(folder.parent.parent))] if resolved.row is not None else []
        options = [word for option, value in chosen if value is not None for word in (option, value)]
        return ["-m", "fullrank", "train", resolved.recipe, *self.overrides, *options]

    def __str__(self) -> str:
        return f"{self.cell.resolved.recipe} {self.cell.row} seed {self.cell.seed}"


@dataclass(frozen=True)
class Progress:
    """How far a training is: `finished`, `running`, `stopped`, `open`, or `other` where the folder holds another run.

    seconds: what a finished one took. problem: how the other run differs.
    """

    state: str
    step: int = 0
    steps: int | None = None
    seconds: float | None = None
    problem: str | None = None

    def words(self) -> str:
        of = "" if self.steps is None else f" of {self.steps:,}"
        return f"{self.state} at step {self.step:,}{of}" if self.state in ("running", "stopped") else self.state


# -- from a plan to its trainings -------------------------------------------------------------------------------------


def trainings_of(plan: PlanFile, source: Path | None = None, out: Path | None = None) -> list[Training]:
    """The trainings in the order of the plan; in an entry all rows of a seed, then the next seed.

    source: a folder with a subfolder for each corpus. out: the folder of the run folders, `runs` if not given.
    InputError for whatever the plan asks for that cannot be trained, before anything is.
    """
    planned: dict[Path, Training] = {}
    for entry in plan.trainings:
        settings = flatten(lay(undotted(plan.set or {}), entry.set or {}))
        rows_of = chosen_rows(tables(entry.table), entry.rows)
        for seed in entry.seeds:
            for recipe, row in ((recipe, row) for recipe, rows in rows_of.items() for row in rows or (None,)):
                training = _training(entry, recipe, row, seed, settings, source, out)
                other = planned.setdefault(training.cell.folder, training)
                if other.cell.resolved.config != training.cell.resolved.config:
                    raise InputError(
                        f"trainings: two different trainings would share the folder {training.cell.folder}"
                    )
    return list(planned.values())


def _training(
    entry: PlanEntry,
    recipe: str,
    row: str | None,
    seed: int,
    settings: dict[str, Any],
    source: Path | None,
    out: Path | None,
) -> Training:
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    overrides += [f"train.seed={seed}", "train.threads=1"]
    resolved = resolve_any(recipe, row, entry.scale, overrides)
    invented = isinstance(resolved.config, FinetuneConfig) and resolved.config.data.invented  # so that no file is read
    held = None if source is None or invented else _corpus_folder(source, resolved.config.data.name)
    if held is not None:
        overrides.append(f"data.dir={json.dumps(str(held.resolve()))}")
        resolved = resolve_any(recipe, row, entry.scale, overrides)
    usual = default_folder(resolved)
    name = usual.name.removesuffix(f"seed{seed}") + _suffix(settings) + f"seed{seed}"
    folder = (out or Path("runs")) / usual.relative_to("runs").with_name(name)
    return Training(Cell(resolved, folder), entry, tuple(overrides))


def _suffix(settings: dict[str, Any]) -> str:
    """Settings as a part of a file's name: `learning_rate=0.002-`; empty without any."""
    parts = [f"{name.rpartition('.')[2]}={value}-" for name, value in settings.items()]
    suffix = re.sub(r"[^\w.+=-]+", "_", "".join(parts))
    return suffix if len(suffix) <= _LONGEST_SUFFIX else f"{suffix[:_LONGEST_SUFFIX]}-{digest(settings)[:8]}-"


def _corpus_folder(root: Path, corpus: str) -> Path | None:
    """The folder of a corpus in `root`, by its name: iwslt14.de-en holds iwslt14-de-en, glue holds glue/cola."""

    def words(name: str) -> list[str]:
        return re.split(r"[^a-z0-9]+", name.lower())

    folders = sorted(path for path in root.glob("*/"))
    fitting = [path for path in folders if words(corpus)[: len(words(path.name))] == words(path.name)]
    if fitting or corpus in _WITHOUT_FOLDER:
        return max(fitting, key=lambda path: len(words(path.name)), default=None)
    has = ", ".join(path.name for path in folders) or "no folder"
    raise InputError(f"--from {root}: holds no folder named after the corpus {corpus} (data.name); it has {has}")


# -- how far they are -------------------------------------------------------------------------------------------------


def progress(cell: Cell) -> Progress:
    """How far the training in `cell` is."""
    if (result := finished_result(cell.folder)) is not None:
        if (problem := _difference(cell)) is not None:
            return Progress("other", problem=problem)
        return Progress("finished", result.get("steps", 0), result.get("steps"), result.get("wall_seconds"))
    try:
        record = read_record(cell.folder / "checkpoints" / "last").state
    except DamagedError:
        record = {}
    step, steps = record.get("step", 0), record.get("total_steps") or cell.resolved.config.train.steps
    if is_locked(cell.folder):
        timing = cell.folder / "timing.jsonl"
        text = timing.read_text(encoding="utf-8") if timing.is_file() else ""
        logged = re.findall(r'^{"step": (\d+).*}$', text, re.MULTILINE)
        return Progress("running", max(step, int(logged[-1]) if logged else 0), steps)
    return Progress("stopped", step, steps) if step else Progress("open", 0, steps)


def _difference(cell: Cell) -> str | None:
    """How the run in the folder differs from the plan; sizes that come from its text are null in the plan."""
    there = flatten(build_any(read_yaml(cell.folder / "config.yaml")).to_dict())
    here = flatten(absolute(cell.resolved.config).to_dict())
    other = [k for k, v in here.items() if v is not None and k not in CIRCUMSTANCES and there.get(k) != v]
    if not other:
        return None
    shown = ", ".join(f"{key} is {there.get(key)!r} there, {here[key]!r} in the plan" for key in other[:3])
    again = "rename it: its training is taken over, and measured by the plan's protocol"
    only_final = all(key.startswith(("eval.valid", "eval.test")) for key in other)
    return (
        f"holds a finished run with another configuration: {shown}; {again if only_final else 'move it, or give --out'}"
    )


def seconds_left(planned: Sequence[Training], states: Sequence[Progress], cores: int) -> float | None:
    """An estimate for what is not finished, from finished runs of the same row, else table, else all; None without any."""
    took = [(one.cell.resolved, state.seconds) for one, state in zip(planned, states, strict=True) if state.seconds]
    if not took:
        return None

    def whole(mine: Resolved[Any]) -> float:
        for keys in (("recipe", "scale", "row"), ("recipe", "scale"), ()):
            alike = [s for other, s in took if all(vars(other)[key] == vars(mine)[key] for key in keys)]
            if alike:
                break
        return fmean(alike)

    rest = ((one, 1 - state.step / (state.steps or 1)) for one, state in zip(planned, states, strict=True))
    return sum(whole(one.cell.resolved) * share for one, share in rest) / cores


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass
class _Child:
    training: Training
    process: subprocess.Popen[bytes]
    core: int
    output: IO[bytes]

    def end(self) -> list[str]:
        """Wait for its end; its last lines."""
        self.process.wait()
        with self.output as output:
            output.seek(0)
            return output.read().decode("utf-8", errors="replace").splitlines()[-_LAST_LINES:]


def cores_for(number: int) -> list[int]:
    """`number` of the cores that this process may use; InputError if it has fewer."""
    every = os.cpu_count() or 1
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(every))
    if number > len(own):
        raise InputError(f"--cores {number}: this process may use {len(own)}; give at most that many")
    return own[:number]


def _start(training: Training, core: int) -> _Child:
    """Start a training on a core, at low priority. In a group of its own Ctrl-C does not reach it: the queue stops it, once."""
    output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child lives
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, *training.command]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
    )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, {core})
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, process.pid, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    return _Child(training, process, core, output)


def train_all(
    planned: Sequence[Training], cores: Sequence[int], finished: Callable[[Path], None], say: Say = print
) -> None:
    """Train what is not finished, one training on each core at a time; `finished` is called with the folder of each run.

    RunError at the end if any training failed. Interrupted: SIGINT or SIGTERM; every training has saved its state. SIGTSTP
    (Ctrl-Z) pauses the queue with its trainings.
    """
    waiting, running, failed = deque(enumerate(planned, start=1)), list[_Child](), list[str]()
    with catch_signals() as stop, _pausing(running):
        try:
            while (waiting or running) and not stop.signal:
                free = [core for core in cores if core not in {child.core for child in running}]
                if waiting and free:
                    number, training = waiting.popleft()
                    match progress(training.cell):
                        case Progress(state="finished"):
                            finished(training.cell.folder)
                            continue
                        case Progress(problem=str(problem)):
                            say(f"failed: {training}, {training.cell.folder} {problem}")
                            failed.append(str(training))
                            continue
                    running.append(child := _start(training, free[0]))
                    say(f"{number} of {len(planned)}: {training}, {training.cell.folder}, process {child.process.pid}")
                    continue
                time.sleep(_POLL_SECONDS)
                for child in [child for child in running if child.process.poll() is not None]:
                    running.remove(child)
                    lines = child.end()
                    if child.process.returncode == 0:
                        say(f"finished: {child.training}")
                        finished(child.training.cell.folder)
                    else:
                        failed.append(str(child.training))
                        say(f"failed: {child.training}, exit status {child.process.returncode}")
                        for line in lines:
                            say(f"  {line}")
        finally:
            for child in running:
                child.process.terminate()
            for child in running:
                child.end()
    if stop.signal:
        raise Interrupted(f"stopped by {stop.signal}; what was running has saved its state")
    if failed:
        raise RunError(f"{len(failed)} of {len(planned)} trainings failed: {'; '.join(failed)}")


@contextmanager
def _pausing(running: list[_Child]) -> Iterator[None]:
    """Inside the block SIGTSTP stops the trainings and this process; when it is continued, so are they."""

    def pause(number: int, frame: object) -> None:
        for child in running:
            child.process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for child in running:
            child.process.send_signal(signal.SIGCONT)

    try:
        former = signal.signal(signal.SIGTSTP, pause)
    except (AttributeError, ValueError):  # not on Windows, not in another thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, former)


def as_json(planned: Sequence[Training], states: Sequence[Progress], cores: int) -> dict[str, Any]:
    """The state of a plan as plain objects."""
    rows = [
        {"table": one.cell.resolved.recipe, "row": one.cell.row, "scale": one.cell.resolved.scale}
        | {"seed": one.cell.seed, "folder": str(one.cell.folder), "decides": one.entry.decides}
        | dataclasses.asdict(state)
        for one, state in zip(planned, states, strict=True)
    ]
    return {"trainings": rows, "seconds_left": seconds_left(planned, states, cores)}


def in_lines(planned: Sequence[Training], states: Sequence[Progress], cores: int) -> Iterator[str]:
    """The state of a plan for people, a line for each training."""
    for one, state in zip(planned, states, strict=True):
        more = "" if state.seconds is None else f"  {duration(state.seconds)}"
        yield f"{state.words():<28} {one}  {one.cell.folder}{more}{f' {state.problem}' if state.problem else ''}"
    left, done = seconds_left(planned, states, cores), sum(state.state == "finished" for state in states)
    rest = "" if not left else f", about {duration(left)} left on {cores} core{'s' * (cores > 1)}"
    yield f"{done} of {len(planned)} finished{rest}"
