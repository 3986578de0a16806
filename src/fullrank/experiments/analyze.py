"""Measurements of `fullrank analyze`: trained models by name, each with the text that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.core.encoder import Encoder
from fullrank.core.errors import InputError
from fullrank.experiments.run import corpus_of, task_of
from fullrank.experiments.run_folder import open_run
from fullrank.files import Entries, write_json
from fullrank.models import LoadedModel, open_model, trained_kind
from fullrank.records import Measurement, Record, check_records, declaration_to_dict
from fullrank.text import SEGMENT_LENGTH, Text, batch_tokens, choose_length, read_file

SPLIT = "valid"  # the text of a run
_TOKENS = 1 << 16  # of a prepared corpus at a time


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
    texts: int | None = None


def read_text(model: LoadedModel, reading: Reading) -> Text:
    """Read the text of a model that passed `check_named`: the file of `--text`, else the valid split of its run.

    Where no length is asked for, segments are as long as the run is evaluated with.
    """
    usual = SEGMENT_LENGTH
    if model.source == "run":
        assert model.folder is not None
        run, _ = open_run(model.folder)
        if not run.translates:
            usual = task_of(run).protocol().segment_length
    length = choose_length(model, reading.segment_length, usual)
    if reading.text is not None:
        return read_file(model, reading.text, length, count=reading.texts)
    return replace(read_split(model, length), count=reading.texts)


def read_split(model: LoadedModel, segment_length: int) -> Text:
    """Read the valid split of a run; of a translation run its source sentences, each with <eos>."""
    assert model.folder is not None
    corpus = corpus_of(model.folder, SPLIT)
    name = f"{corpus.label}, {SPLIT}"
    most = batch_tokens(model)
    if isinstance(model.fullrank_model, Encoder):
        source = corpus.pairs(SPLIT).source
        eos_id = source.language.eos_id
        sentences = partial(map, lambda sentence: [*sentence.tolist(), eos_id], source)
        return Text(f"{name}, source", sentences, segment_length, batch_tokens=most)
    ids = corpus.ids(SPLIT)
    parts = [ids[start : start + _TOKENS] for start in range(0, len(ids), _TOKENS)]
    start_id = corpus.tokenizer.start_id
    return Text(name, partial(map, np.ndarray.tolist, parts), segment_length, start_id=start_id, batch_tokens=most)


def open_all(names: Sequence[str], reading: Reading) -> Iterator[tuple[LoadedModel, Text]]:
    """Open each model once, on its device, with its text.

    Folders are called by their last parts, where these tell the models apart.
    Raises InputError for a name without a model, and for a text that is missing.
    """
    names = list(dict.fromkeys(names))
    for name in names:  # all of them, before any is read
        check_named(name, reading)
    labels = [Path(name).name if Path(name).is_dir() else name for name in names]
    if len(set(labels)) < len(labels):
        labels = names
    for name, label in zip(names, labels, strict=True):
        model = open_model(name, checkpoint=reading.checkpoint, device=reading.device)
        model.name = label
        yield model, read_text(model, reading)


def check_named(name: str, reading: Reading) -> None:
    """Raise InputError for a configuration, and for a model that is no run where no `--text` is given."""
    if trained_kind(name) != "run" and reading.text is None:
        raise InputError(f"{name}: not a run of fullrank, so no text of its own; give one with --text FILE")


# -- measurements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Records of one measurement over models. models: where they come from."""

    measurement: Measurement
    records: list[Record]
    models: list[Entries]

    def to_dict(self) -> Entries:
        """Return the JSON document of the verb."""
        records = [record.to_dict() for record in self.records]
        return {"measurement": self.measurement.name, "models": self.models, "records": records}

    @property
    def sources(self) -> list[str]:
        """A line for each model: its text and the length of the segments that were read."""
        return [
            f"{about['model']} ({about['text']}): segments of {about['segment_length']:,} tokens"
            for about in self.models
        ]


def measure_models(measurement: Measurement, names: Sequence[str], reading: Reading, **options: Any) -> Measured:
    """Run a measurement on each model.

    With several models, each record has the label `model`. Records of a run are kept in its folder,
    RUN/analysis/NAME.json, for its report.

    Args:
        measurement: what is measured.
        names: models by name; each is measured once.
        reading: which text is read, and how.
        **options: keyword-only parameters of the measurement's function.

    Returns:
        The measurement with the records of all models.

    Raises:
        InputError: a name is of no model, a model lacks what is needed, or a text is missing or too short.
    """
    first: list[Record] = []
    labelled: list[Record] = []
    models = []
    several = len(set(names)) > 1
    for model, text in open_all(names, reading):
        model.require(measurement.needs, f"analyze {measurement.name}")
        records = check_records(measurement.name, measurement.function(model, text, **options))
        if first and measurement.compare is not None:
            records += measurement.compare(first, records)
        first = first or records
        labelled += [record.with_labels(model=model.name) for record in records] if several else records
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
    return Measured(measurement, labelled, models)
