"""The road of every run, whatever its task: text, folder, training, figures.

prepare text -> claim the folder -> model, objective, batches -> fit -> measure best and last -> result.json
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fullrank.analysis.size import parameters_by_part
from fullrank.config.recipe import Resolved
from fullrank.config.run import RunConfig
from fullrank.experiments.environment import environment
from fullrank.experiments.run_folder import absolute, check_place, claim, finished_result, is_run, open_run
from fullrank.files import write_json
from fullrank.kernels import kernel
from fullrank.training.device import lock_folder, prepare_machine, seed_everything
from fullrank.training.loop import fit
from fullrank.training.observers import make_observers
from fullrank.training.optimizer import make_optimizer, parameter_groups
from fullrank.training.phases import make_plan
from fullrank.training.schedule import make_schedule
from fullrank.training.values import Batches, Evaluate, Objective

Say = Callable[[str], None]


@dataclass(frozen=True)
class Text:
    """The prepared text of a run. `vocabulary` and `sha256` of every split identify it; `keep` writes its tokenizers."""

    corpus: Any
    folder: Path
    vocabulary: str
    sha256: Mapping[str, str]
    keep: Callable[[Path], None]


@dataclass(frozen=True)
class Parts:
    """What a task puts together for a run.

    judge: the evaluation while training. measure: final figures of every split, of the checkpoint that is named.
    judged: what `result.json` says of the judging protocol; told: the entries of `result.json` that are the task's own.
    """

    model: nn.Module
    objective: Objective
    batches: Batches
    judge: Evaluate
    measure: Callable[[str], dict[str, Any]]
    judged: Mapping[str, Any]
    told: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """What differs between language modelling, translation and other kinds of runs."""

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError for faults that are known before any work."""

    def text(self, config: RunConfig, known: Mapping[str, Any], allow_slice: bool, say: Say) -> tuple[RunConfig, Text]:
        """The prepared text, that of the run that is `known` if it is still there; and `config` with vocabulary sizes."""
        ...

    def parts(self, config: RunConfig, corpus: Any, folder: Path, device: torch.device) -> Parts:
        """Model, objective, batches and measures of a run."""
        ...


def task_of(config: RunConfig) -> Task:
    """The task that a configuration describes."""
    if config.translates:
        from fullrank.experiments.translation import Translation

        return Translation()
    if config.masks:
        from fullrank.experiments.masked_modeling import MaskedModeling

        return MaskedModeling()
    from fullrank.experiments.language_modeling import LanguageModeling

    return LanguageModeling()


def train(
    resolved: Resolved[RunConfig], folder: Path, *, kernel_name: str = "auto", quiet: bool = False, say: Say = print
) -> dict[str, Any]:
    """Train what `resolved` says in `folder` (continuing a run that was stopped there) and return its `result.json`."""
    config = dataclasses.replace(resolved.config, data=absolute(resolved.config.data))
    task = task_of(config)
    task.check(config)
    check_place(folder)
    known = open_run(folder)[1] if is_run(folder) else {}
    config, text = task.text(config, known, resolved.scale != "paper", say)
    identity = {
        "name": resolved.row or folder.name,
        "recipe": resolved.recipe,
        "row": resolved.row,
        "scale": resolved.scale,
        "paper": resolved.paper,
        "kernel": kernel_name,
        "vocabulary": text.vocabulary,
        "text": dict(text.sha256),
        "prepared": str(text.folder.resolve()),
    }
    with lock_folder(folder, lend=True), kernel(kernel_name):
        if claim(folder, config, identity):
            finished = finished_result(folder)
            if finished is not None:
                say(f"{folder}: already finished")
                return finished
        text.keep(folder)
        if config.remark is not None:
            say(f"{folder}: its perplexity is {config.remark}")
        return _train(config, identity, task, text.corpus, folder, quiet)


def resume(folder: Path, *, quiet: bool = False, say: Say = print) -> dict[str, Any]:
    """Go on with the run in `folder` exactly where it stopped."""
    config, identity = open_run(folder)
    resolved = Resolved(config, identity["recipe"], identity["row"], identity["scale"], identity["paper"])
    return train(resolved, folder, kernel_name=identity.get("kernel", "auto"), quiet=quiet, say=say)


def _train(
    config: RunConfig, identity: dict[str, Any], task: Task, corpus: Any, folder: Path, quiet: bool
) -> dict[str, Any]:
    options = config.train
    device = prepare_machine(options)
    seed_everything(options.seed)
    parts = task.parts(config, corpus, folder, device)
    model = parts.model
    done = fit(
        model,
        objective=parts.objective,
        batches=parts.batches,
        evaluate=parts.judge,
        optimizer=make_optimizer(options.optimizer, parameter_groups(model, options.weight_decay), options),
        schedule=make_schedule(options, make_plan(options, config.eval, parts.batches).total_steps),
        options=options,
        eval_options=config.eval,
        folder=folder,
        observers=make_observers(
            folder, track=options.track, config=dataclasses.asdict(config), label=str(identity["name"]), quiet=quiet
        ),
    )
    final = parts.measure("best")
    last = final if done.best_step == done.steps else parts.measure("last")
    counts = parameters_by_part(model)
    result = {
        **{key: identity[key] for key in ("name", "recipe", "row", "scale", "paper", "kernel")},
        "seed": options.seed,
        "parameters": counts,
        "mixing_parameters": counts["mixing"],
        "final": final,
        "last": last,
        "best": {
            "step": done.best_step,
            "nll": done.best_nll,
            config.eval.metric: done.best_metric,
            **parts.judged,
        },
        **parts.told,
        "steps": done.steps,
        "epochs": done.epochs,
        "tokens_seen": done.tokens,
        "stopped_early": done.stopped_early,
        "tokens_per_second": done.tokens_per_second,
        "ms_per_step": done.ms_per_step_by_phase,
        "wall_seconds": done.seconds,
        "peak_memory_mib": done.peak_memory_mib,
        "environment": environment(device, options.precision),
    }
    write_json(folder / "result.json", result)
    return result
