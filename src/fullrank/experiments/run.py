"""Runs: trained, resumed, measured again, averaged, and the rows of a table one after another, whatever their task.

prepare the data -> claim the folder -> model, objective, batches -> fit -> measure best and last -> result.json
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fullrank
from fullrank.comparison.runs import find_runs
from fullrank.config.finetune import FinetuneConfig
from fullrank.config.recipe import Resolved, chosen_rows, load, resolve_any, shipped
from fullrank.config.run import DynamicConfig, RunConfig
from fullrank.config.training import read_budget
from fullrank.core.errors import InputError
from fullrank.data import encode_file, load_tokenizer
from fullrank.data.prepared import Corpus, check_sources
from fullrank.evaluation.perplexity import EvaluationProtocol, Flags
from fullrank.experiments.finetuning import Finetuning
from fullrank.experiments.language_model import LanguageModelTask, MaskedModelTask
from fullrank.experiments.rules import settle
from fullrank.experiments.run_folder import (
    absolute,
    check_usable,
    claim,
    default_folder,
    finished_result,
    finished_trainings,
    open_any,
    open_run,
    started,
    take_over,
    teacher_of,
    training_of,
    whose_training,
    with_own_cache,
)
from fullrank.experiments.task import WRITES_FROM, Prepared, Say, Task, TextTask
from fullrank.experiments.translation import TranslationTask
from fullrank.files import sha256_of, silent, visible, write_json
from fullrank.kernels import available, chosen, kernel
from fullrank.seal import DamagedError, is_run, read_record, seal_run
from fullrank.storage import find
from fullrank.training.checkpoint import kept_checkpoints, load_weights, mean_weights, write_mean
from fullrank.training.device import choose_device, lock_folder, prepare_machine
from fullrank.training.distributed import all_gather, main_process_first, process_group, rank, shard, world_size
from fullrank.training.loop import fit
from fullrank.training.observers import make_observers
from fullrank.training.optimizer import make_optimizer, make_schedule
from fullrank.training.phases import make_plan
from fullrank.training.randomness import seed_everything
from fullrank.training.values import Observer

TEXT_TASKS: dict[str, TextTask[Any, Any, Any]] = {
    "language_model": LanguageModelTask(),
    "masked_model": MaskedModelTask(),
    "translation": TranslationTask(),
}


def task_of(config: RunConfig | FinetuneConfig) -> Task[Any, Any]:
    """The task of a configuration."""
    if isinstance(config, FinetuneConfig):
        return Finetuning()
    return TEXT_TASKS[config.task]


def with_vocabulary(config: RunConfig, say: Say) -> RunConfig:
    """`config` with the sizes of vocabularies that it leaves to its data, which are prepared for it."""
    if config.model.vocab_size is not None:
        return config
    sized: RunConfig = TEXT_TASKS[config.task].prepare(config, {}, True, say).config
    return sized


def train(
    resolved: Resolved[RunConfig | FinetuneConfig],
    folder: Path,
    *,
    kernel_name: str = "auto",
    quiet: bool = False,
    say: Say = print,
    trained: Mapping[str, Path] | None = None,
    until: int | None = None,
    after: Path | None = None,
) -> dict[str, Any]:
    """Train the configuration in `folder` (continuing a run that was stopped there) and return its result.json.

    trained: finished runs (`finished_trainings`). Where one of them has this very training, it is taken over, and the model is
    measured as this configuration says. until: pause after this update; nothing is measured then, and the result is empty.
    after: the finished run that this one goes on with (`run_folder.continuation`).
    """
    resolved = started(resolved)
    config = absolute(resolved.config)
    task_of(config).check(config)
    device = prepare_machine(config.train)
    with process_group(device), ExitStack() as exits:
        with main_process_first():
            start = _begin(config, resolved, folder, kernel_name, say, trained or {}, exits, after)
        if all_gather(isinstance(start, dict))[0]:
            return start if isinstance(start, dict) else {}
        assert not isinstance(start, dict)
        return _train(start, folder, device, quiet=quiet, until=until, say=say)


@dataclass(frozen=True)
class _Start:
    """A run whose folder and data are ready."""

    prepared: Prepared[Any, Any]
    identity: Mapping[str, Any]
    task: Task[Any, Any]


def _begin(
    config: RunConfig | FinetuneConfig,
    resolved: Resolved[RunConfig | FinetuneConfig],
    folder: Path,
    kernel_name: str,
    say: Say,
    trained: Mapping[str, Path],
    exits: ExitStack,
    after: Path | None,
) -> _Start | dict[str, Any]:
    """Prepare the data and claim the folder, which is locked until `exits` end; the result.json of a run that is finished."""
    task, is_first = task_of(config), rank() == 0
    say = say if is_first else silent
    check_usable(folder)
    earlier_config, recorded = open_any(folder) if is_run(folder) else (config, {})
    has_trained = (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()
    has_same_text = has_trained or earlier_config.data == config.data  # else a start that failed, on another text
    stated = recorded.get("stated")
    continues = recorded.get("continues") if has_trained or earlier_config == config else None
    origin: Mapping[str, Any] = {}
    if after is not None and continues is None and not has_trained:
        origin = open_any(after)[1]
        continues = {"folder": str(after.resolve()), "steps": (finished_result(after) or {}).get("steps")}
    if isinstance(config, RunConfig) and config.train.budget is not None:
        stated = resolved.stated
        config = _settle_budget(config.train.budget, stated, folder, recorded, kernel_name, say)
    known_data = origin or (recorded if has_same_text else {})
    prepared = task.prepare(config, known_data, resolved.scale != "paper", say)
    if any(origin.get(key) != prepared.identity[key] for key in ("text", "vocabulary") if origin):
        raise InputError(f"{after} was trained on another text or vocabulary than is there now; restore the text")
    if recorded and has_same_text and isinstance(prepared.corpus, Corpus):
        check_sources(prepared.corpus, folder)
    identity = {
        "name": resolved.row or folder.name,
        "recipe": resolved.recipe,
        "row": resolved.row,
        "scale": resolved.scale,
        "paper": resolved.paper,
        "kernel": kernel_name,
        **({} if stated is None else {"stated": stated}),
        **({} if continues is None else {"continues": continues}),
        **prepared.identity,
    }
    if isinstance(config, RunConfig) and config.train.distill is not None:
        identity["teacher"] = recorded.get("teacher") or teacher_of(config.train.distill.run, identity)
    if isinstance(config, RunConfig) and config.train.start is not None:
        weights = sha256_of(find(Path(config.train.start), "best")[0]) if "start" not in recorded else ""
        identity["start"] = recorded.get("start") or {"folder": config.train.start, "sha256": weights}
    has_checkpoint = (folder / "checkpoints" / "last").exists()
    source = None if has_checkpoint or continues else trained.get(training_of(prepared.config, identity))
    identity["training"] = recorded.get("training") if has_checkpoint else None
    if source is not None:
        identity["training"] = whose_training(source)
    if continues and not has_checkpoint:
        source = Path(continues["folder"])
        if not source.is_dir():
            raise InputError(f"{folder} goes on with {source}, which is not there; restore it, or delete {folder}")
    start = _Start(prepared, identity, task)
    if not is_first:
        return start
    exits.enter_context(lock_folder(folder))
    if claim(folder, prepared.config, identity):
        result = finished_result(folder)
        if result is not None:
            say(f"{folder}: already finished")
            return result
        _check_engines(folder, say)
    else:
        prepared.save(folder)
    if source is not None:
        take_over(source, folder, prepared.config, goes_on=continues is not None)
        if continues:
            say(f"{folder}: goes on from {source} after update {continues['steps']}, with all of its state")
        else:
            say(f"{folder}: trained already as {source}; only its figures are measured")
    if isinstance(config, RunConfig) and config.remark is not None:
        say(f"{folder}: its perplexity is {config.remark}")
    return start


def _check_engines(folder: Path, say: Say) -> None:
    """Say so if this machine lacks a kernel that the last checkpoint names."""
    with suppress(DamagedError):
        engines = read_record(folder / "checkpoints" / "last").state["engines"]
        if lacking := [name for name in engines if not available(name)]:
            say(
                f"{folder}: its attention was computed by the kernel {' and '.join(lacking)}, which this machine lacks (see "
                "`--kernel`); another one goes on, and the last digits may differ"
            )


def _settle_budget(
    text: int | str,
    stated: Mapping[str, Any] | None,
    folder: Path,
    recorded: Mapping[str, Any],
    kernel_name: str,
    say: Say,
) -> RunConfig:
    """Configuration by the rules of `train.budget` and the stated keys; of a run that has begun, the one it began with."""
    budget = read_budget(str(text))
    assert budget is not None
    if stated is None:
        raise InputError("train.budget: the rules need to know which keys are stated; give a YAML file, or train.steps")
    if recorded.get("stated") == stated:
        return open_run(folder)[0]
    if budget.seconds is not None and world_size() > 1:
        raise InputError(f"train.budget: a time is measured for one process, here are {world_size()}; give tokens")
    with kernel(kernel_name):
        settled = settle(stated, budget, TEXT_TASKS, say)
    for line in settled.table():
        say(line)
    config = absolute(settled.config)
    assert isinstance(config, RunConfig)
    return config


class _Samples(Observer):
    """Show a continuation of validation text after every evaluation, through the observer that shows the progress."""

    def __init__(self, task: Any, model: nn.Module, corpus: Any, shown_by: Observer) -> None:
        self.task, self.model, self.corpus, self.shown_by = task, model, corpus, shown_by

    def record(self, line: Mapping[str, Any]) -> None:
        if line.get("split") != "valid" or line["step"] < WRITES_FROM:
            return
        written = self.task.sample(self.model, self.corpus)
        if written is not None:
            self.shown_by.notice(f"{written['prompt']} [...] {visible(written['text'].strip())}")


def _train(
    start: _Start, folder: Path, device: torch.device, *, quiet: bool, until: int | None, say: Say
) -> dict[str, Any]:
    """Train and measure a run that has begun; the first of several processes writes its result.json."""
    prepared, identity, is_first = start.prepared, start.identity, rank() == 0
    with kernel(identity["kernel"]), chosen() as engines:  # the kernel of a run is chosen here and nowhere else
        seed_everything(prepared.config.train.seed)
        parts = start.task.parts(prepared, folder, device)
        options, settings = parts.options, prepared.config.to_dict()
        if is_first and parts.remark:
            say(parts.remark)
        if "start" in identity and not (folder / "checkpoints" / "last").exists():
            load_weights(parts.model, Path(options.start or "") / "checkpoints" / "best")
        if options.sharding == "fsdp" and world_size() > 1:
            shard(parts.model, options)
        observers = []
        if is_first:
            label = visible(str(identity["name"]))
            bits = None
            is_text = isinstance(prepared.corpus, Corpus) and not prepared.corpus.has_pairs
            if is_text and not prepared.config.masks:
                bits = {"byte": "bits/byte", "character": "bits/char"}.get(prepared.corpus.tokenizer.kind)
            observers = make_observers(
                folder, track=options.track, config=settings, label=label, bits=bits, quiet=quiet
            )
            if getattr(parts.eval_options, "sample", False) and not quiet and world_size() == 1:
                observers.append(_Samples(start.task, parts.model, prepared.corpus, observers[0]))
        done = fit(
            parts.model,
            objective=parts.objective,
            batches=parts.batches,
            evaluate=parts.evaluate,
            optimizer=make_optimizer(options.optimizer, parts.groups(), options),
            schedule=make_schedule(options, make_plan(options, parts.eval_options, parts.batches).total_steps),
            options=options,
            eval_options=parts.eval_options,
            folder=folder,
            seal=seal_run(folder, settings),
            observers=observers,
            locked=True,
            until=until,
            engines=engines if identity["kernel"] == "auto" else {identity["kernel"]},
        )
        if until is not None:
            return {}
        result = {
            **{key: identity[key] for key in ("name", "recipe", "row", "scale", "paper", "kernel", "training")},
            "seed": options.seed,
            "ms_per_step": done.ms_per_step_by_phase,
            **parts.result(done),
            **{key: identity[key] for key in ("continues", "start") if key in identity},
            "steps": done.steps,
            "epochs": done.epochs,
            "tokens_seen": done.tokens,
            "stopped_early": done.stopped_early,
            "tokens_per_second": done.tokens_per_second,
            "wall_seconds": done.seconds,
            "peak_memory_mib": done.peak_memory_mib,
            "environment": {**environment(device, options.precision), "engines": done.engines, **parts.versions},
        }
        if is_first:
            write_json(folder / "result.json", result)
            if isinstance(prepared.config, FinetuneConfig):  # optimizer states take three times the room of the model
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result


def resume(folder: Path, *, quiet: bool = False, say: Say = print, until: int | None = None) -> dict[str, Any]:
    """Resume the run in `folder` exactly where it stopped. until: as in `train`."""
    config, identity = open_any(folder)
    recipe = identity.get("recipe") or folder.name
    resolved = Resolved(config, recipe, *(identity.get(key) for key in ("row", "scale", "paper")))
    return train(resolved, folder, kernel_name=identity.get("kernel", "auto"), quiet=quiet, say=say, until=until)


def corpus_of(folder: Path, split: str, say: Say = print) -> Any:
    """The data that the run in `folder` was started on, as they were prepared then, or prepared again.

    Raises InputError if they have no such split, or if a vocabulary or that split is not what it was.
    """
    config, identity = open_run(folder)
    prepared = TEXT_TASKS[config.task].prepare(with_own_cache(config), identity, True, say)
    splits: dict[str, str] = dict(prepared.identity["text"])
    if split not in splits:
        raise InputError(f"--split: '{split}' is not a split; {prepared.label} has {', '.join(splits)}")
    if prepared.identity["vocabulary"] != identity.get("vocabulary"):
        raise InputError(
            f"{folder} was trained with another vocabulary than {prepared.label} has now; has the text changed?"
        )
    if splits[split] != (identity.get("text") or {}).get(split):
        raise InputError(f"the {split} text of {prepared.label} is not the one that {folder} was started with")
    return prepared.corpus


def evaluate(
    folder: Path,
    split: str,
    *,
    text: Path | None = None,
    checkpoint: str = "best",
    flags: Flags | None = None,
    dynamic: DynamicConfig | None = None,
    search: Mapping[str, Any] | None = None,
    device_name: str = "auto",
    kernel_name: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Figures of the run in `folder` on a split, or on the file `text`, by the protocol that it was measured by.

    dynamic: figures of dynamic evaluation, too, under `final_dynamic`.
    flags: changes of the protocol of language models. search: changes of the search for translations (`translate.Search`).
    """
    config = open_run(folder)[0]
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, dynamic=dynamic))
    device, task = choose_device(device_name, "--device"), TEXT_TASKS[config.task]
    if flags is not None and flags.batch_size is not None:
        evaluation = dataclasses.replace(config.eval, batch_size=flags.batch_size)
        config = dataclasses.replace(config, eval=evaluation)
    with kernel(kernel_name), ExitStack() as stack:
        protocol = task.protocol(config, search if config.translates else flags, split)
        searches = isinstance(protocol, EvaluationProtocol) and protocol.temperature_chosen
        others = ("train", "valid") if dynamic else ("valid",) if searches else ()
        read_splits = (*others, split) if text is None else others  # each is what it was when the run began
        corpora = [corpus_of(folder, name, say) for name in read_splits]
        model = task.model.load(folder, checkpoint).to(device)
        if searches:
            protocol = task.settled(Prepared(config, corpora[0], corpora[0].label, {}), model, protocol)
        if text is None:
            corpus = corpora[-1]
        else:
            ids_folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            corpus, split = encode_file(text, load_tokenizer(folder), ids_folder, say), "text"
        data = Prepared(config, corpus, corpus.label, {})
        figures = task.figures(data, model, split, protocol) | task.apart(data, model, {split: protocol})
    settings = dataclasses.asdict(protocol)
    read, trained = settings.get("segment_length", 0), config.train.segment_length
    if read > trained and not settings.get("memory_length"):
        say(f"warning: segments of {read} tokens, but the model was trained on {trained} and may not go further")
    return {
        "run": str(folder),
        "split": split,
        **figures,
        **({"remark": config.remark} if config.masks else {}),
        "protocol": protocol.in_words(),
        "protocol_settings": settings,
        "checkpoint": checkpoint,
        "corpus": corpus.label,
        "kernel": kernel_name,
    }


