"""The one way from a configuration to a result, whatever its task (`task.Task`).

prepare the data -> claim the folder -> model, objective, batches -> fit -> measure best and last -> result.json
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fullrank
from fullrank.config.finetune import FinetuneConfig
from fullrank.config.recipe import Resolved
from fullrank.config.run import RunConfig
from fullrank.experiments.finetuning import GlueTuning
from fullrank.experiments.language_model import LanguageModelTask
from fullrank.experiments.masked_model import MaskedModelTask
from fullrank.experiments.run_folder import absolute, check_usable, claim, finished_result, is_run, open_any
from fullrank.experiments.squad import SquadTuning
from fullrank.experiments.task import Prepared, Say, Task, TextTask
from fullrank.experiments.translation import TranslationTask
from fullrank.files import write_json
from fullrank.kernels import kernel
from fullrank.training.device import lock_folder, prepare_machine, seed_everything
from fullrank.training.loop import fit
from fullrank.training.observers import make_observers
from fullrank.training.optimizer import make_optimizer, make_schedule
from fullrank.training.phases import make_plan

TEXT_TASKS: dict[str, TextTask[Any]] = {
    "language_model": LanguageModelTask(),
    "masked_model": MaskedModelTask(),
    "translation": TranslationTask(),
}


def text_task(config: RunConfig) -> TextTask[Any]:
    """The task of a run with a model of ours."""
    return TEXT_TASKS[config.task]


def task_of(config: RunConfig | FinetuneConfig) -> Task[Any, Any]:
    """The task of a configuration."""
    if isinstance(config, FinetuneConfig):
        return SquadTuning() if config.data.answers else GlueTuning()
    return text_task(config)


def train(
    resolved: Resolved[RunConfig | FinetuneConfig],
    folder: Path,
    *,
    kernel_name: str = "auto",
    quiet: bool = False,
    say: Say = print,
) -> dict[str, Any]:
    """Train the configuration in `folder` (continuing a run that was stopped there) and return its result.json."""
    config = absolute(resolved.config)
    task = task_of(config)
    task.check(config)
    check_usable(folder)
    known = open_any(folder)[1] if is_run(folder) else {}
    prepared = task.prepare(config, known, resolved.scale != "paper", say)
    identity = {
        "name": resolved.row or folder.name,
        "recipe": resolved.recipe,
        "row": resolved.row,
        "scale": resolved.scale,
        "paper": resolved.paper,
        "kernel": kernel_name,
        **prepared.identity,
    }
    with lock_folder(folder, lend=True), kernel(kernel_name):  # the kernel of a run is chosen here and nowhere else
        if claim(folder, prepared.config, identity):
            finished = finished_result(folder)
            if finished is not None:
                say(f"{folder}: already finished")
                return finished
        prepared.save(folder)
        if isinstance(config, RunConfig) and config.remark is not None:
            say(f"{folder}: its perplexity is {config.remark}")
        return _train(task, prepared, identity, folder, quiet)


def resume(folder: Path, *, quiet: bool = False, say: Say = print) -> dict[str, Any]:
    """Resume the run in `folder` exactly where it stopped."""
    config, identity = open_any(folder)
    resolved = Resolved(config, identity["recipe"], identity["row"], identity["scale"], identity["paper"])
    return train(resolved, folder, kernel_name=identity.get("kernel", "auto"), quiet=quiet, say=say)


def _train(
    task: Task[Any, Any], prepared: Prepared[Any, Any], identity: dict[str, Any], folder: Path, quiet: bool
) -> dict[str, Any]:
    config = prepared.config
    device = prepare_machine(config.train)
    seed_everything(config.train.seed)
    parts = task.parts(config, prepared.corpus, folder, device)
    options = parts.options
    done = fit(
        parts.model,
        objective=parts.objective,
        batches=parts.batches,
        evaluate=parts.evaluate,
        optimizer=make_optimizer(options.optimizer, parts.groups, options),
        schedule=make_schedule(options, make_plan(options, parts.eval_options, parts.batches).total_steps),
        options=options,
        eval_options=parts.eval_options,
        folder=folder,
        observers=make_observers(
            folder, track=options.track, config=config.to_dict(), label=str(identity["name"]), quiet=quiet
        ),
    )
    result = {
        **{key: identity[key] for key in ("name", "recipe", "row", "scale", "paper", "kernel")},
        "seed": options.seed,
        "ms_per_step": done.ms_per_step_by_phase,
        **parts.result(done),
        "steps": done.steps,
        "epochs": done.epochs,
        "tokens_seen": done.tokens,
        "stopped_early": done.stopped_early,
        "tokens_per_second": done.tokens_per_second,
        "wall_seconds": done.seconds,
        "peak_memory_mib": done.peak_memory_mib,
        "environment": {**environment(device, options.precision), **parts.versions},
    }
    write_json(folder / "result.json", result)
    return result


# -- versions and hardware -------------------------------------------------------------------------------------------


def environment(device: torch.device, precision: str) -> dict[str, Any]:
    """The machine and the software of a result: versions, hardware, precision, commit."""
    return {
        "fullrank": fullrank.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": precision,
    }


def _processor() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """The commit of the package's own checkout, with `+changes` if it has any; None outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if git("ls-files", Path(__file__).name) == "":
            return None  # installed into somebody else's repository
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
