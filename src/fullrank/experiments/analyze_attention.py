"""Trained models made ready for the analyses of attention: `fullrank analyze spectrum`, `heads` and `mixing`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from fullrank.analysis import (
    AttentionSpectrum,
    Heads,
    LayerMixing,
    ablate,
    deviation_changes,
    heads,
    mixing,
    nats_per_token,
    prune,
    spectrum,
)
from fullrank.config.finetune import FinetuneConfig
from fullrank.core.errors import InputError
from fullrank.data import load_tokenizer
from fullrank.evaluation.statistics import Interval
from fullrank.evaluation.tasks import glue_scores
from fullrank.experiments.analyze import ModelText, Reading, open_models
from fullrank.experiments.finetuning import reopen
from fullrank.experiments.run_folder import open_any
from fullrank.experiments.task import Say
from fullrank.files import write_json
from fullrank.models import load_own
from fullrank.seal import is_run, read_record
from fullrank.training.checkpoint import kept_checkpoints
from fullrank.training.device import choose_device, device_of

_SAMPLES = 400  # test sets that are drawn for an interval
Checkpoints = Sequence[tuple[str, int | None, Sequence[LayerMixing]]]  # names and steps, the earliest first
Figures = TypeVar("Figures")


@dataclass(frozen=True)
class ModelFigures(Generic[Figures]):
    """The figures of one model, over whole segments (1, N) of its text; content: their JSON."""

    read: ModelText
    rows: Sequence[Tensor]
    figures: Figures
    content: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The JSON of one model: where the figures come from, and the figures."""
        return {**self.read.as_dict(), "texts": len(self.rows), **self.content}

    def keep(self, name: str) -> Path:
        """Write the JSON into the run's folder RUN/analysis, where reports and the ledger read it; that folder."""
        folder = self.read.folder / "analysis"
        write_json(folder / f"{name}.json", self.as_dict())
        return folder

    @property
    def in_words(self) -> str:
        """Model, text and segments, in words."""
        read = self.read
        return f"{read.name} ({read.opened.text}): {len(self.rows):,} segments of {read.length:,} tokens"


def _read(names: list[str], reading: Reading, texts: int) -> Iterator[tuple[ModelText, list[Tensor]]]:
    """Each model with the first `texts` whole segments of its text.

    Raises the errors of `open_models`, and InputError for a text shorter than a segment.
    """
    for read in open_models(names, reading):
        rows = read.rows(texts)
        if not rows:
            raise InputError(
                f"{read.opened.text}: no text to read, as it has fewer than {read.length} tokens; give a longer --text"
            )
        yield read, rows


def _plain(figures: object) -> dict[str, Any]:
    """The fields of a dataclass, arrays as lists."""
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(figures).items()}


# -- spectrum ----------------------------------------------------------------------------------------------------------


def measure_spectra(names: list[str], reading: Reading, texts: int) -> list[ModelFigures[AttentionSpectrum]]:
    """The spectrum of each model's attention weights over `texts` segments; figures of a layer are lists over its heads."""
    found = []
    for read, rows in _read(names, reading, texts):
        figures = spectrum(read.opened.model, rows)
        layers = [
            {
                "layer": number,
                "mixed": layer.after is not layer.before,
                "before": _plain(layer.before),
                "after": _plain(layer.after),
            }
            for number, layer in enumerate(figures.layers)
        ]
        found.append(ModelFigures(read, rows, figures, {"weights": figures.weights, "layers": layers}))
    return found


# -- heads -------------------------------------------------------------------------------------------------------------


def measure_heads(name: str, against: str | None, reading: Reading, texts: int) -> list[ModelFigures[Heads]]:
    """The heads of a model, and of a second one beside it; figures of a layer are lists over its heads.

    Raises InputError for a second model with another number of layers.
    """
    found: list[ModelFigures[Heads]] = []
    for read, rows in _read([name] if against is None else [name, against], reading, texts):
        figures = heads(read.opened.model, rows, mask_id=read.opened.mask_id, marks=read.opened.marks)
        changes: list[float | None] = [None] * len(figures.layers)
        if found:
            first = found[0].figures
            if len(first.layers) != len(figures.layers):
                raise InputError(
                    f"--against: has {len(figures.layers)} layers of attention, {name} has {len(first.layers)}; give models "
                    "of one depth"
                )
            changes = deviation_changes(first, figures)
        content = {
            "weights": figures.weights,
            "objective": figures.objective,
            "perplexity": figures.perplexity,
            "nll": figures.nll.tolist(),
            "layers": [
                {
                    "layer": number,
                    "name": figures.names[number],
                    "change": layer.change.tolist(),
                    "intervals": [ends and ends._asdict() for ends in layer.intervals],
                    "deviation": layer.deviation,
                    "deviation_change_percent": changes[number],
                    "redundancy": layer.redundancy,
                    "similarity": layer.similarity.tolist(),
                    "nll": layer.nll.tolist(),
                }
                for number, layer in enumerate(figures.layers)
            ],
        }
        found.append(ModelFigures(read, rows, figures, content))
    return found


