"""Runs: trained, resumed, measured again, averaged, and the rows of a table one after another, whatever their task.

prepare the data -> claim the folder -> model, objective, batches -> fit -> measure best and last -> result.json
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

import fullrank
from fullrank.config.finetune import FinetuneConfig, TextFinetuneConfig
from fullrank.config.load import Resolved
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.core.registry import lookup
from fullrank.core.translator import Translator
from fullrank.data import encode_file, load_tokenizer
from fullrank.data.prepared import Corpus, check_sources
from fullrank.experiments.measure import change_evaluation, warn_of_length
from fullrank.experiments.run_folder import (
    AnyConfig,
    Cell,
    absolute,
    check_usable,
    claim,
    has_begun,
    open_any,
    open_run,
    read_result,
    start_from_run,
)
from fullrank.experiments.task import Task
from fullrank.files import Entries, sha256_of, write_json
from fullrank.kernels import chosen, kernel
from fullrank.seal import read_record, seal_run
from fullrank.storage import find
from fullrank.training.checkpoint import list_kept_checkpoints, load_weights, mean_weights, write_mean
from fullrank.training.device import (
    all_gather,
    choose_device,
    device_of,
    lock_folder,
    main_process_first,
    prepare_machine,
    process_group,
    rank,
    seed_everything,
    shard,
    synchronize,
    world_size,
)
from fullrank.training.loop import Training
from fullrank.training.observers import make_observers
from fullrank.training.optimizer import make_optimizer, parameter_groups
from fullrank.training.values import TrainingPosition

logger = logging.getLogger(__name__)


def task_of(config: AnyConfig) -> Any:
    """Build the task of a configuration; only its own code is imported."""
    if isinstance(config, FinetuneConfig):
        from fullrank.experiments.finetuning import GlueFinetuning, SquadFinetuning

        return SquadFinetuning(config) if config.data.answers else GlueFinetuning(config)
    if isinstance(config, TextFinetuneConfig):
        from fullrank.experiments.text_finetuning import TextFinetuning

        return TextFinetuning(config)
    if config.translates:
        from fullrank.experiments.translation import TranslationTask

        return TranslationTask(config)
    from fullrank.experiments.language_model import LanguageModelTask, MaskedModelTask

    return MaskedModelTask(config) if config.masks else LanguageModelTask(config)


def train(
    resolved: Resolved[AnyConfig],
    folder: Path,
    *,
    kernel_name: str = "auto",
    quiet: bool = False,
    until: int | None = None,
) -> Entries:
    """Train the configuration in a folder, and go on with a run that was stopped there.

    Args:
        resolved: configuration, with what it was resolved from.
        folder: run folder.
        kernel_name: kernel of attention, as for `--kernel`.
        quiet: whether progress is hidden.
        until: update after which training pauses; None for training to the end. Nothing is measured at a pause.

    Returns:
        The result.json of the run; empty at a pause.

    Raises:
        InputError: the folder holds something else, or data or settings do not fit the run.
        RunError: training failed (`Training.fit`), or another process trains in the folder.
        Interrupted: SIGINT or SIGTERM asked for the end.
    """
    resolved = start_from_run(resolved)
    task = task_of(absolute(resolved.config))
    task.check()
    device = prepare_machine(task.config.train)
    result = None
    with process_group(device), ExitStack() as exits:
        with main_process_first():
            prepare_run(task, resolved, folder, kernel_name)
            if rank() == 0:
                exits.enter_context(lock_folder(folder))
                is_known = claim(folder, task.config, task.identity)
                task.save(folder)  # also files that somebody took away
                if is_known and (result := read_result(folder)) is not None:
                    logger.info(f"{folder}: already finished")
        if all_gather(result is not None)[0]:
            return result or {}
        return fit_run(task, folder, device, quiet=quiet, until=until)


def prepare_run(task: Any, resolved: Resolved[AnyConfig], folder: Path, kernel_name: str) -> None:
    """Prepare the data of a run; the identity of the task then says what it is trained on and how.

    Args:
        task: the task, which is changed.
        resolved: configuration, with what it was resolved from.
        folder: run folder.
        kernel_name: kernel of attention, as for `--kernel`.

    Raises:
        InputError: the folder holds files of something else, or a text of the run has changed.
    """
    check_usable(folder)
    recorded = open_any(folder)[1] if has_begun(folder) else {}  # a start that failed may have been on another text
    task.prepare(recorded, allow_slice=resolved.scale != "paper")
    if recorded and isinstance(task.corpus, Corpus):
        check_sources(task.corpus, folder)
    identity = {key: getattr(resolved, key) for key in ("recipe", "row", "scale", "paper")}
    identity = {"name": resolved.row or folder.name, **identity, "kernel": kernel_name, **task.identity}
    if isinstance(task.config, RunConfig):
        options = task.config.train
        if options.parts:
            identity["parts"] = recorded.get("parts") or {
                name: lookup("training_part", name).identify(identity, **settings)
                for name, settings in options.parts.items()
            }
        if options.start is not None:
            identity["start"] = recorded.get("start") or {
                "folder": options.start,
                "sha256": sha256_of(find(Path(options.start), "best")[0]),
            }
    task.identity = identity


def fit_run(task: Any, folder: Path, device: torch.device, *, quiet: bool, until: int | None) -> Entries:
    """Train and measure a run; the first of several processes writes its result.json.

    Args:
        task: the task, prepared.
        folder: run folder.
        device: device of the training.
        quiet: as in `train`.
        until: as in `train`.

    Returns:
        The result.json of the run; empty at a pause.
    """
    config = task.config
    identity = task.identity
    with kernel(identity["kernel"]), chosen() as engines:  # the kernel of a run is chosen here and nowhere else
        seed_everything(config.train.seed)
        task.build(folder, device)
        options = task.options
        settings = config.to_dict()
        if remark := remark_on_precision(options.precision, device):
            logger.warning(remark)
        observers = []
        if rank() == 0:
            label = identity["name"]
            observers = make_observers(
                folder, track=options.track, config=settings, label=label, bits=task.bits, quiet=quiet
            )
        if "start" in identity and not (folder / "checkpoints" / "last").exists():
            load_weights(task.model, Path(options.start or "") / "checkpoints" / "best")
        if options.sharding == "fsdp" and world_size() > 1:
            shard(task.model, options)
        training = Training(
            model=task.model,
            objective=task.objective,
            batches=task.batches,
            evaluate=task.evaluate,
            optimizer=make_task_optimizer(task),
            options=options,
            eval_options=task.eval_options,
            folder=folder,
            seal=seal_run(folder, settings),
            observers=observers,
            engines=engines if identity["kernel"] == "auto" else {identity["kernel"]},
        )
        counters = training.fit(until)
        if until is not None:
            return {}
        result = {
            **{key: value for key, value in identity.items() if key not in ("text", "vocabulary", "prepared")},
            "seed": options.seed,
            "ms_per_step": counters.ms_per_step,
            **task.measure(counters, folder),
            "steps": counters.step,
            "epochs": counters.step / training.plan.steps_per_epoch,
            "tokens_seen": counters.tokens,
            "stopped_early": counters.stopped_early,
            "tokens_per_second": counters.tokens_per_second,
            "wall_seconds": counters.seconds,
            "peak_memory_mib": counters.peak_memory_mib,
            "environment": {
                **environment(device, options.precision),
                "engines": counters.engines,
                **{package: version(package) for package in task.packages},
            },
        }
        if rank() == 0:
            write_json(folder / "result.json", result)
            if isinstance(config, FinetuneConfig):  # optimizer states take three times the room of the model
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result


def make_task_optimizer(task: Any) -> Optimizer:
    """Make the optimizer of a task for its model, which may be in parts on several processes by now."""
    options = task.options
    rates = task.choose_rates(task.model)
    groups = parameter_groups(task.model, options.weight_decay, options.optimizer == "muon", rates)
    return make_optimizer(groups, options)


def corpus_of(folder: Path, split: str) -> Any:
    """Open the data that the run in `folder` was started on, or prepare them again.

    Raises InputError if they have no such split, or if a vocabulary or that split is not what it was.
    """
    config, identity = open_run(folder)
    task = task_of(config).prepare(identity)
    corpus = task.corpus
    splits = task.identity["text"]
    if split not in splits:
        raise InputError(f"--split: '{split}' is not a split; {corpus.label} has {', '.join(splits)}")
    if corpus.vocabulary != identity.get("vocabulary"):
        raise InputError(
            f"{folder} was trained with another vocabulary than {corpus.label} has now; has the text changed?"
        )
    if splits[split] != (identity.get("text") or {}).get(split):
        raise InputError(f"the {split} text of {corpus.label} is not the one that {folder} was started with")
    return corpus


def evaluate(
    folder: Path,
    split: str,
    *,
    text: Path | None = None,
    checkpoint: str = "best",
    device_name: str = "auto",
    kernel_name: str = "auto",
    **changes: Any,
) -> Entries:
    """Measure the run in a folder on a split, or on a text, by the protocol that it was measured by.

    Args:
        folder: run folder.
        split: split of its data.
        text: file that is read in place of the split; None: the split.
        checkpoint: checkpoint of the run.
        device_name: device, as for `--device`.
        kernel_name: kernel of attention, as for `--kernel`.
        **changes: keys of `eval` that are set otherwise.

    Returns:
        Figures, the protocol, and what they were measured with.

    Raises:
        InputError: there is no such run or split, or its data are not what they were.
        ConfigError: `eval` has no such key, or it does not go with the run.
    """
    config = change_evaluation(open_run(folder)[0], changes, split)
    device = choose_device(device_name, "--device")
    task = task_of(config)
    with kernel(kernel_name), tempfile.TemporaryDirectory() as ids_folder:
        protocol = task.protocol(split)
        model = task.model_class.load(folder, checkpoint).to(device)
        if text is None:
            task.corpus = corpus_of(folder, split)
        else:
            task.corpus = encode_file(text, load_tokenizer(folder), Path(ids_folder))
            split = "text"
        figures = task.figures(model, split, protocol)
    warn_of_length(config, protocol)
    return {
        "run": str(folder),
        "split": split,
        **figures,
        **({"remark": config.remark} if config.masks else {}),
        "protocol": protocol.in_words(),
        "protocol_settings": dataclasses.asdict(protocol),
        "checkpoint": checkpoint,
        "corpus": task.corpus.label,
        "kernel": kernel_name,
    }


def average(folder: Path, *, last: int | None = None) -> Entries:
    """Average the weights of the last `last` kept checkpoints of the run in `folder` (None: all of them).

    The mean of every tensor, added up in fp64, is written to `checkpoints/average`, where `--checkpoint average` finds it.
    Raises InputError without a run, or where it keeps fewer checkpoints.
    """
    open_run(folder)
    checkpoints = list_kept_checkpoints(folder / "checkpoints")
    number = len(checkpoints) if last is None else last
    if not 0 < number <= len(checkpoints):
        remark = "" if last is None else f", given {last}"
        raise InputError(
            f"--last: {folder} keeps {len(checkpoints) or 'no'} checkpoints to average{remark}; give a number of them, or "
            f"train with train.keep_checkpoints: {last or 5} to keep more"
        )
    steps = list(checkpoints)[-number:]
    mean = mean_weights([checkpoints[step] for step in steps])
    target = write_mean(folder / "checkpoints", mean, steps, read_record(checkpoints[steps[-1]]).run)
    return {"run": str(folder), "checkpoint": "average", "steps": steps, "folder": str(target)}


# -- rows and seeds of a table ----------------------------------------------------------------------------------------


def reproduce(
    name: str,
    planned: Sequence[Cell],
    *,
    kernel_name: str = "auto",
    quiet: bool = False,
) -> None:
    """Train the runs that are not finished; one that was stopped is resumed.

    Args:
        name: recipe, for the log.
        planned: runs by `cells`, in the order of training.
        kernel_name: kernel of attention, as for `--kernel`.
        quiet: as in `train`.
    """
    for number, cell in enumerate(planned, start=1):
        status = cell.describe()
        if not status["finished"]:
            place = f"{number} of {len(planned)}"
            logger.info(f"{name}: row {status['row']}, seed {status['seed']} ({place}), {cell.folder}")
        # a finished run is not trained again: its folder is compared with this configuration
        train(cell.resolved, cell.folder, kernel_name=kernel_name, quiet=quiet)


# -- versions and hardware -------------------------------------------------------------------------------------------


def environment(device: torch.device, precision: str) -> Entries:
    """Describe the machine and the software of a result: versions, hardware, precision, commit."""
    return {
        "fullrank": fullrank.__version__,
        "commit": read_commit(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": read_cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_flags": sorted(_CPU_FLAGS & set(read_cpuinfo("flags").split())),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processes": world_size(),
        "precision": precision,
    }


# instructions by which PyTorch and our C++ choose a code path
_CPU_FLAGS = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}


def read_cpuinfo(name: str) -> str:
    """Read the first value of a name in /proc/cpuinfo; empty where there is none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def remark_on_precision(precision: str, device: torch.device) -> str:
    """Return a remark where bf16 is slow, as the processor has no products of it; else an empty one."""
    flags = set(read_cpuinfo("flags").split())
    if precision != "bf16" or device.type != "cpu" or not flags or flags & {"avx512_bf16", "amx_bf16"}:
        return ""
    return (
        "train.precision: bf16 takes several times as long as fp32 here, for this processor has no products of bf16 "
        "(avx512_bf16, amx_bf16); set train.precision=fp32, or train on a GPU"
    )


