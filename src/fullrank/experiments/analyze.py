"""Measurements of `fullrank analyze`: trained models by name, each with the text that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullrank.analysis.context import REACH_PLOT, REACH_TABLE, compute_published_reach, context, reach_records
from fullrank.analysis.heads import HEADS_TABLES, ablate
from fullrank.config.finetune import FinetuneConfig
from fullrank.config.load import Resolved, resolve
from fullrank.config.run import RunConfig
from fullrank.config.training import PhaseConfig
from fullrank.core.encoder import Encoder
from fullrank.core.errors import InputError, suggest
from fullrank.core.skip_retain import SkipRetain
from fullrank.evaluation.perplexity import choose_masked_protocol, final_protocol
from fullrank.evaluation.tasks import glue_scores
from fullrank.experiments.run import corpus_of
from fullrank.experiments.run_folder import open_any, open_run
from fullrank.experiments.task import Say
from fullrank.files import write_json
from fullrank.models import LoadedModel, open_model
from fullrank.names import Kind, model_kind
from fullrank.records import Measurement, Plot, Record, Table, check_records, declaration_to_dict, find_measurement
from fullrank.seal import is_run
from fullrank.text import SEGMENT_LENGTH, Text, batch_tokens, choose_length, read_file
from fullrank.training.device import choose_device

SPLIT = "valid"  # the text of a run
_TOKENS = 1 << 16  # of a prepared corpus at a time
_RESAMPLINGS = 400  # test sets that are drawn for an interval


# -- models and their texts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Options of verbs that read a text.

    text: None is a run's own valid split. segment_length: None is as evaluated, or 128. texts: most segments; None: all.
    """

    text: Path | None = None
    segment_length: int | None = None
    checkpoint: str = "best"
    device: str = "auto"
    say: Say = print
    texts: int | None = None


def read_text(model: LoadedModel, reading: Reading) -> Text:
    """The text of a model: the file of `--text`, else the valid split of its run.

    Segments are as long as the run is evaluated with. Raises InputError where there is no text.
    """
    usual = SEGMENT_LENGTH
    if model.source == "run":
        assert model.folder is not None
        run, _ = open_run(model.folder)
        if not run.translates:
            usual = (choose_masked_protocol(run) if run.masks else final_protocol(run)).segment_length
    length = choose_length(model, reading.segment_length, usual)
    if reading.text is not None:
        return read_file(model, reading.text, length, count=reading.texts)
    if model.source != "run":
        raise InputError(f"{model.name}: not a run of fullrank, so no text of its own; give one with --text FILE")
    return replace(read_split(model, length, reading.say), count=reading.texts)


def read_split(model: LoadedModel, segment_length: int, say: Say = print) -> Text:
    """The valid split of a run; of a translation run its source sentences, each with <eos>."""
    assert model.folder is not None
    corpus = corpus_of(model.folder, SPLIT, say)
    name, start = f"{corpus.label}, {SPLIT}", None
    if isinstance(model.own, Encoder):
        name, read = f"{name}, source", partial(_read_sentences, corpus.pairs(SPLIT))
    else:
        start, read = corpus.tokenizer.start_id, partial(_read_tokens, corpus.ids(SPLIT))
    return Text(name, read, segment_length, start_id=start, batch_tokens=batch_tokens(model))


def _read_tokens(tokens: Any) -> Iterator[Sequence[int]]:
    for start in range(0, len(tokens), _TOKENS):
        yield tokens[start : start + _TOKENS].tolist()


def _read_sentences(pairs: Any) -> Iterator[Sequence[int]]:
    for number in range(len(pairs)):
        yield [*pairs.source(number).tolist(), pairs.source_eos_id]


def open_all(names: Sequence[str], reading: Reading) -> Iterator[tuple[LoadedModel, Text]]:
    """Each model once, on its device, with its text.

    Folders are called by their last parts, where these tell the models apart.
    Raises InputError for a name without a model, and for a text that is missing.
    """
    names = list(dict.fromkeys(names))
    for name in names:  # all of them, before any is read
        check_named(name, reading)
    last = [Path(name).name if Path(name).is_dir() else name for name in names]
    for name, label in zip(names, last if len(set(last)) == len(last) else names, strict=True):
        model = open_model(name, checkpoint=reading.checkpoint, device=reading.device)
        model.name = label
        yield model, read_text(model, reading)


