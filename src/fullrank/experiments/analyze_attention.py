"""Trained models made ready for the analyses of attention: `fullrank analyze spectrum`, `heads` and `mixing`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
from fullrank.experiments.analyze import OpenedModel, open_models, segments
from fullrank.experiments.finetuning import reopen
from fullrank.experiments.models import load_ours
from fullrank.experiments.run_folder import is_run, open_any
from fullrank.experiments.task import Say
from fullrank.seal import read_record
from fullrank.training.checkpoint import kept_checkpoints
from fullrank.training.device import choose_device, device_of

_SAMPLES = 400  # test sets that are drawn for an interval


@dataclass(frozen=True)
class ModelText:
    """A trained model and what it is to read.

    name: as given, or its last part; given: as it was. source: run, saved model or Hugging Face. text: the name of the text,
    rows: its first whole segments, (S, N).
    """

    name: str
    given: str
    source: str
    text: str
    opened: OpenedModel
    rows: Tensor

    def as_dict(self, **figures: Any) -> dict[str, Any]:
        """The JSON of one model: where the figures come from, and the figures."""
        about = {"model": self.name, "source": self.source, "text": self.text}
        return {**about, "segment_length": self.rows.shape[1], "texts": len(self.rows), **figures}

    @property
    def in_words(self) -> str:
        """Model, text and segments, in words."""
        return f"{self.name} ({self.text}): {len(self.rows):,} segments of {self.rows.shape[1]:,} tokens"


def read_models(
    names: list[str],
    *,
    text: Path | None = None,
    texts: int = 16,
    segment_length: int | None = None,
    checkpoint: str = "best",
    device: str = "auto",
    say: Say = print,
) -> Iterator[ModelText]:
    """Each model with the first `texts` whole segments of `text` (None: a run's own).

    Raises the errors of `open_models`, and InputError for a text shorter than a segment.
    """
    options: dict[str, Any] = {"text": text, "segment_length": segment_length, "checkpoint": checkpoint, "say": say}
    found = open_models(names, dtype=torch.float32, causal=False, **options)
    for given, (label, kind, opened, length) in zip(dict.fromkeys(names), found, strict=True):
        whole = (row for batch in segments(opened, length) for row in batch.split(1) if row.shape[1] == length)
        rows = [*itertools.islice(whole, texts)]
        if not rows:
            raise InputError(
                f"{opened.text}: no text to read, as it has fewer than {length} tokens; give a longer --text"
            )
        opened.model.to(choose_device(device, "--device"))
        yield ModelText(label, given, kind.replace("Face model", "Face"), str(opened.text), opened, torch.cat(rows))


# -- spectrum ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSpectrum:
    """The spectra of one model's attention weights."""

    read: ModelText
    figures: AttentionSpectrum

    def as_dict(self) -> dict[str, Any]:
        """The JSON of one model; figures of a layer are lists over its heads."""
        layers = [
            {
                "layer": number,
                "mixed": layer.after is not layer.before,
                **{
                    when: {key: value.tolist() for key, value in dataclasses.asdict(spectrum).items()}
                    for when, spectrum in (("before", layer.before), ("after", layer.after))
                },
            }
            for number, layer in enumerate(self.figures.layers)
        ]
        return self.read.as_dict(weights=self.figures.weights, layers=layers)


def measure_spectra(names: list[str], **options: Any) -> list[ModelSpectrum]:
    """The spectrum of each model's attention weights; options as for `read_models`, whose errors it raises."""
    return [ModelSpectrum(one, spectrum(one.opened.model, one.rows)) for one in read_models(names, **options)]


# -- heads -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelHeads:
    """The heads of one model; changes: of the deviation by layer against another model, in percent."""

    read: ModelText
    figures: Heads
    changes: list[float | None]

    def as_dict(self) -> dict[str, Any]:
        """The JSON of one model; figures of a layer are lists over its heads."""
        figures = self.figures
        layers = [
            {
                "layer": number,
                "name": name,
                "change": layer.change.tolist(),
                "intervals": [None if ends is None else ends._asdict() for ends in layer.intervals],
                "deviation": layer.deviation,
                "deviation_change_percent": change,
                "redundancy": layer.redundancy,
                "similarity": layer.similarity.tolist(),
                "nll": layer.nll.tolist(),
            }
            for number, (name, layer, change) in enumerate(
                zip(figures.names, figures.layers, self.changes, strict=True)
            )
        ]
        about = {"weights": figures.weights, "objective": figures.objective, "perplexity": figures.perplexity}
        return self.read.as_dict(**about, nll=figures.nll.tolist(), layers=layers)


def measure_heads(name: str, against: str | None = None, **options: Any) -> list[ModelHeads]:
    """The heads of a model, and of a second one beside it; options as for `read_models`, whose errors it raises.

    Raises InputError for a second model with another number of layers.
    """
    found: list[ModelHeads] = []
    for one in read_models([name] if against is None else [name, against], **options):
        figures = heads(one.opened.model, one.rows, mask_id=one.opened.mask_id, marks=one.opened.marks)
        changes: list[float | None] = [None] * len(figures.layers)
        if found:
            first = found[0].figures
            if len(first.layers) != len(figures.layers):
                raise InputError(
                    f"--against: has {len(figures.layers)} layers of attention, {name} has {len(first.layers)}; give models "
                    "of one depth"
                )
            changes = deviation_changes(first, figures)
        found.append(ModelHeads(one, figures, changes))
    return found


@dataclass(frozen=True)
class TaskHeads:
    """The heads of a fine-tuned run: its task's metric on the development split, and how it changes without each head.

    changes: (H,) of each layer. intervals: 95 %, of test sets drawn from the examples (paired bootstrap).
    """

    name: str
    metric: str
    examples: int
    value: float
    changes: list[np.ndarray]
    intervals: list[list[Interval]]

    def as_dict(self) -> dict[str, Any]:
        """The JSON of the run; figures of a layer are lists over its heads."""
        layers = [
            {
                "layer": number,
                "change": change.tolist(),
                "intervals": [interval._asdict() for interval in ends],
                "deviation": float(change.std(ddof=1)) if len(change) > 1 else None,
            }
            for number, (change, ends) in enumerate(zip(self.changes, self.intervals, strict=True))
        ]
        about = {"model": self.name, "source": "run", "metric": self.metric, "examples": self.examples}
        return {**about, "value": self.value, "layers": layers}


def finetunes(name: str) -> bool:
    """True for the folder of a run of fine-tuning."""
    folder = Path(name).expanduser()
    return is_run(folder) and isinstance(open_any(folder)[0], FinetuneConfig)


def measure_task_heads(name: str, *, device: str = "auto", say: Say = print) -> TaskHeads:
    """The heads of a run of GLUE, by the metric of its task; the errors of `reopen`."""
    run = reopen(Path(name).expanduser(), say)
    run.model.to(choose_device(device, "--device"))
    labels, metric = run.examples.known_labels(), run.task.metrics[0]
    whole, without = ablate(run.model, run.predictions)
    draws = np.random.default_rng(0).integers(len(labels), size=(_SAMPLES, len(labels)))

    def value(predictions: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> float:
        return glue_scores(run.task, predictions[chosen], labels[chosen])[metric]

    base, sampled = value(whole), np.array([value(whole, draw) for draw in draws])

    def interval(predictions: np.ndarray) -> Interval:
        differences = np.array([value(predictions, draw) for draw in draws]) - sampled
        return Interval(*np.percentile(differences, [2.5, 97.5]).tolist())

    changes = [np.array([value(one) - base for one in layer]) for layer in without]
    intervals = [[interval(one) for one in layer] for layer in without]
    return TaskHeads(Path(name).name, metric, len(labels), base, changes, intervals)


def prune_heads(found: ModelHeads, amount: float, folder: Path) -> dict[str, Any]:
    """Take the least important heads of a model out, and save it with its tokenizer in `folder`.

    amount: the number of heads, or below 1 their share. What is returned says which they were, what is left, and how long
    the model reads the text, in seconds (the best of three).
    """
    opened, rows = found.read.opened, found.read.rows
    model, given = opened.model, Path(found.read.given).expanduser()
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
        nats = nats_per_token(one, rows, mask_id=opened.mask_id, marks=opened.marks)
        seconds[key] = min(time.perf_counter() - start, seconds.get(key, math.inf))
    return {
        "heads": chosen,
        "parameters": {"before": model.num_parameters(), "after": smaller.num_parameters()},
        "perplexity": {"before": found.figures.perplexity, "after": math.exp(nats.mean())},
        "seconds": seconds,
        "folder": str(folder),
    }


# -- mixing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelMixing:
    """The mixing of one model over its training: by checkpoint, with its step, the earliest first; the last is the final one.

    A model that is no run has one checkpoint, `model`, without a step.
    """

    read: ModelText
    checkpoints: dict[str, int | None]
    layers: dict[str, tuple[LayerMixing, ...]]

    def as_dict(self) -> dict[str, Any]:
        """The JSON of one model; figures of a layer as in `LayerMixing`."""
        checkpoints = [
            {
                "checkpoint": name,
                "step": step,
                "layers": [
                    {
                        "variation": one.variation,
                        **{
                            key: value.tolist() if isinstance(value, np.ndarray) else value
                            for key, value in vars(one).items()
                        },
                    }
                    for one in self.layers[name]
                ],
            }
            for name, step in self.checkpoints.items()
        ]
        return self.read.as_dict(checkpoints=checkpoints)


def measure_mixing(names: list[str], **options: Any) -> list[ModelMixing]:
    """The mixing of each model, of a run at all checkpoints that it has kept; options as for `read_models`.

    Of checkpoints of one step one is read.
    """
    found = []
    for one in read_models(names, **options):
        folder = Path(one.given).expanduser()
        checkpoints: dict[str, int | None] = {"model": None}
        if one.source == "run":
            checkpoints = _checkpoints(folder / "checkpoints")
        layers = {}
        for name in checkpoints:
            model = one.opened.model
            if one.source == "run":
                model = load_ours(folder, name).to(device_of(model))
            layers[name] = mixing(model, one.rows)
        found.append(ModelMixing(one, checkpoints, layers))
    return found


def _checkpoints(folder: Path) -> dict[str, int | None]:
    """Checkpoints of a run by the names that `load` takes, with their steps, the earliest first; best and last among them."""
    kept = {step: f"kept/{path.name}" for step, path in kept_checkpoints(folder).items()}
    named = {name: read_record(folder / name).state["step"] for name in ("best", "last") if (folder / name).is_dir()}
    steps = {**kept, **{step: name for name, step in named.items()}}
    return {steps[step]: step for step in sorted(steps)}
