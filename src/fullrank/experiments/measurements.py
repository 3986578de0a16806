"""Measurements run on models and their texts: what `fullrank analyze` does, before anything is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.analysis import ablate
from fullrank.analysis.heads import HEADS_TABLES
from fullrank.config.finetune import FinetuneConfig
from fullrank.evaluation.tasks import glue_scores
from fullrank.experiments.analyze import Reading, open_all
from fullrank.experiments.finetuning import reopen
from fullrank.experiments.run_folder import open_any
from fullrank.experiments.task import Say
from fullrank.files import write_json
from fullrank.models import LoadedModel
from fullrank.records import Measurement, Plot, Record, Table, check_records, declaration_to_dict
from fullrank.seal import is_run
from fullrank.text import Text
from fullrank.training.device import choose_device

_RESAMPLINGS = 400  # test sets that are drawn for an interval


@dataclass(frozen=True)
class Measured:
    """Records of one measurement over models, with the tables and plots that show them. models: where they come from."""

    name: str
    records: list[Record]
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    models: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of the verb."""
        records = [record.to_dict() for record in self.records]
        return {"measurement": self.name, "models": list(self.models), "records": records}

    @property
    def sources(self) -> list[str]:
        """A line for each model: its text and the segments that were read."""
        lines = []
        for about in self.models:
            if "text" in about:
                lines.append(f"{about['model']} ({about['text']}): segments of {about['segment_length']:,} tokens")
        return lines


def measure_models(
    measurement: Measurement,
    names: Sequence[str],
    reading: Reading,
    **options: Any,
) -> Measured:
    """Run a measurement on each model; with several models, each record has the label `model`.

    Records of a run are kept in its folder, RUN/analysis/NAME.json, for its report.
    Raises InputError for a name without a model, a model that lacks what is needed, and a text that is missing or too short.
    """
    by_model: dict[str, list[Record]] = {}
    models = []
    for model, text in open_all(names, reading):
        model.require(measurement.needs, f"analyze {measurement.name}")
        measured = measurement.function(model, text, **options)
        records = check_records(measurement.name, measured)
        first = next(iter(by_model.values()), None)
        if first is not None and measurement.compare is not None:
            records += measurement.compare(first, records)
        by_model[model.name] = records
        about = describe_reading(model, text)
        models.append(about)
        if model.source == "run":
            keep_records(measurement, about, records, model.folder)
    several = len(by_model) > 1
    labelled = []
    for name, records in by_model.items():
        for record in records:
            if several:
                record = record.with_labels(model=name)
            labelled.append(record)
    return Measured(measurement.name, labelled, measurement.tables, measurement.plots, models)


def describe_reading(model: LoadedModel, text: Text) -> dict[str, Any]:
    """What was read: the model, its text and the segments."""
    return {
        "model": model.name,
        "source": model.source,
        "text": text.name,
        "segment_length": text.segment_length,
        "texts": text.count,
    }


def keep_records(
    measurement: Measurement, about: Mapping[str, Any], records: Sequence[Record], folder: Path | None
) -> None:
    """Write RUN/analysis/NAME.json, which the report of the run reads."""
    assert folder is not None
    content = {
        "measurement": measurement.name,
        **about,
        "tables": [declaration_to_dict(table) for table in measurement.tables],
        "plots": [declaration_to_dict(plot) for plot in measurement.plots],
        "records": [record.to_dict() for record in records],
    }
    path = folder / "analysis" / f"{measurement.name}.json"
    write_json(path, content)


# -- heads of fine-tuned runs ------------------------------------------------------------------------------


def is_finetuned(name: str) -> bool:
    """True for the folder of a run of fine-tuning."""
    folder = Path(name).expanduser()
    if not is_run(folder):
        return False
    config, *_ = open_any(folder)
    return isinstance(config, FinetuneConfig)


def measure_task_heads(name: str, *, device: str = "auto", say: Say = print) -> Measured:
    """The heads of a run of GLUE: the change of its task's metric on the development split without each head.

    Intervals: 95 %, of test sets drawn from the examples (paired bootstrap). Raises the errors of `reopen`.
    """
    run = reopen(Path(name).expanduser(), say)
    run.model.to(choose_device(device, "--device"))
    labels = run.split.source.labels
    examples = len(labels)
    metric = run.benchmark.metrics[0]
    with_all, without = ablate(run.model, run.predict)
    draws = np.random.default_rng(0).integers(examples, size=(_RESAMPLINGS, examples))

    def score(predictions: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> float:
        scores = glue_scores(run.benchmark.task, predictions[chosen], labels[chosen])
        return scores[metric]

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
            of_head = Record({"layer": number, "head": head}, "change", change, metric, (low, high), protocol)
            records.append(of_head)
        if len(changes) > 1:
            deviation = float(np.std(changes, ddof=1))
            of_layer = Record({"layer": number}, "deviation", deviation, metric, protocol=protocol)
            records.append(of_layer)
    about = {"model": Path(name).name, "source": "run"}
    return Measured("heads", records, HEADS_TABLES, models=[about])
