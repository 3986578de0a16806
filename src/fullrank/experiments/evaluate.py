"""A run measured again: its data, figures of any checkpoint by any protocol, and the mean of its kept checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullrank.core.errors import InputError
from fullrank.evaluation.protocol import Flags
from fullrank.experiments.run import text_task
from fullrank.experiments.run_folder import open_run
from fullrank.experiments.task import EvaluationRequest, Measured, Say
from fullrank.kernels import kernel
from fullrank.training.checkpoint import kept_checkpoints, mean_weights, write_mean
from fullrank.training.device import choose_device


def corpus_of(folder: Path, split: str, say: Say = print) -> Any:
    """The data that the run in `folder` was started on, as they were prepared then, or prepared again.

    Raises InputError if they have no such split, or if a vocabulary or that split is not what it was.
    """
    config, identity = open_run(folder)
    prepared = text_task(config).prepare(config, identity, True, say)
    splits: dict[str, str] = dict(prepared.identity["text"])
    if split not in splits:
        raise InputError(f"--split: '{split}' is not a split; {prepared.label} has {', '.join(splits)}")
    if prepared.identity["vocabulary"] != identity["vocabulary"]:
        raise InputError(
            f"{folder} was trained with another vocabulary than {prepared.label} has now; has the text changed?"
        )
    if splits[split] != identity["text"].get(split):
        raise InputError(f"the {split} text of {prepared.label} is not the one that {folder} was started with")
    return prepared.corpus


def evaluate(
    folder: Path,
    split: str,
    *,
    checkpoint: str = "best",
    flags: Flags | None = None,
    search: Mapping[str, Any] | None = None,
    device_name: str = "auto",
    kernel_name: str = "auto",
    say: Say = print,
) -> dict[str, Any]:
    """Figures of the run in `folder` on a split, by the protocol that it was measured by.

    flags: changes of the protocol of language models. search: changes of the search for translations (`translate.Search`).
    """
    config, _ = open_run(folder)
    task = text_task(config)
    corpus = corpus_of(folder, split, say)
    device = choose_device(device_name, "--device")
    request = EvaluationRequest(split, checkpoint, flags, search)
    with kernel(kernel_name):
        measured: Measured = task.measure(config, corpus, folder, request, device)
    return {
        "run": str(folder),
        "split": split,
        **measured.figures,
        "protocol": measured.protocol,
        "protocol_settings": measured.protocol_settings,
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
    if last is not None and last < 1:
        raise InputError(f"--last: at least 1 checkpoint, given {last}")
    checkpoints = folder / "checkpoints"
    kept = kept_checkpoints(checkpoints)
    if not kept:
        raise InputError(
            f"{folder} keeps no checkpoints to average; train with train.keep_checkpoints: {last or 5} to keep the last ones"
        )
    if last is not None and len(kept) < last:
        raise InputError(
            f"{folder} keeps {len(kept)} checkpoint{'s' * (len(kept) > 1)} to average (steps {', '.join(map(str, kept))}), "
            f"--last asks for {last}; lower it, or train with train.keep_checkpoints: {last}"
        )
    steps = list(kept)[-last:] if last else list(kept)
    target = write_mean(checkpoints, name, mean_weights([kept[step] for step in steps]), steps)
    return {"run": str(folder), "checkpoint": name, "steps": steps, "folder": str(target)}
