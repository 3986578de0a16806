"""The nine tasks of GLUE: examples from local files or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.glue import GLUE, HUB, HUB_REVISION, SCORES, GlueTask, glue_task, plain
from fullrank.core.errors import InputError, RunError
from fullrank.data.corpora import hub_rows
from fullrank.data.files import Report, existing_folder, file_digest, lines
from fullrank.files import mended, parse_json, silent

_KEY = "data.dir"
_SLICE = ".slice"
_STEMS = {
    "dev": ("dev", "dev_matched", "validation", "validation_matched"),
    "dev_mismatched": ("dev_mismatched", "validation_mismatched"),
    "test": ("test", "test_matched"),
    "ax": ("ax", "diagnostic"),
}
_HUB_SPLITS = {"dev": "validation", "dev_mismatched": "validation_mismatched", "ax": "test"}
_COLA = ["source", "label", "mark", "sentence"]  # its train and dev files have no header
_MOST_TORN = 100  # lines of the older QQP that questions with tabs or line ends have torn

_Rows = Iterable[tuple[str, Mapping[str, Any]]]  # the place of a row, such as "line 12", and its columns


@dataclass(frozen=True, eq=False)
class Examples:
    """One split of a task.

    first, second: its sentences; second is None where the task has one. labels: int64 class ids, float32 scores from 0 to 5
    in STS-B, None where only the test server knows them. ids: the file's own, else the number of the row from 0.
    is_slice: not the published number of rows, or a part of them. path: the file (None: the hub). sha256: of the file,
    or of the hub's rows. left_out: lines that were no rows (the older QQP).
    """

    first: list[str]
    second: list[str] | None
    labels: np.ndarray | None
    ids: list[str]
    task: GlueTask
    split: str
    is_slice: bool
    path: Path | None
    sha256: str
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.first)

    def require_labels(self) -> np.ndarray:
        """The labels; InputError where they are kept by the test server."""
        if self.labels is None:
            raise InputError(
                f"GLUE {self.task.folder}: the split {self.split} has no labels (the test server keeps them); measure on "
                f"{' or '.join(self.task.dev_splits)}"
            )
        return self.labels

    def take(self, rows: Sequence[int] | np.ndarray) -> Examples:
        """The examples of these rows, in this order; a slice unless it is all of them."""
        return dataclasses.replace(
            self,
            first=[self.first[i] for i in rows],
            second=None if self.second is None else [self.second[i] for i in rows],
            labels=None if self.labels is None else self.labels[rows],
            ids=[self.ids[i] for i in rows],
            is_slice=self.is_slice or sorted(rows) != list(range(len(self))),
        )

    def describe(self) -> dict[str, Any]:
        """Counts, file and labels: the share of each class; of scores, their mean and standard deviation."""
        shares: dict[str, float] | None = None
        if self.labels is not None and self.task.labels is None:
            scores = self.labels.astype(np.float64)
            shares = {"mean": float(scores.mean()), "deviation": float(scores.std())}
        elif self.labels is not None and self.task.labels is not None:
            counts = np.bincount(self.labels, minlength=self.task.outputs).tolist()
            shares = {name: count / len(self) for name, count in zip(self.task.labels, counts, strict=True)}
        return {
            "rows": len(self),
            "published": self.task.sizes[self.split],
            "is_slice": self.is_slice,
            "left_out": self.left_out,
            "file": self.path and str(self.path),
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
    """One split of a task: train, dev, test; of mnli also dev_mismatched, test_mismatched and ax.

    `folder` holds the files, or the folders of the tasks; without it the rows come from the Hugging Face hub, which keeps its
    copy in `cache`. `report` hears of a slice, of lines left out and of a download.
    Raises InputError for an unknown task or split, and for files that are missing, empty, cut short, not UTF-8, or that lack
    a column or hold a label outside the allowed ones; RunError if the hub cannot be reached.
    """
    task = glue_task(task)
    task.check_split(split)
    torn: list[str] = []
    path = None if folder is None else _find_file(task, split, Path(folder).expanduser())
    if path is None:
        source, rows = HUB, _read_hub(task, split, cache, report)
    else:
        read = _read_jsonl if path.suffix.casefold() == ".jsonl" else _read_tsv
        source, rows = str(path), read(task, split, path, torn)
    examples = _collect(task, split, source, rows)
    is_slice = not task.is_published(split, len(examples)) or (path is not None and _SLICE in path.name.casefold())
    if is_slice:
        report(
            f"GLUE {task.folder} (slice): {split} has {len(examples):,} rows, published are {task.sizes[split]:,} ({source})"
        )
    if torn:
        report(f"GLUE {task.folder}: {len(torn)} torn lines of {source} are left out")
    digest = examples.sha256 if path is None else file_digest(path, _KEY)
    return dataclasses.replace(examples, is_slice=is_slice, path=path, sha256=digest, left_out=len(torn))


# the file of a split


def locate(task: GlueTask, split: str, folder: Path) -> Path | None:
    """The file of a split in `folder`, in `folder`/<Task> or `folder`/glue/<Task>; a whole file goes before a slice."""
    existing_folder(folder, task.files[split])
    contents = [_list_files(place) for place in _list_places(task, split, folder)]
    stems = _STEMS.get(split, (split,))
    for middle in ("", _SLICE):
        names = [f"{stem}{middle}{end}" for stem in stems for end in (".tsv", ".jsonl")]
        for files in contents:
            for name in names:
                if name in files:
                    return files[name]
    return None


def _find_file(task: GlueTask, split: str, folder: Path) -> Path:
    """The file of a split; InputError if there is none, which lists the files that are there."""
    path = locate(task, split, folder)
    if path is not None:
        return path
    places = _list_places(task, split, folder)
    names = sorted(name for place in places for name in _list_files(place) if name.endswith((".tsv", ".jsonl")))
    near = f"; found there: {', '.join(names)}" if names else ""
    searched = ", ".join(map(str, places)) or f"{folder} (the folder of another task)"
    raise InputError(
        f"{_KEY}: GLUE {task.folder}: no file {task.files[split]} in {searched}{near}. Without a folder it comes from the "
        f"Hugging Face hub ({HUB})"
    )


def _list_places(task: GlueTask, split: str, folder: Path) -> list[Path]:
    """Folders that may hold the file, the nearest to the task first."""
    names = ["ax", "diagnostic", task.name] if split == "ax" else [task.name]
    subfolders = [path for path in _list_entries(folder) if path.is_dir()]
    for collection in [path for path in subfolders if plain(path.name) in ("glue", "gluedata")]:
        subfolders += [path for path in _list_entries(collection) if path.is_dir()]
    places = [path for path in subfolders if plain(path.name) in names]
    is_of_another_task = plain(folder.resolve().name) in GLUE.keys() - {task.name}
    return places if is_of_another_task else [*places, folder]


def _list_files(folder: Path) -> dict[str, Path]:
    """Files by their names in lower case."""
    return {path.name.casefold(): path for path in _list_entries(folder) if path.is_file()}


def _list_entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{_KEY}: {folder} cannot be read ({error.strerror})") from error


# rows


def _read_tsv(task: GlueTask, split: str, path: Path, torn: list[str]) -> _Rows:
    """Rows of tab-separated values, where a quotation mark is a character like any other."""
    names: list[str] = []
    for place, line in _number_lines(path):
        fields = line.split("\t")
        if not names and task.name == "cola" and split != "test" and "sentence" not in fields:
            names = _COLA
        if not names:
            _match_columns(task, split, fields, str(path))
            names = fields
        elif len(fields) == len(names):
            yield place, dict(zip(names, fields, strict=True))
        else:
            torn.append(
                f"{_KEY}: {path}, {place}: {len(fields)} {'field' if len(fields) == 1 else 'fields'}, expected are "
                f"{len(names)} ({', '.join(names)}); the file is cut short or damaged"
            )
            if task.name != "qqp" or len(torn) > _MOST_TORN:
                raise InputError(torn[0])


def _read_jsonl(task: GlueTask, split: str, path: Path, torn: list[str]) -> _Rows:
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
    rows = hub_rows(
        HUB,
        _HUB_SPLITS.get(split, split) + ("_matched" if task.name == "mnli" and split in ("dev", "test") else ""),
        configuration="ax" if split == "ax" else task.name,
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
    is_labelled = split not in task.test_splits
    digest = hashlib.sha256()
    examples = Examples([], [] if len(task.sentences) == 2 else None, None, [], task, split, False, None, "")
    labels = []
    columns: list[str] = []
    for place, row in rows:
        where = f"{source}, {place}"
        if not row.keys() >= set(columns) or not columns:
            columns = _match_columns(task, split, list(row), where)
        texts = [row[name] for name in columns[: len(task.sentences)]]
        for name, text in zip(columns, texts, strict=False):
            if not isinstance(text, str):
                raise InputError(f"{_KEY}: {where}: {name} is {text!r}, a text is wanted")
        label = _read_label(task, row[columns[-1]], where) if is_labelled else None
        name = str(next((row[key] for key in ("index", "idx", "id") if key in row), len(examples)))
        if source == HUB:
            label_text = row[columns[-1]] if is_labelled else None
            content = [place, texts[0], texts[1] if len(texts) > 1 else None, label_text, name]
            digest.update(json.dumps(content, ensure_ascii=False).encode())
        examples.first.append(texts[0])
        if examples.second is not None:
            examples.second.append(texts[1])
        labels.append(label)
        examples.ids.append(name)
    if not examples.first:
        kind = RunError if source == HUB else InputError
        raise kind(f"{_KEY}: {source} holds no rows of the split {split}")
    known = np.array(labels, np.float32 if task.labels is None else np.int64) if is_labelled else None
    return dataclasses.replace(examples, labels=known, sha256=digest.hexdigest())


def _match_columns(task: GlueTask, split: str, names: Sequence[str], where: str) -> list[str]:
    """The names that the needed columns have here: the sentences, then the label. InputError for a column that is missing."""
    usual = ("sentence",) if len(task.sentences) == 1 else ("sentence1", "sentence2")
    accepted = [*zip(task.sentences, task.hub_sentences or usual, usual, strict=True)]
    if split not in task.test_splits:
        accepted.append((task.label_column, "label", "label"))
    matches = [next((name for name in choices if name in names), None) for choices in accepted]
    official = [choices[0] for choices in accepted]
    lacking = [repr(column) for column, match in zip(official, matches, strict=True) if match is None]
    if lacking:
        shown = ", ".join(name[:40] for name in names[:12])
        raise InputError(
            f"{_KEY}: {where}: no column {', '.join(lacking)}; expected are {', '.join(official)}, found are "
            f"{shown or 'none'}{', ...' if len(names) > 12 else ''}"
        )
    return [match for match in matches if match is not None]


def _read_label(task: GlueTask, label: Any, where: str) -> float:
    """The id of a class by its name or id, or a score; InputError for any other label."""
    value: float | None = None
    if task.labels is None:
        value = _read_score(label)
    elif isinstance(label, str | int) and not isinstance(label, bool):
        value = task.label_ids.get(label)
    if value is not None:
        return value
    allowed = f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
    if task.labels is not None:
        names = ", ".join(task.labels)
        allowed = names if task.label_names else f"{', '.join(map(str, range(task.outputs)))} ({names})"
    hint = " (as in an unlabelled split)" if label in (-1, "-1") else ""
    raise InputError(f"{_KEY}: {where}: the label is {label!r}{hint}; allowed: {allowed}")


def _read_score(label: Any) -> float | None:
    """The number of a label from 0 to 5; None for any other."""
    try:
        score = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return score if SCORES[0] <= score <= SCORES[1] else None