def average(folder: Path, *, last: int | None = None, name: str = "average") -> dict[str, Any]:
    """Average the weights of the last `last` kept checkpoints of the run in `folder` (None: all of them).

    The mean of every tensor, added up in fp64, is written to `checkpoints/<name>`, where `--checkpoint <name>` finds it.
    Raises InputError without a run, or where it keeps fewer checkpoints.
    """
    open_run(folder)
    kept = kept_checkpoints(folder / "checkpoints")
    number = len(kept) if last is None else last
    if not 0 < number <= len(kept):
        raise InputError(
            f"--last: {folder} keeps {len(kept) or 'no'} checkpoints to average, given {last}; give a number of them, or train "
            f"with train.keep_checkpoints: {last or 5} to keep more"
        )
    steps = list(kept)[-number:]
    mean = mean_weights([kept[step] for step in steps])
    target = write_mean(folder / "checkpoints", name, mean, steps, read_record(kept[steps[-1]]).run)
    return {"run": str(folder), "checkpoint": name, "steps": steps, "folder": str(target)}


# -- rows and seeds of a table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run of a table: a row with a seed, and its folder."""

    resolved: Resolved[RunConfig | FinetuneConfig]
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def row(self) -> str:
        """The row; of a single configuration the name of its data."""
        return self.resolved.row or self.resolved.config.data.name

    @property
    def seed(self) -> int:
        return self.resolved.config.train.seed


