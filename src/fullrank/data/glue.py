"""The nine tasks of GLUE: examples from local files or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fullrank.config.glue import GLUE, HUB, HUB_REVISION, SCORES, GlueTask, glue_task, plain
from fullrank.core.errors import InputError, RunError
from fullrank.data.corpora import hub_rows
from fullrank.data.files import Report, existing_folder, file_digest, lines
from fullrank.files import mended, parse_json

_KEY = "data.dir"
_SLICE = ".slice"
_OUTER = ("glue", "gluedata")  # folders that hold those of the tasks
_STEMS = {
    "train": ("train",),
    "dev": ("dev", "dev_matched", "validation", "validation_matched"),
    "dev_mismatched": ("dev_mismatched", "validation_mismatched"),
    "test": ("test", "test_matched"),
    "test_mismatched": ("test_mismatched",),
    "ax": ("ax", "diagnostic"),
}
_HUB_SPLITS = {"dev": "validation", "dev_mismatched": "validation_mismatched", "ax": "test"}
_IDS = ("index", "idx", "id")
_COLA = ["source", "label", "mark", "sentence"]  # its train and dev files have no header
_MOST_TORN = 100  # lines of the older QQP that questions with tabs or line ends have torn


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

    def known_labels(self) -> np.ndarray:
        """The labels; InputError where they are kept by the test server."""
        if self.labels is None:
            raise InputError(
                f"GLUE {self.task.folder}: the split {self.split} has no labels (the test server keeps them); measure on "
                f"{' or '.join(self.task.dev_splits)}"
            )
        return self.labels

    def take(self, rows: Sequence[int] | np.ndarray) -> Examples:
        """The examples of these rows, in this order; a slice unless it is all of them."""
        chosen = np.asarray(rows, dtype=np.int64)
        if chosen.ndim != 1 or len(chosen) == 0 or chosen.min() < 0 or chosen.max() >= len(self):
            raise InputError(f"GLUE {self.task.folder} {self.split}: rows are from 0 to {len(self) - 1}, at least one")
        return dataclasses.replace(
            self,
            first=[self.first[i] for i in chosen],
            second=None if self.second is None else [self.second[i] for i in chosen],
            labels=None if self.labels is None else self.labels[chosen],
            ids=[self.ids[i] for i in chosen],
            is_slice=self.is_slice or len(np.unique(chosen)) != len(self) or len(chosen) != len(self),
        )


def glue_label(*parts: Examples) -> str:
    """Name in reports of splits of one task, `GLUE CoLA`, or `GLUE MNLI (slice)`: a slice if any of them is."""
    return f"GLUE {parts[0].task.folder}" + (" (slice)" if any(part.is_slice for part in parts) else "")


def load_glue(
    task: str | GlueTask,
    split: str,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    report: Report = lambda line: None,
) -> Examples:
    """One split of a task: train, dev, test; of mnli also dev_mismatched, test_mismatched and ax.

    `folder` holds the files, or the folders of the tasks; without it the rows come from the Hugging Face hub, which keeps its
    copy in `cache`. `report` hears of a slice, of lines left out and of a download.
    Raises InputError for an unknown task or split, and for files that are missing, empty, cut short, not UTF-8, or that lack
    a column or hold a label outside the allowed ones; RunError if the hub cannot be reached.
    """
    task = glue_task(task)
    task.check_split(split)
    if folder is not None:
        path = _find(task, split, Path(folder).expanduser())
        rows, left_out = _read_file(task, split, path)
        digest, source, partial = file_digest(path, _KEY), str(path), _SLICE in path.name.casefold()
    else:
        path, left_out, source, partial = None, 0, "the hub", False
        rows, digest = _read_hub(task, split, None if cache is None else Path(cache), report)
    partial = partial or not task.is_published(split, len(rows))
    if partial:
        report(
            f"GLUE {task.folder} (slice): {split} has {len(rows):,} rows, published are {task.sizes[split]:,} ({source})"
        )
    if left_out:
        report(f"GLUE {task.folder}: {left_out} torn lines of {source} are left out")
    return Examples(
        first=[row.first for row in rows],
        second=[row.second or "" for row in rows] if len(task.sentences) == 2 else None,
        labels=None if split in task.test_splits else _labels(task, rows, source),
        ids=[row.id for row in rows],
        task=task,
        split=split,
        is_slice=partial,
        path=path,
        sha256=digest,
        left_out=left_out,
    )


# the file of a split


def locate(task: GlueTask, split: str, folder: Path) -> Path | None:
    """The file of a split in `folder`, in `folder`/<Task> or `folder`/glue/<Task>; a whole file goes before a slice."""
    existing_folder(folder, task.files[split])
    contents = [_files(inner) for inner in _folders(task, split, folder)]
    for middle in ("", _SLICE):
        names = [f"{stem}{middle}{end}" for stem in _STEMS[split] for end in (".tsv", ".jsonl")]
        for files in contents:
            if path := next((files[name] for name in names if name in files), None):
                return path
    return None


def _find(task: GlueTask, split: str, folder: Path) -> Path:
    """The file of a split; InputError if there is none, which lists the files that are there."""
    if path := locate(task, split, folder):
        return path
    folders = list(_folders(task, split, folder))
    names = sorted({name for inner in folders for name in _files(inner) if name.endswith((".tsv", ".jsonl"))})
    near = f"; found there: {', '.join(names)}" if names else ""
    searched = ", ".join(map(str, folders)) if folders else f"{folder} (the folder of another task)"
    raise InputError(
        f"{_KEY}: GLUE {task.folder}: no file {task.files[split]} in {searched}{near}. Without a folder it comes from the "
        f"Hugging Face hub ({HUB})"
    )


def _folders(task: GlueTask, split: str, folder: Path) -> Iterator[Path]:
    """Folders that may hold the file, the nearest to the task first."""
    names = ("ax", "diagnostic", task.name) if split == "ax" else (task.name,)
    inner = [path for path in _entries(folder) if path.is_dir() and plain(path.name) in _OUTER]
    for folders in ([path for path in _entries(outer) if path.is_dir()] for outer in (folder, *inner)):
        yield from (path for name in names for path in folders if plain(path.name) == name)
    if plain(folder.resolve().name) not in set(GLUE) - {task.name}:
        yield folder


def _files(folder: Path) -> dict[str, Path]:
    """Files by their names in lower case."""
    return {path.name.casefold(): path for path in _entries(folder) if path.is_file()}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{_KEY}: {folder} cannot be read ({error.strerror})") from error


# rows


class _Row(NamedTuple):
    """One example as it stands in a file. `place` is "line 12"; `label` is None in a test split."""

    place: str
    first: str
    second: str | None
    label: Any
    id: str


def _read_file(task: GlueTask, split: str, path: Path) -> tuple[list[_Row], int]:
    """The rows of a file, and the number of lines left out: only the older QQP holds lines that are no rows."""
    filled = ((number, line) for number, line in enumerate(lines(path, _KEY), start=1) if line)
    rows: list[_Row] = []
    torn: list[str] = []
    for number, content in (_jsonl if path.suffix.casefold() == ".jsonl" else _tsv)(task, split, path, filled):
        if isinstance(content, str):
            torn.append(f"{_KEY}: {path}, line {number}: {content}")
            if task.name != "qqp" or len(torn) > _MOST_TORN:
                raise InputError(torn[0])
        else:
            rows.append(_row(task, split, content, f"line {number}", len(rows), str(path)))
    if not rows:
        raise InputError(f"{_KEY}: {path} holds no rows")
    return rows, len(torn)


# the lines that are not empty, as columns and values by their number; of a line that is no row, its fault
_Lines = Iterator[tuple[int, str]]
_Contents = Iterator[tuple[int, Mapping[str, Any] | str]]


def _tsv(task: GlueTask, split: str, path: Path, numbered: _Lines) -> _Contents:
    """Rows of tab-separated values, where a quotation mark is a character like any other."""
    names: list[str] = []
    rows = 0
    for number, line in numbered:
        fields = line.split("\t")
        if not names:
            if None not in _columns(task, split, tuple(fields)):
                names = fields
                continue
            if task.name != "cola" or split in task.test_splits:
                raise _lacking(task, split, tuple(fields), str(path))
            names = _COLA
        if len(fields) == len(names):
            rows += 1
            yield number, dict(zip(reversed(names), reversed(fields), strict=True))
        else:
            count = f"{len(fields)} {'field' if len(fields) == 1 else 'fields'}"
            begun = rows or names is not _COLA
            why = "the file is cut short or damaged" if begun else "or a header with sentence and label"
            yield number, f"{count}, expected are {len(names)} ({', '.join(names)}); {why}"


def _jsonl(task: GlueTask, split: str, path: Path, numbered: _Lines) -> _Contents:
    """Rows of JSON objects, one a line, with the hub's or the official names of columns."""
    for number, line in numbered:
        try:
            content = parse_json(line)
        except ValueError:
            content = None
            fault = "not a JSON object; the file is cut short or damaged"
        else:
            fault = f"not a JSON object but {line[:40]}"
        if not isinstance(content, Mapping):
            raise InputError(f"{_KEY}: {path}, line {number}: {fault}")
        yield number, content


