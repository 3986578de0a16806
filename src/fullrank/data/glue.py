"""The nine tasks of GLUE: examples with labels, from local files or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.glue import HUB, HUB_REVISION, GlueTask, glue_task
from fullrank.core.errors import InputError
from fullrank.data.files import Report, existing_folder, file_digest, lines
from fullrank.data.hub import load_hub_rows
from fullrank.files import digest, silent

_COLA = ["source", "label", "mark", "sentence"]  # its files have no header

_Rows = Iterable[tuple[str, Mapping[str, Any]]]  # the place of a row, such as "line 12", and its columns


@dataclass(frozen=True, eq=False)
class Examples:
    """One split of a task.

    first, second: its sentences; second is None where the task has one. labels: int64 class ids, float32 scores from 0 to 5
    in STS-B. is_slice: not the published number of rows, or a part of them. source: the file, or the hub's name. sha256: of
    the file, or of the hub's rows.
    """

    first: list[str]
    second: list[str] | None
    labels: np.ndarray
    task: GlueTask
    split: str
    is_slice: bool
    source: str
    sha256: str

    def __len__(self) -> int:
        return len(self.first)

    def take(self, rows: Sequence[int] | np.ndarray) -> Examples:
        """The examples of these rows, in this order; a slice unless it is all of them."""
        return dataclasses.replace(
            self,
            first=[self.first[i] for i in rows],
            second=None if self.second is None else [self.second[i] for i in rows],
            labels=self.labels[rows],
            is_slice=self.is_slice or sorted(rows) != list(range(len(self))),
        )

    def describe(self) -> dict[str, Any]:
        """Counts, file and labels: the share of each class; of scores, their mean and standard deviation."""
        if self.task.labels is None:
            scores = self.labels.astype(np.float64)
            shares = {"mean": float(scores.mean()), "deviation": float(scores.std())}
        else:
            counts = np.bincount(self.labels, minlength=self.task.outputs).tolist()
            shares = {name: count / len(self) for name, count in zip(self.task.labels, counts, strict=True)}
        return {
            "rows": len(self),
            "published": self.task.sizes[self.split],
            "is_slice": self.is_slice,
            "source": self.source,
            "sha256": self.sha256,
            "labels": shares,
        }


def load_glue(
    task: str | GlueTask,
    split: str,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    report: Report = silent,
) -> Examples:
    """One split of a task: train or dev; of mnli also dev_mismatched.

    `folder` holds the folders of the tasks, or the files of this one; without it the rows come from the Hugging Face hub, which
    keeps its copy in `cache`. `report` hears of a slice and of a download.
    Raises InputError for an unknown task or split, and for files that are missing, empty, cut short, not UTF-8, or that lack
    a column or hold a label outside the allowed ones; RunError if the hub cannot be reached.
    """
    task = glue_task(task)
    task.check_split(split)
    if folder is None:
        columns = [*(task.hub_sentences or task.sentences), "label"]
        examples = _collect(task, split, HUB, columns, _read_hub(task, split, cache, report))
    else:
        path = locate(task, split, Path(folder).expanduser())
        if path is None:
            raise InputError(
                f"data.dir: GLUE {task.folder}: no file {task.files[split]} in {folder}. Without a folder it comes from the "
                f"Hugging Face hub ({HUB})"
            )
        examples = _collect(task, split, str(path), [*task.sentences, task.label_column], _read_tsv(task, path))
        examples = dataclasses.replace(
            examples, sha256=file_digest(path, "data.dir"), is_slice=examples.is_slice or path.stem.endswith(".slice")
        )
    if examples.is_slice:
        counts = f"{len(examples):,} rows, published are {task.sizes[split]:,}"
        report(f"GLUE {task.folder} (slice): {split} has {counts} ({examples.source})")
    return examples


def locate(task: GlueTask, split: str, folder: Path) -> Path | None:
    """The official file of a split, else a slice of it, in `folder`, `folder`/<Task> or `folder`/glue/<Task>."""
    existing_folder(folder, f"{task.folder}/train.tsv and so on")
    places = [folder / task.folder, folder / "glue" / task.folder, folder]
    names = [Path(task.files[split]).name, f"{split}.slice.tsv"]
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def _read_tsv(task: GlueTask, path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Rows of tab-separated values, where a quotation mark is a character like any other."""
    names: list[str] = []
    for number, line in enumerate(lines(path, "data.dir"), start=1):
        fields = line.split("\t")
        if not names:
            has_header = task.name != "cola" or "sentence" in fields
            names = fields if has_header else _COLA
            if has_header:
                continue
        if line and len(fields) != len(names):
            raise InputError(
                f"data.dir: {path}, line {number}: {len(fields)} fields, expected are {len(names)} ({', '.join(names)}); the "
                "file is cut short or damaged"
            )
        if line:
            yield f"line {number}", dict(zip(names, fields, strict=True))


def _read_hub(task: GlueTask, split: str, cache: str | Path | None, report: Report) -> _Rows:
    name = split.replace("dev", "validation")
    rows = load_hub_rows(
        HUB,
        f"{name}_matched" if task.name == "mnli" and split == "dev" else name,
        configuration=task.name,
        revision=HUB_REVISION,
        cache=cache,
        licence=task.licence,
        files=f"{task.folder}/train.tsv and so on",
        report=report,
    )
    return ((f"row {number}", row) for number, row in enumerate(rows))


def _collect(task: GlueTask, split: str, source: str, columns: Sequence[str], rows: _Rows) -> Examples:
    """The examples of rows with these columns: sentences, then the label. InputError for a missing column and a bad label."""
    texts: list[list[str]] = [[] for _ in task.sentences]
    labels = []
    for place, row in rows:
        if missing := [column for column in columns if column not in row]:
            raise InputError(
                f"data.dir: {source}, {place}: no column '{missing[0]}'; its columns are {', '.join(row)[:200]}"
            )
        *sentences, label = (row[column] for column in columns)
        for side, sentence in zip(texts, sentences, strict=True):
            side.append(sentence)
        labels.append(task.read_label(label, f"data.dir: {source}, {place}"))
    if not labels:
        raise InputError(f"data.dir: {source} holds no rows of the split {split}")
    first, *second = texts
    return Examples(
        first,
        second[0] if second else None,
        np.array(labels, np.float32 if task.labels is None else np.int64),
        task,
        split,
        len(labels) != task.sizes[split],
        source,
        digest([texts, labels]),
    )