def cells(
    name: str,
    rows: Sequence[str] | None = None,
    scale: str | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    *,
    of_paper: bool = False,
    out: Path | None = None,
) -> list[Cell]:
    """The runs of a recipe: all rows of a seed, then the next seed, so that finished rows can be compared early.

    rows: None is the first one, or a single configuration; `all` is each. seeds: None is the configuration's own; with
    `of_paper` those that the recipe states, at paper scale. out: the folder of the runs, in place of `runs/RECIPE`.
    Raises InputError for an unknown recipe, row or scale, and for a seed given twice.
    """
    every = rows is not None and list(rows) == ["all"]
    wanted = [] if rows is None else chosen_rows([name], None if every else rows)[name]
    if seeds is not None and any(text.partition("=")[0].strip() == "train.seed" for text in overrides):
        raise InputError("train.seed: --seeds says which seeds are trained; give one of the two")
    by_row: dict[str | None, Sequence[int | None]] = dict.fromkeys(wanted or (None,), seeds or (None,))
    if of_paper and seeds is None and scale in (None, "paper"):
        by_row = {row: load(name).seeds_of(row) or (None,) for row in wanted}
    planned = []
    for number in range(max(map(len, by_row.values()))):
        for row, own in by_row.items():
            if number < len(own):
                seed = [] if own[number] is None else [f"train.seed={own[number]}"]
                resolved = resolve_any(name, row, scale, [*seed, *overrides])
                folder = default_folder(resolved)
                planned.append(Cell(resolved, folder if out is None else out / folder.name))
    return planned


