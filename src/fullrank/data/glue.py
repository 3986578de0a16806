"""The nine tasks of GLUE: examples with labels, from local files or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.glue import GLUE, HUB, HUB_REVISION, SCORES, GlueTask, glue_task, plain
from fullrank.core.errors import InputError, RunError
from fullrank.data.corpora import hub_rows
from fullrank.data.files import Report, existing_folder, file_digest, lines
from fullrank.files import digest, mended, parse_json, silent

_KEY = "data.dir"
_SLICE = ".slice"
_STEMS = {
    "dev": ("dev", "dev_matched", "validation", "validation_matched"),
    "dev_mismatched": ("dev_mismatched", "validation_mismatched"),
}
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

    `folder` holds the files, or the folders of the tasks; without it the rows come from the Hugging Face hub, which keeps its
    copy in `cache`. `report` hears of a slice and of a download.
    Raises InputError for an unknown task or split, and for files that are missing, empty, cut short, not UTF-8, or that lack
    a column or hold a label outside the allowed ones; RunError if the hub cannot be reached.
    """
    task = glue_task(task)
    task.check_split(split)
    if folder is None:
        examples = _collect(task, split, HUB, _read_hub(task, split, cache, report))
    else:
        path = _find_file(task, split, Path(folder).expanduser())
        read = _read_jsonl if path.suffix == ".jsonl" else _read_tsv
        examples = _collect(task, split, str(path), read(task, path))
        examples = dataclasses.replace(
            examples, sha256=file_digest(path, _KEY), is_slice=examples.is_slice or _SLICE in path.name
        )
    if examples.is_slice:
        counts = f"{len(examples):,} rows, published are {task.sizes[split]:,}"
        report(f"GLUE {task.folder} (slice): {split} has {counts} ({examples.source})")
    return examples


# the file of a split


def locate(task: GlueTask, split: str, folder: Path) -> Path | None:
    """The file of a split in `folder`, in `folder`/<Task> or `folder`/glue/<Task>; a whole file goes before a slice."""
    places = _list_places(task, folder)
    stems = _STEMS.get(split, (split,))
    names = [f"{stem}{middle}{end}" for middle in ("", _SLICE) for stem in stems for end in (".tsv", ".jsonl")]
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def _find_file(task: GlueTask, split: str, folder: Path) -> Path:
    path = locate(task, split, folder)
    if path is None:
        searched = ", ".join(map(str, _list_places(task, folder))) or f"{folder} (the folder of another task)"
        raise InputError(
            f"{_KEY}: GLUE {task.folder}: no file {task.files[split]} in {searched}. Without a folder it comes from the "
            f"Hugging Face hub ({HUB})"
        )
    return path


def _list_places(task: GlueTask, folder: Path) -> list[Path]:
    """Folders that may hold the files of a task, the nearest to it first."""
    existing_folder(folder, f"{task.folder}/train.tsv and so on")
    above = [folder, *(path for path in folder.iterdir() if path.is_dir() and plain(path.name) in ("glue", "gluedata"))]
    inner = sorted(path for place in above for path in place.iterdir() if path.is_dir())
    places = [path for path in inner if plain(path.name) == task.name]
    is_of_another_task = plain(folder.resolve().name) in GLUE.keys() - {task.name}
    return places if is_of_another_task else [*places, folder]


# rows


def _read_tsv(task: GlueTask, path: Path) -> _Rows:
    """Rows of tab-separated values, where a quotation mark is a character like any other."""
    names: list[str] = []
    for place, line in _number_lines(path):
        fields = line.split("\t")
        if not names:
            names = _COLA if task.name == "cola" and "sentence" not in fields else fields
            if names is fields:
                _match_columns(task, fields, str(path))
                continue
        if len(fields) != len(names):
            raise InputError(
                f"{_KEY}: {path}, {place}: {len(fields)} fields, expected are {len(names)} ({', '.join(names)}); the file is "
                "cut short or damaged"
            )
        yield place, dict(zip(names, fields, strict=True))


def _read_jsonl(task: GlueTask, path: Path) -> _Rows:
    """Rows of JSON objects, one a line, with the hub's or the official names of columns."""
    for place, line in _number_lines(path):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, Mapping):
            raise InputError(f"{_KEY}: {path}, {place}: not a JSON object but {line[:40]}; is the file cut short?")
        yield place, mended(row)


def _number_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines that are not empty, each with its place."""
    for number, line in enumerate(lines(path, _KEY), start=1):
        if line:
            yield f"line {number}", line


def _read_hub(task: GlueTask, split: str, cache: str | Path | None, report: Report) -> _Rows:
    """The rows of a split on the Hugging Face hub; errors as in `hub_rows`."""
    name = split.replace("dev", "validation")
    rows = hub_rows(
        HUB,
        f"{name}_matched" if task.name == "mnli" and split == "dev" else name,
        configuration=task.name,
        revision=HUB_REVISION,
        cache=None if cache is None else Path(cache),
        what=f"GLUE {task.folder}",
        licence=task.licence,
        local=f"give a local folder that holds {task.folder}/train.tsv and so on: --from DIR (data.dir=DIR)",
        report=report,
    )
    return ((f"row {number}", mended(row)) for number, row in enumerate(rows))


def _collect(task: GlueTask, split: str, source: str, rows: _Rows) -> Examples:
    """The examples of rows. InputError for a missing column, a text that is none, and a label outside the allowed ones."""
    texts: list[list[str]] = [[] for _ in task.sentences]
    labels = []
    for place, row in rows:
        where = f"{source}, {place}"
        *columns, label_column = _match_columns(task, list(row), where)
        for column, sentences in zip(columns, texts, strict=True):
            if not isinstance(row[column], str):
                raise InputError(f"{_KEY}: {where}: {column} is {row[column]!r}, a text is wanted")
            sentences.append(row[column])
        labels.append(_read_label(task, row[label_column], where))
    if not labels:
        kind = RunError if source == HUB else InputError
        raise kind(f"{_KEY}: {source} holds no rows of the split {split}")
    first, *second = texts
    classes = np.array(labels, np.float32 if task.labels is None else np.int64)
    is_slice = len(labels) != task.sizes[split]
    return Examples(
        first, second[0] if second else None, classes, task, split, is_slice, source, digest([texts, labels])
    )


def _match_columns(task: GlueTask, names: Sequence[str], where: str) -> list[str]:
    """The names that the needed columns have here: the sentences, then the label. InputError for a column that is missing."""
    usual = ("sentence",) if len(task.sentences) == 1 else ("sentence1", "sentence2")
    accepted = [*zip(task.sentences, task.hub_sentences or usual, usual, strict=True)]
    accepted.append((task.label_column, "label", "label"))
    columns = []
    for choices in accepted:
        match = next((name for name in choices if name in names), None)
        if match is None:
            shown = ", ".join(name[:40] for name in names[:12])
            raise InputError(f"{_KEY}: {where}: no column '{choices[0]}'; found are {shown or 'none'}")
        columns.append(match)
    return columns


def _read_label(task: GlueTask, label: Any, where: str) -> float:
    """The id of a class by its name or id, or a score; InputError for any other label."""
    if task.labels is None:
        allowed = f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
        try:
            value: float | None = float(label)
        except (TypeError, ValueError):
            value = None
        if value is not None and not SCORES[0] <= value <= SCORES[1]:
            value = None
    else:
        allowed = ", ".join(f"{number} ({name})" for number, name in enumerate(task.labels))
        value = task.label_ids.get(label)
    if value is None:
        raise InputError(f"{_KEY}: {where}: the label is {label!r}; allowed: {allowed}")
    return value
