"""The road of fine-tuning: task files -> claim the folder -> encoder, batches -> fit -> figures -> result.json

It is that of every run (`tasks.run`) but for the model, which is somebody else's: pretrained, with our attention grafted in.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.recipe import Resolved
from fullrank.experiments.environment import environment
from fullrank.experiments.pretrained import MINILM, Pretrained
from fullrank.experiments.run_folder import check_place, claim, finished_result, open_finetuning
from fullrank.files import write_json
from fullrank.kernels import kernel
from fullrank.training.checkpoint import load_weights
from fullrank.training.device import lock_folder, prepare_machine, seed_everything
from fullrank.training.loop import fit
from fullrank.training.observers import make_observers
from fullrank.training.optimizer import Groups, make_optimizer, parameter_groups
from fullrank.training.phases import make_plan
from fullrank.training.schedule import make_schedule
from fullrank.training.values import Batches, Evaluate, Objective

Say = Callable[[str], None]


class TaskData(Protocol):
    """The read files of a task; `sha256` of each split identifies them."""

    @property
    def sha256(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class FineParts:
    """What a task puts together for a run.

    measure: final figures of every labelled split, and the files of predictions it writes into a folder.
    metrics: the task's scores; the first one is the headline, by which a checkpoint is the best.
    told: entries of `result.json` that are the task's own.
    """

    batches: Batches
    objective: Objective
    judge: Evaluate
    measure: Callable[[nn.Module, Path], dict[str, Any]]
    metrics: tuple[str, ...]
    told: Mapping[str, Any] = field(default_factory=dict)


class FineTask(Protocol):
    """What differs between GLUE and SQuAD."""

    def read(self, config: FinetuneConfig, say: Say) -> Any:
        """The files of the task, checked: a `TaskData`."""
        ...

    def model(self, config: FinetuneConfig, data: Any) -> Pretrained:
        """The encoder with a fresh output layer."""
        ...

    def parts(self, config: FinetuneConfig, data: Any, pretrained: Pretrained) -> FineParts:
        """Batches, objective and measures."""
        ...


@dataclass(frozen=True)
class _Judging:
    """What the loop reads of the eval section."""

    every_steps: int | None
    every_epochs: float | None
    metric: str


def task_of(config: FinetuneConfig) -> FineTask:
    """The task that a configuration names."""
    if config.data.answers:
        from fullrank.experiments.finetuning_squad import SquadTuning

        return SquadTuning()
    from fullrank.experiments.finetuning_glue import GlueTuning

    return GlueTuning()


def finetune(
    resolved: Resolved[FinetuneConfig],
    folder: Path,
    *,
    kernel_name: str = "auto",
    quiet: bool = False,
    say: Say = print,
) -> dict[str, Any]:
    """Fine-tune what `resolved` says in `folder` (continuing a run that was stopped there) and return its `result.json`."""
    config = absolute(resolved.config)
    task = task_of(config)
    check_place(folder)
    data = task.read(config, say)
    identity = {
        "name": resolved.row or folder.name,
        "recipe": resolved.recipe,
        "row": resolved.row,
        "scale": resolved.scale,
        "paper": resolved.paper,
        "kernel": kernel_name,
        "text": dict(data.sha256),
    }
    with lock_folder(folder, lend=True), kernel(kernel_name):
        if claim(folder, config, identity):
            finished = finished_result(folder)
            if finished is not None:
                say(f"{folder}: already finished")
                return finished
        return _train(config, identity, task, data, folder, quiet)


def resume(folder: Path, *, quiet: bool = False, say: Say = print) -> dict[str, Any]:
    """Go on with the fine-tuning in `folder` exactly where it stopped."""
    config, identity = open_finetuning(folder)
    resolved = Resolved(config, identity["recipe"], identity["row"], identity["scale"], identity["paper"])
    return finetune(resolved, folder, kernel_name=identity.get("kernel", "auto"), quiet=quiet, say=say)


def absolute(config: FinetuneConfig) -> FinetuneConfig:
    """The same files and the same encoder from any working directory."""

    def there(path: str) -> str:
        return str(Path(path).expanduser().resolve())

    data, name = config.data, config.model.pretrained
    folder = there(name) if name != MINILM and Path(name).expanduser().is_dir() else name
    places = {key: there(path) for key in ("dir", "cache") if (path := getattr(data, key)) is not None}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, pretrained=folder),
        data=dataclasses.replace(data, dir=places.get("dir"), cache=places.get("cache")),
    )


def mixing_names(model: nn.Module) -> set[str]:
    """The parameters that were grafted in, by name."""
    return {name for name, _ in model.named_parameters() if ".fullrank." in f".{name}"}


def groups_of(model: nn.Module, weight_decay: float, mixing_scale: float) -> Groups:
    """The usual parameter groups, with mixing parameters in one of their own: another learning rate, and no decay."""
    names = mixing_names(model)
    grafted = {id(p) for name, p in model.named_parameters() if name in names}
    groups: Groups = []
    mixing: list[nn.Parameter] = []
    for group in parameter_groups(model, weight_decay):
        mixing += [p for p in group["params"] if id(p) in grafted]
        groups.append({**group, "params": [p for p in group["params"] if id(p) not in grafted]})
    groups.append({"params": mixing, "weight_decay": 0.0, "scale": mixing_scale})
    return [group for group in groups if group["params"]]


def _train(
    config: FinetuneConfig, identity: dict[str, Any], task: FineTask, data: Any, folder: Path, quiet: bool
) -> dict[str, Any]:
    device = prepare_machine(config.train)
    seed_everything(config.train.seed)  # the output layer is drawn
    pretrained = task.model(config, data)
    model: nn.Module = pretrained.model.to(device)
    parts = task.parts(config, data, pretrained)
    options = config.train.options(parts.batches.batches_per_epoch)
    judging = _Judging(
        config.eval.every_steps,
        # null: once, at the end, which comes by itself
        config.eval.every_epochs or (None if config.eval.every_steps else float(2**31)),
        parts.metrics[0],
    )
    done = fit(
        model,
        objective=parts.objective,
        batches=parts.batches,
        evaluate=parts.judge,
        optimizer=make_optimizer(
            options.optimizer, groups_of(model, options.weight_decay, config.train.mixing_scale), options
        ),
        schedule=make_schedule(options, make_plan(options, judging, parts.batches).total_steps),
        options=options,
        eval_options=judging,
        folder=folder,
        observers=make_observers(
            folder, track=options.track, config=dataclasses.asdict(config), label=str(identity["name"]), quiet=quiet
        ),
    )
    if config.eval.checkpoint == "best" and done.best_step != done.steps:
        load_weights(model, folder / "checkpoints" / "best")
    model.eval()
    final = parts.measure(model, folder)
    names = mixing_names(model)
    parameters = dict(model.named_parameters())
    if config.train.keep_model:
        model.save_pretrained(folder / "model")  # type: ignore[operator]
        pretrained.tokenizer.save_pretrained(folder / "model")
    result = {
        **{key: identity[key] for key in ("name", "recipe", "row", "scale", "paper", "kernel")},
        "kind": "finetuning",
        "seed": options.seed,
        "parameters": {
            "total": sum(p.numel() for p in parameters.values()),
            "mixing": sum(parameters[name].numel() for name in names),
            "fresh": sum(parameters[name].numel() for name in pretrained.fresh if name in parameters),
        },
        "final": final,
        "metrics": list(parts.metrics),
        "checkpoint": config.eval.checkpoint,
        "best": {"step": done.best_step, parts.metrics[0]: done.best_metric},
        **parts.told,
        "sha256": dict(data.sha256),
        "steps": done.steps,
        "epochs": done.epochs,
        "tokens_seen": done.tokens,
        "tokens_per_second": done.tokens_per_second,
        "ms_per_step": done.ms_per_step,
        "wall_seconds": done.seconds,
        "peak_memory_mib": done.peak_memory_mib,
        "environment": {
            **environment(device, options.precision),
            "transformers": importlib.metadata.version("transformers"),
        },
    }
    write_json(folder / "result.json", result)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # with optimizer state: three times the model
    return result