def read_commit(package: Path) -> str | None:
    """Read the commit of the checkout of a package, with `+changes` if files of the package have any.

    None outside a checkout. Files beside the package do not count: a queue adds rows to the ledger of its own checkout
    while it trains.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(package), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):
            return None  # installed into somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


# -- speed of this machine ---------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """Size and speed of a model on this machine.

    parameters: number of all parameters. body: number of those outside of embedding and output layer.
    tokens, step: tokens and seconds of an update. evaluation: seconds of all evaluations.
    """

    parameters: int
    body: int
    tokens: float
    step: float
    evaluation: float


def try_training(config: RunConfig, prepared: Task, evaluations: int) -> Trial:
    """Build the model of a configuration on data that are prepared, and time it.

    Args:
        config: configuration of the training.
        prepared: task with the data.
        evaluations: how many evaluations there are while training.

    Returns:
        Size and speed of the model on this machine.
    """
    task = task_of(config)
    corpus = prepared.corpus
    task.corpus = corpus
    task.config = task.with_sizes()
    task.build(Path(), choose_device(config.train.device))
    step, evaluation = measure_speed(task)
    unit = "pairs" if corpus.has_pairs else "tokens"
    valid, test = (corpus.splits[split][unit] for split in ("valid", "test"))
    final = evaluation * (valid + test) / min(config.eval.max_tokens or valid, valid)
    if isinstance(task.model, Translator):
        from fullrank.experiments.translation import translate_split

        sentences = min(16, valid)
        start = time.perf_counter()
        translate_split(task.model, corpus, "valid", task.protocol(), sentences)
        final += (time.perf_counter() - start) * (valid + test) / sentences
    parameters = dict(task.model.named_parameters())
    body = [p.numel() for name, p in parameters.items() if "embedding." not in name and "output." not in name]
    return Trial(
        parameters=task.model.num_parameters(),
        body=sum(body),
        tokens=sum(task.batches.tokens_of_batches(0)) / task.batches.batches_per_epoch,
        step=step,
        evaluation=final + evaluations * evaluation,
    )


def measure_speed(task: Any, spend: float = 1.0) -> tuple[float, float]:
    """Measure the seconds of an update and of an evaluation while training, after training for about `spend` seconds.

    The model has no memory. Afterwards the weights are worth nothing.
    """
    optimizer = make_task_optimizer(task)
    times: list[float] = []
    task.model.train()
    while len(times) < 4 or (sum(times) < spend and len(times) < 200):
        begin = time.perf_counter()
        index = len(times) % task.batches.batches_per_epoch
        batch = task.batches.batch(0, index)
        loss = task.objective(batch, {}, TrainingPosition(step=len(times) + 1))
        loss.value.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device_of(task.model))
        times.append(time.perf_counter() - begin)
    task.model.eval()
    begin = time.perf_counter()
    with torch.no_grad():
        task.evaluate(task.model)
    return statistics.median(times[1:]), time.perf_counter() - begin