def _read_hub(task: GlueTask, split: str, cache: Path | None, report: Report) -> tuple[list[_Row], str]:
    """The rows of a split on the Hugging Face hub, and the sha256 of their text; errors as in `hub_rows`."""
    contents = hub_rows(
        HUB,
        _HUB_SPLITS.get(split, split) + ("_matched" if task.name == "mnli" and split in ("dev", "test") else ""),
        configuration="ax" if split == "ax" else task.name,
        revision=HUB_REVISION,
        cache=cache,
        what=f"GLUE {task.folder}",
        licence=task.licence,
        local=f"give a local folder that holds {task.folder}/train.tsv and so on: --from DIR (data.dir=DIR)",
        report=report,
    )
    rows = [_row(task, split, content, f"row {i}", i, HUB) for i, content in enumerate(contents)]
    if not rows:
        raise RunError(f"GLUE {task.folder}: {HUB} holds no rows of the split {split}")
    text = "".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return rows, hashlib.sha256(text.encode()).hexdigest()


def _row(task: GlueTask, split: str, content: Mapping[str, Any], place: str, count: int, source: str) -> _Row:
    content = mended(content)
    there = tuple(content)
    names = [name for name in _columns(task, split, there) if name is not None]
    if len(names) != len(_accepted(task, split)):
        raise _lacking(task, split, there, f"{source}, {place}")
    label = None if split in task.test_splits else content[names.pop()]
    for name in names:
        if not isinstance(content[name], str):
            raise InputError(f"{_KEY}: {source}, {place}: {name} is {content[name]!r}, a text is wanted")
    first, second = content[names[0]], content[names[1]] if len(names) == 2 else None
    return _Row(place, first, second, label, str(next((content[name] for name in _IDS if name in content), count)))