def finetunes(name: str) -> bool:
    """True for the folder of a run of fine-tuning."""
    folder = Path(name).expanduser()
    return is_run(folder) and isinstance(open_any(folder)[0], FinetuneConfig)


def measure_task_heads(name: str, *, device: str = "auto", say: Say = print) -> dict[str, Any]:
    """The JSON of the heads of a run of GLUE: its task's metric on the development split, its change without each head.

    Figures of a layer are lists over its heads; intervals: 95 %, of test sets drawn from the examples (paired bootstrap).
    Raises the errors of `reopen`.
    """
    run = reopen(Path(name).expanduser(), say)
    run.model.to(choose_device(device, "--device"))
    labels, metric = run.examples.known_labels(), run.task.metrics[0]
    whole, without = ablate(run.model, run.predictions)
    draws = np.random.default_rng(0).integers(len(labels), size=(_SAMPLES, len(labels)))

    def value(predictions: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> float:
        return glue_scores(run.task, predictions[chosen], labels[chosen])[metric]

    base, sampled = value(whole), np.array([value(whole, draw) for draw in draws])

    def interval(predictions: np.ndarray) -> dict[str, float]:
        differences = np.array([value(predictions, draw) for draw in draws]) - sampled
        return Interval(*np.percentile(differences, [2.5, 97.5]).tolist())._asdict()

    layers = []
    for number, layer in enumerate(without):
        change = [value(one) - base for one in layer]
        layers.append({
            "layer": number, "change": change, "intervals": [interval(one) for one in layer],
            "deviation": float(np.std(change, ddof=1)) if len(change) > 1 else None,
        })  # fmt: skip
    return {
        "model": Path(name).name,
        "source": "run",
        "metric": metric,
        "examples": len(labels),
        "value": base,
        "layers": layers,
    }


def prune_heads(found: ModelFigures[Heads], amount: float, folder: Path) -> dict[str, Any]:
    """Take the least important heads of a model out, and save it with its tokenizer in `folder`.

    amount: the number of heads, or below 1 their share. What is returned says which they were, what is left, and how long
    the model reads the text, in seconds (the best of three).
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"--out: {folder} is there, and nothing in it is overwritten; give another folder or remove it"
        )
    opened, given = found.read.opened, found.read.folder
    model = opened.model
    total = sum(len(layer.change) for layer in found.figures.layers)
    count = round(amount * total) if amount < 1 else round(amount)
    if count < 1 or (amount > 1 and count != amount):
        raise InputError(
            f"--prune: a whole number of heads, or a share of the {total} that there are; given {amount:g}"
        )
    chosen = found.figures.least(count)
    smaller = prune(model, chosen)
    if found.read.source == "Hugging Face":
        from transformers import AutoTokenizer

        smaller.save_pretrained(folder)
        AutoTokenizer.from_pretrained(given if given.is_dir() else found.read.given).save_pretrained(folder)
    else:
        smaller.save(folder)
        load_tokenizer(given).save(folder)
    seconds = dict[str, float]()
    for key, one in (("before", model), ("after", smaller)) * 3:
        start = time.perf_counter()
        nats = nats_per_token(one, found.rows, mask_id=opened.mask_id, marks=opened.marks)
        seconds[key] = min(time.perf_counter() - start, seconds.get(key, math.inf))
    return {
        "heads": chosen,
        "parameters": {"before": model.num_parameters(), "after": smaller.num_parameters()},
        "perplexity": {"before": found.figures.perplexity, "after": math.exp(nats.mean())},
        "seconds": seconds,
        "folder": str(folder),
    }


# -- mixing ------------------------------------------------------------------------------------------------------------


def measure_mixing(names: list[str], reading: Reading, texts: int) -> list[ModelFigures[Checkpoints]]:
    """The mixing of each model over its training: of a run at all checkpoints that it has kept, one for each step.

    A model that is no run has one checkpoint, `model`, without a step.
    """
    found = list[ModelFigures[Checkpoints]]()
    for read, rows in _read(names, reading, texts):
        model, figures = read.opened.model, list[tuple[str, int | None, Sequence[LayerMixing]]]()
        steps = _checkpoints(read.folder / "checkpoints") if read.kind == "run" else {"model": None}
        for name, step in steps.items():
            saved = load_own(read.folder, name).to(device_of(model)) if read.kind == "run" else model
            figures.append((name, step, mixing(saved, rows)))
        checkpoints = [
            {
                "checkpoint": name,
                "step": step,
                "layers": [{"variation": layer.variation, **_plain(layer)} for layer in layers],
            }
            for name, step, layers in figures
        ]
        found.append(ModelFigures(read, rows, figures, {"checkpoints": checkpoints}))
    return found


def _checkpoints(folder: Path) -> dict[str, int | None]:
    """Checkpoints of a run by the names that `load` takes, with their steps, the earliest first; best and last among them."""
    kept = {step: f"kept/{path.name}" for step, path in kept_checkpoints(folder).items()}
    named = {name: read_record(folder / name).state["step"] for name in ("best", "last") if (folder / name).is_dir()}
    steps = {**kept, **{step: name for name, step in named.items()}}
    return {steps[step]: step for step in sorted(steps)}
