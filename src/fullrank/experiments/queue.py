"""The trainings of a plan, one after another on given cores. Each is `fullrank train` in a process of its own.

A plan that was stopped, by a signal or with its machine, goes on where it was: finished runs are left alone, wherever they
were trained if the ledger has them, and a run that was stopped is resumed exactly. A training that fails is reported, and the
next one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.load import build_any, flatten, lay, read_yaml, undotted
from fullrank.config.plan import PlanFile
from fullrank.config.recipe import chosen_rows, tables
from fullrank.core.errors import InputError, Interrupted, RunError
from fullrank.experiments.run import Cell, cells
from fullrank.experiments.run_folder import finished_result
from fullrank.experiments.task import Say
from fullrank.files import python_command, usable_cores
from fullrank.reporting.figures import duration
from fullrank.reporting.ledger import Row, differences
from fullrank.seal import DamagedError, read_record
from fullrank.training.device import is_locked

_NICENESS = 10
_LAST_LINES = 6
_DONE = ("finished", "recorded")


class TrainingsFailed(RunError):
    """Trainings that failed. outputs: what each of them printed, by its folder."""

    def __init__(self, text: str, outputs: Mapping[Path, str]) -> None:
        self.outputs = outputs
        super().__init__(text)


@dataclass(frozen=True)
class Training:
    """One training of a plan: a row with a seed, its folder, its settings beside the recipe's, and the claim it decides.

    recorded: the ledger has its run. until: the update after which it pauses, not measured.
    """

    cell: Cell
    overrides: tuple[str, ...]
    decides: str | None
    recorded: bool = False
    until: int | None = None

    @property
    def command(self) -> list[str]:
        """The words after `python` that train it. Rows that are one training are trained once."""
        resolved, folder = self.cell.resolved, self.cell.folder
        words = ["-m", "fullrank", "train", resolved.recipe, *self.overrides, "--out", str(folder)]
        if resolved.row is not None:
            words += ["--row", resolved.row, "--scale", str(resolved.scale)]
        if self.until is not None:
            words += ["--until", str(self.until)]
        elif resolved.row is not None:
            words += ["--reuse", str(folder.parent.parent)]
        return words

    @property
    def finished(self) -> bool:
        """The run in the folder is finished, and has the settings of the plan; or it has come as far as it should."""
        folder, resolved = self.cell.folder, self.cell.resolved
        if self.until is not None:
            state = _saved(folder)
            return state.get("finished", False) or state.get("step", 0) >= self.until
        if finished_result(folder) is None:
            return False
        there, row = build_any(read_yaml(folder / "config.yaml")), (resolved.recipe, resolved.row, resolved.scale)
        return differences(there, *row) == differences(resolved.config, *row)

    def __str__(self) -> str:
        return f"{self.cell.resolved.recipe} {self.cell.row} seed {self.cell.seed}"


def trainings_of(
    plan: PlanFile, source: Path | None = None, out: Path = Path("runs"), ledger: Sequence[Row] = ()
) -> list[Training]:
    """The trainings in the order of the plan; of a recipe all rows of a seed, then the next seed.

    source: a folder with a subfolder for each corpus. out: the folder of the run folders. ledger: its rows.
    InputError for whatever the plan asks for that cannot be trained, before anything is.
    """
    planned: dict[Path, Training] = {}
    had = [tuple(row[key] for key in ("recipe", "row", "scale", "seed", "set")) for row in ledger]
    for entry in plan.trainings:
        settings = flatten(lay(undotted(plan.set or {}), entry.set or {}))
        overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        for recipe, rows in chosen_rows(tables(entry.table), entry.rows).items():
            for cell in cells(recipe, rows or None, entry.scale, entry.seeds, [*overrides, "train.threads=1"]):
                folder = out / _in_runs(cell, settings)
                own = (*overrides, "train.threads=1", f"train.seed={cell.seed}", *_texts(cell, source))
                name = (recipe, cell.resolved.row, cell.resolved.scale)
                recorded = (*name, cell.seed, differences(cell.resolved.config, *name)) in had
                training = Training(Cell(cell.resolved, folder), own, entry.decides, recorded)
                if planned.setdefault(folder, training).cell.resolved.config != cell.resolved.config:
                    raise InputError(f"trainings: two different trainings would share the folder {folder}")
    return list(planned.values())


def _in_runs(cell: Cell, settings: Mapping[str, Any]) -> Path:
    """The usual folder inside `runs`, with settings in its name: `b-small-learning_rate=0.002-seed1`."""
    seed, usual = f"seed{cell.seed}", cell.folder.relative_to("runs")
    words = "".join(f"{name.rpartition('.')[2]}={value}-" for name, value in settings.items())
    return usual.with_name(usual.name.removesuffix(seed) + re.sub(r"[^\w.+=-]+", "_", words) + seed)


def _texts(cell: Cell, source: Path | None) -> list[str]:
    """The folder of corpora as an override, unless the text is invented, or files that the configuration names."""
    config = cell.resolved.config
    own = config.data.invented if isinstance(config, FinetuneConfig) else config.data.name in ("text", "parallel")
    return [] if source is None or own else [f"data.dir={json.dumps(str(source.resolve()))}"]


# -- how far they are -------------------------------------------------------------------------------------------------


def listing(planned: Sequence[Training], cores: int) -> dict[str, Any]:
    """The state of every training as plain objects, and a rough time for what is left: the mean of what finished ones took.

    The state is `finished`, `recorded` (in the ledger, no folder here), `running`, `stopped`, `open`, or `other` where the
    folder holds a finished run with other settings.
    """
    states = [_state(training) for training in planned]
    took = [one["seconds"] for one in states if one["seconds"]]
    left = sum(1 - one["step"] / (one["steps"] or 1) for one in states if one["state"] not in _DONE)
    return {"trainings": states, "seconds_left": fmean(took) * left / cores if took else None}


def _saved(folder: Path) -> dict[str, Any]:
    """The state of the last checkpoint of the run in `folder`; empty without one."""
    try:
        return read_record(folder / "checkpoints" / "last").state
    except DamagedError:
        return {}


def _state(training: Training) -> dict[str, Any]:
    cell, resolved = training.cell, training.cell.resolved
    saved = _saved(cell.folder)
    result, step = finished_result(cell.folder), saved.get("step", 0)
    state = "running" if is_locked(cell.folder) else "stopped" if step else "recorded" if training.recorded else "open"
    return {
        "table": resolved.recipe, "row": cell.row, "scale": resolved.scale, "seed": cell.seed,
        "folder": str(cell.folder), "decides": training.decides,
        "state": state if result is None else "finished" if training.finished else "other",
        "step": step, "steps": saved.get("total_steps"), "seconds": result and result.get("wall_seconds"),
    }  # fmt: skip


def in_lines(content: Mapping[str, Any], cores: int) -> Iterator[str]:
    """A listing for people, a line for each training."""
    states = content["trainings"]
    for one in states:
        at = f" at step {one['step']:,}" if one["state"] in ("running", "stopped") else ""
        took = f"  {duration(one['seconds'])}" if one["seconds"] else ""
        yield f"{one['state'] + at:<24} {one['table']} {one['row']} seed {one['seed']}  {one['folder']}{took}"
    done, left = sum(one["state"] in _DONE for one in states), content["seconds_left"]
    rest = f", about {duration(left)} left on {cores} core{'s' * (cores > 1)}" if left else ""
    yield f"{done} of {len(states)} finished{rest}"


# -- training ---------------------------------------------------------------------------------------------------------


def cores_for(number: int) -> list[int]:
    """`number` of the cores that this process may use; InputError if it has fewer."""
    if os.name != "posix":
        raise InputError(
            "queue: its trainings are stopped by signals that Windows does not have; work in WSL, or call "
            "`fullrank train` for each"
        )
    own = usable_cores()
    if number > len(own):
        raise InputError(f"--cores {number}: this process may use {len(own)}; give at most that many")
    return own[:number]


async def _start(training: Training, core: int) -> Process:
    """Start a training on a core, at low priority. In a group of its own Ctrl-C does not reach it: the queue stops it, once."""
    process = await asyncio.create_subprocess_exec(
        *python_command(training.command), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )  # fmt: skip
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {core})
        os.setpriority(os.PRIO_PROCESS, process.pid, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    return process


async def train_all(
    planned: Sequence[Training],
    cores: Sequence[int],
    finished: Callable[[Path], None],
    say: Say = print,
    progress: Say | None = None,
) -> None:
    """Train what is not finished, one training on each core at a time; `finished` is called with the folder of each run.

    progress: hears which training begins and which is finished, in place of `say`.
    TrainingsFailed at the end if any did. Interrupted: SIGINT or SIGTERM; every training has saved its state. SIGTSTP
    (Ctrl-Z) pauses the queue with its trainings.
    """
    progress = progress or say
    waiting, running = deque(enumerate(planned, start=1)), set[Process]()
    failed, stopped = list[tuple[Training, str]](), list[str]()

    def send(number: signal.Signals) -> None:
        for process in running:
            if process.returncode is None:
                process.send_signal(number)

    def stop(number: signal.Signals) -> None:
        stopped.append(number.name)
        waiting.clear()
        send(signal.SIGTERM)

    def pause() -> None:
        send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        send(signal.SIGCONT)

    async def work(core: int) -> None:
        while waiting:
            number, training = waiting.popleft()
            if training.recorded:
                continue
            if not training.finished:
                process = await _start(training, core)
                running.add(process)
                if stopped:
                    process.terminate()
                progress(f"{number} of {len(planned)}: {training}, {training.cell.folder}, process {process.pid}")
                output, _ = await process.communicate()
                running.remove(process)
                if process.returncode != 0:
                    failed.append((training, output.decode("utf-8", errors="replace")))
                    say(f"failed: {training}, exit status {process.returncode}")
                    for line in failed[-1][1].splitlines()[-_LAST_LINES:]:
                        say(f"  {line}")
                    continue
                progress(f"finished: {training}")
            finished(training.cell.folder)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGTSTP, pause)
    try:
        await asyncio.gather(*map(work, cores))
    finally:
        send(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in running))
    if stopped:
        raise Interrupted(f"stopped by {stopped[0]}; what was running has saved its state")
    if failed:
        names = "; ".join(str(training) for training, _ in failed)
        outputs = {training.cell.folder: output for training, output in failed}
        raise TrainingsFailed(f"{len(failed)} of {len(planned)} trainings failed: {names}", outputs)