def _accepted(task: GlueTask, split: str) -> list[tuple[str, ...]]:
    """Accepted names of each column that is needed, the official one first: sentences, then the label."""
    common = ("sentence",) if len(task.sentences) == 1 else ("sentence1", "sentence2")
    columns: list[tuple[str, ...]] = list(
        zip(task.sentences, task.hub_sentences or task.sentences, common, strict=True)
    )
    return columns if split in task.test_splits else [*columns, (task.label_column, "label")]


@lru_cache(maxsize=8)
def _columns(task: GlueTask, split: str, there: tuple[str, ...]) -> tuple[str | None, ...]:
    """The names that the needed columns have here; None for a column that is missing."""
    return tuple(next((name for name in names if name in there), None) for names in _accepted(task, split))


def _lacking(task: GlueTask, split: str, there: tuple[str, ...], source: str) -> InputError:
    official, names = [some[0] for some in _accepted(task, split)], _columns(task, split, there)
    lacking = (repr(column) for column, name in zip(official, names, strict=True) if name is None)
    shown = ", ".join(name[:40] for name in there[:12]) + (", ..." if len(there) > 12 else "")
    return InputError(
        f"{_KEY}: {source}: no column {', '.join(lacking)}; expected are {', '.join(official)}, found are {shown or 'none'}"
    )