def shared_rows(scale: str | None) -> dict[tuple[str, str], list[str]]:
    """For each shipped row whose training is that of others, those others as `recipe row`; by recipe and row."""
    by_training: dict[str, list[tuple[str, str]]] = {}
    for name in shipped():
        recipe = load(name)
        if (scale or "paper") in recipe.scales:
            for row in recipe.rows:
                by_training.setdefault(training_of(resolve_any(name, row, scale).config), []).append((name, row))
    return {
        one: [" ".join(other) for other in alike if other != one]
        for alike in by_training.values()
        for one in alike
        if len(alike) > 1
    }


def reproduce(
    name: str,
    planned: Sequence[Cell],
    *,
    kernel_name: str = "auto",
    quiet: bool = False,
    say: Say = print,
    among: Sequence[Path] = (),
    progress: Say | None = None,
) -> None:
    """Train the runs that are not finished; one that was stopped is resumed.

    progress: hears which run begins, in place of `say`.
    Rows that are one training are trained once, also where that was done by a run in one of the folders `among`.
    """
    folders = [*(run for root in among for run in find_runs(root)), *(cell.folder for cell in planned)]
    trained = finished_trainings(folders) if not all(cell.finished for cell in planned) else {}
    for number, cell in enumerate(planned, start=1):
        remark = (lambda _: None) if cell.finished else say
        if not cell.finished:
            (progress or say)(f"{name}: row {cell.row}, seed {cell.seed} ({number} of {len(planned)}), {cell.folder}")
        # of a finished run, looks whether it is this one
        train(cell.resolved, cell.folder, kernel_name=kernel_name, quiet=quiet, say=remark, trained=trained)
        trained = {**finished_trainings([cell.folder]), **trained}


# -- versions and hardware -------------------------------------------------------------------------------------------


def environment(device: torch.device, precision: str) -> dict[str, Any]:
    """The machine and the software of a result: versions, hardware, precision, commit."""
    return {
        "fullrank": fullrank.__version__,
        "commit": read_commit(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _read_cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_flags": sorted(_CPU_FLAGS & set(_read_cpuinfo("flags").split())),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processes": world_size(),
        "precision": precision,
    }


_CPU_FLAGS = {
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
}  # instructions by which PyTorch and our C++ choose a code path


def _read_cpuinfo(name: str) -> str:
    """The first value of a name in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def read_commit(package: Path) -> str | None:
    """Commit of the checkout of a package, with `+changes` if files of the package have any; None outside a checkout.

    Files beside the package do not count: a queue adds rows to the ledger of its own checkout while it trains.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        if git("ls-files", "__init__.py") == "":
            return None  # installed into somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