def check_named(name: str, reading: Reading) -> None:
    """InputError for a configuration, and where a text has to be named; a note where the hub is asked."""
    kind = model_kind(name)
    if kind == "configuration":
        raise InputError(
            f"{name}: a configuration, which has no weights; give a run folder, a saved model or a Hugging Face model"
        )
    if kind != "run" and reading.text is None:
        raise InputError(f"{name}: not a run of fullrank, so no text of its own; give one with --text FILE")
    note_hub(name, kind, reading.say)


def note_hub(name: str, kind: Kind, say: Say) -> None:
    """Say that a model is looked for on the hub."""
    if kind == "Hugging Face model" and not name.startswith("hf:") and not Path(name).expanduser().is_dir():
        say(f"{name}: no such folder, file or recipe; looking for it on the Hugging Face hub")


# -- measurements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Records of one measurement over models, with the tables and plots that show them. models: where they come from."""

    name: str
    records: list[Record]
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    models: Sequence[Mapping[str, Any]] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of the verb."""
        records = [record.to_dict() for record in self.records]
        return {"measurement": self.name, "models": list(self.models), "records": records}

    @property
    def sources(self) -> list[str]:
        """A line for each model: its text and the segments that were read."""
        return [
            f"{about['model']} ({about['text']}): segments of {about['segment_length']:,} tokens"
            for about in self.models
            if "text" in about
        ]


def measure_models(measurement: Measurement, names: Sequence[str], reading: Reading, **options: Any) -> Measured:
    """Run a measurement on each model; with several models, each record has the label `model`.

    Records of a run are kept in its folder, RUN/analysis/NAME.json, for its report.
    Raises InputError for a name without a model, a model that lacks what is needed, and a text that is missing or too short.
    """
    by_model: dict[str, list[Record]] = {}
    models = []
    for model, text in open_all(names, reading):
        model.require(measurement.needs, f"analyze {measurement.name}")
        records = check_records(measurement.name, measurement.function(model, text, **options))
        first = next(iter(by_model.values()), None)
        if first is not None and measurement.compare is not None:
            records += measurement.compare(first, records)
        by_model[model.name] = records
        about = {
            "model": model.name,
            "source": model.source,
            "text": text.name,
            "segment_length": text.segment_length,
            "texts": text.count,
        }
        models.append(about)
        if model.source == "run" and model.folder is not None:
            content = {
                "measurement": measurement.name,
                **about,
                "tables": [declaration_to_dict(table) for table in measurement.tables],
                "plots": [declaration_to_dict(plot) for plot in measurement.plots],
                "records": [record.to_dict() for record in records],
            }
            write_json(model.folder / "analysis" / f"{measurement.name}.json", content)
    labelled = []
    for name, records in by_model.items():
        labelled += records if len(by_model) == 1 else [record.with_labels(model=name) for record in records]
    return Measured(measurement.name, labelled, measurement.tables, measurement.plots, models)


def measure_context(names: Sequence[str], reading: Reading, phase: str | None) -> tuple[Measured, list[str]]:
    """The use of context of each model, and of runs with memory the reach of their layers, with a remark on Eq. 6."""
    measured = measure_models(find_measurement("context"), names, reading)
    records = list(measured.records)
    remarks = []
    for name, about in zip(dict.fromkeys(names), measured.models, strict=True):
        config = open_any(Path(name))[0] if about["source"] == "run" else None
        if isinstance(config, RunConfig) and (config.model.memory_length or phase is not None):
            reach, remark = measure_reach(resolve(name), phase)
            labels = {"model": about["model"]} if len(measured.models) > 1 else {}
            records += [record.with_labels(**labels) for record in reach.records]
            remarks.append(remark)
    tables = (*measured.tables, REACH_TABLE)
    plots = (*measured.plots, REACH_PLOT)
    return replace(measured, records=records, tables=tables, plots=plots), remarks


# -- heads of fine-tuned runs --------------------------------------------------------------------------------------------


def is_finetuned(name: str) -> bool:
    """True for the folder of a run of fine-tuning."""
    folder = Path(name).expanduser()
    return is_run(folder) and isinstance(open_any(folder)[0], FinetuneConfig)


def measure_task_heads(name: str, *, device: str = "auto", say: Say = print) -> Measured:
    """The heads of a run of GLUE: the change of its task's metric on the development split without each head.

    Intervals: 95 %, of test sets drawn from the examples (paired bootstrap). Raises the errors of `reopen`.
    """
    from fullrank.experiments.finetuning import logits_by_example, predict_labels, reopen

    model, benchmark, split = reopen(Path(name).expanduser(), say)
    model.to(choose_device(device, "--device"))
    labels, metric = split.source.labels, benchmark.metrics[0]
    examples = len(labels)

    def predict(model: torch.nn.Module) -> np.ndarray:
        size = benchmark.config.eval.batch_size
        return predict_labels(torch.stack(logits_by_example(model, split.encoded, size, benchmark.compute_logits)))

    with_all, without = ablate(model, predict)
    draws = np.random.default_rng(0).integers(examples, size=(_RESAMPLINGS, examples))

    def score(predictions: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> float:
        return glue_scores(benchmark.task, predictions[chosen], labels[chosen])[metric]

    def resample(predictions: np.ndarray) -> np.ndarray:
        return np.array([score(predictions, draw) for draw in draws])

    base = score(with_all)
    resampled = resample(with_all)
    protocol = f"{examples:,} examples of the development split"
    records = [Record({}, metric, base, protocol=protocol)]
    for number, layer in enumerate(without):
        changes = [score(predictions) - base for predictions in layer]
        for head, (predictions, change) in enumerate(zip(layer, changes, strict=True)):
            differences = resample(predictions) - resampled
            low, high = np.percentile(differences, [2.5, 97.5]).tolist()
            labels_of_head = {"layer": number, "head": head}
            records.append(Record(labels_of_head, "change", change, metric, (low, high), protocol))
        if len(changes) > 1:
            deviation = float(np.std(changes, ddof=1))
            records.append(Record({"layer": number}, "deviation", deviation, metric, protocol=protocol))
    about = {"model": Path(name).name, "source": "run"}
    return Measured("heads", records, HEADS_TABLES, models=[about])


# -- the reach of memory under Skip-Retain -------------------------------------------------------------------------------


def measure_reach(resolved: Resolved[RunConfig], name: str | None = None) -> tuple[Measured, str]:
    """The reach of each layer's memory in the phase `name`, and what the paper's Eq. 6 gives.

    name: None is the first phase that skips layers.
    Raises InputError for a model without memory, an unknown phase, and probabilities that give no reach.
    """
    run = resolved.config
    if not run.model.memory_length:
        raise InputError(
            "model.memory_length: 0, so no layer has a memory that could reach anywhere; set it to some tokens "
            "(model.memory_length=512)"
        )
    layers = run.model.num_hidden_layers
    phase = find_phase(run, name)
    probabilities = _list_probabilities(phase, layers) if phase else (0.0,) * layers
    try:
        reach = context(probabilities, memory_length=run.model.memory_length, segment_length=run.train.segment_length)
        records = list(reach_records(reach))
    except InputError as error:
        raise InputError(f"train.phases.{phase.name}.p: {error}" if phase else str(error)) from error
    recipe = Path(resolved.recipe).name if Path(resolved.recipe).exists() else resolved.recipe
    about = {
        "model": recipe, "source": "configuration", "row": resolved.row, "scale": resolved.scale,
        "phase": phase.name if phase else None, "skip": phase.skip if phase else "none",
    }  # fmt: skip
    measured = Measured("context", records, (REACH_TABLE,), (REACH_PLOT,), [about])
    return measured, (
        f"The paper's Eq. 6 gives {compute_published_reach(reach):,.0f} tokens. It adds p 2M over the layers, which is the "
        f"context of no layer, and takes memory and segment as equal. The farthest layer reaches "
        f"{max(layer.mean for layer in reach):,.0f} tokens on average."
    )


def find_phase(run: RunConfig, name: str | None) -> PhaseConfig | None:
    """The phase `name`; without a name, the first one that skips layers, or None. InputError for an unknown name."""
    phases = {phase.name: phase for phase in run.train.phases}
    if name is None:
        layers = run.model.num_hidden_layers
        return next((phase for phase in phases.values() if any(_list_probabilities(phase, layers))), None)
    if name not in phases:
        raise InputError(f"--phase {name}: train.phases has no such phase; {suggest(name, phases)}")
    return phases[name]


def _list_probabilities(phase: PhaseConfig, layers: int) -> tuple[float, ...]:
    return SkipRetain(phase.skip, phase.p, num_layers=layers).probabilities