def _labels(task: GlueTask, rows: Sequence[_Row], source: str) -> np.ndarray:
    """Class ids or scores; InputError names the first line whose label is neither."""
    labels = [read_score(row.label) if task.labels is None else _class(task, row.label) for row in rows]
    if None not in labels:
        return np.array(labels, dtype=np.float32 if task.labels is None else np.int64)
    if task.labels is None:
        allowed = f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
    else:
        names = ", ".join(task.labels)
        allowed = names if task.label_names else f"{', '.join(map(str, range(len(task.labels))))} ({names})"
    row = rows[labels.index(None)]
    hint = " (as in an unlabelled split)" if row.label in (-1, "-1") else ""
    raise InputError(f"{_KEY}: {source}, {row.place}: the label is {row.label!r}{hint}; allowed: {allowed}")


def _class(task: GlueTask, label: Any) -> int | None:
    """The id of a class by its name or id; a file of text gives ids only where the official one does."""
    names = task.labels or ()
    if isinstance(label, str):
        if label in names:
            return names.index(label)
        if task.label_names or not (label.isascii() and label.isdigit() and len(label) < 4):
            return None
        label = int(label)
    is_id = isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names)
    return label if is_id else None


def read_score(label: Any) -> float | None:
    """The number of a label from 0 to 5; None for any other."""
    try:
        score = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return score if SCORES[0] <= score <= SCORES[1] else None


# counts of a folder, for `fullrank data prepare`


def glue_overview(
    task: str | GlueTask, folder: str | Path | None, cache: str | Path | None, report: Report
) -> dict[str, Any]:
    """Counts, files and shares of labels of all splits. Only the training split has to be there; `missing` names the others.

    Raises the errors of `load_glue`.
    """
    task = glue_task(task)
    missing: list[str] = []
    parts: list[Examples] = []
    for split in task.splits:
        if folder is not None and split != "train" and locate(task, split, Path(folder).expanduser()) is None:
            missing.append(split)
        else:
            parts.append(load_glue(task, split, folder, cache, report))
    return {
        "name": f"glue/{task.name}",
        "label": glue_label(*parts),
        "title": task.title,
        "is_slice": any(part.is_slice for part in parts),
        "labels": None if task.labels is None else list(task.labels),
        "metrics": list(task.metrics),
        "splits": {
            part.split: {
                "rows": len(part),
                "published": task.sizes[part.split],
                "is_slice": part.is_slice,
                "left_out": part.left_out,
                "file": None if part.path is None else str(part.path),
                "sha256": part.sha256,
                "labels": _shares(part),
            }
            for part in parts
        },
        "missing": missing,
    }


def _shares(part: Examples) -> dict[str, float] | None:
    """The share of each class; of scores, their mean and standard deviation; None without labels."""
    if part.labels is None:
        return None
    if part.task.labels is None:
        scores = part.labels.astype(np.float64)
        return {"mean": float(scores.mean()), "deviation": float(scores.std())}
    counts = np.bincount(part.labels, minlength=len(part.task.labels))
    return {name: int(count) / len(part) for name, count in zip(part.task.labels, counts, strict=True)}


def overview_lines(overview: Mapping[str, Any]) -> list[str]:
    """`glue_overview` for people: a line for the task, and one for each split."""
    kind = "scores from 0 to 5" if overview["labels"] is None else f"{len(overview['labels'])} classes"
    table = []
    for split, content in overview["splits"].items():
        shares = content["labels"]
        if shares is None:
            text = "no labels"
        elif overview["labels"] is None:
            text = f"mean {shares['mean']:.2f}, standard deviation {shares['deviation']:.2f}"
        else:
            text = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        count = "as published" if not content["is_slice"] else f"published {content['published']:,}"
        table.append((split, f"{content['rows']:,}", f"rows ({count})", text, content["file"] or "the hub"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"{overview['label']}, {overview['title']}: {kind}, {', '.join(overview['metrics'])}",
        *(
            f"  {split:<{widths[0]}}  {rows:>{widths[1]}} {count:<{widths[2]}}  {text:<{widths[3]}}  {file}"
            for split, rows, count, text, file in table
        ),
        *([f"  not there: {', '.join(overview['missing'])}"] if overview["missing"] else []),
    ]
