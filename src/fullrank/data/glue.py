"""The nine tasks of GLUE, from local files (official .tsv, .jsonl) or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.glue import GLUE, SCORES, GlueTask, glue_task
from fullrank.core.errors import InputError
from fullrank.data.files import file_digest
from fullrank.data.glue_files import KEY, SLICE, Row, find_file, read_rows
from fullrank.data.glue_hub import hub_rows

__all__ = ["GLUE", "Examples", "GlueTask", "glue_label", "glue_task", "load_glue"]

Report = Callable[[str], None]


def _quiet(_: str) -> None:
    """Says nothing."""


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

    @property
    def label(self) -> str:
        """What reports call it: `GLUE CoLA`, or `GLUE MNLI (slice)`."""
        return glue_label(self)

    def known_labels(self) -> np.ndarray:
        """The labels; InputError where they are kept by the test server."""
        if self.labels is None:
            raise InputError(
                f"GLUE {self.task.folder}: the split {self.split} has no labels (the test server keeps them); measure on "
                f"{' or '.join(self.task.dev_splits)}, or write a submission"
            )
        return self.labels

    def take(self, rows: Sequence[int] | np.ndarray) -> Examples:
        """The examples of those rows, in that order; a slice unless it is all of them."""
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
    """What reports call the data of several splits of one task: a slice if any of them is."""
    return f"GLUE {parts[0].task.folder}" + (" (slice)" if any(part.is_slice for part in parts) else "")


def load_glue(
    task: str | GlueTask,
    split: str,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    report: Report = _quiet,
) -> Examples:
    """One split of a task: train, dev, test; of mnli also dev_mismatched, test_mismatched and ax.

    `folder` holds the files, or the folders of the tasks; without it the Hugging Face hub is asked, which keeps its copy in
    `cache`. `report` is told of a slice, of lines left out and of a download.
    Raises InputError for an unknown task or split, and for files that are missing, empty, cut short, not UTF-8, or that lack
    a column or hold a label outside the allowed ones; RunError if the hub cannot be had.
    """
    task = glue_task(task)
    task.check_split(split)
    if folder is not None:
        path = find_file(task, split, Path(folder).expanduser())
        rows, left_out = read_rows(task, split, path)
        digest, source, partial = file_digest(path, KEY), str(path), SLICE in path.name.casefold()
    else:
        path, left_out, partial = None, 0, False
        rows, digest = hub_rows(task, split, None if cache is None else Path(cache), report)
        source = "the hub"
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


def _labels(task: GlueTask, rows: Sequence[Row], source: str) -> np.ndarray:
    """Class ids or scores; InputError names the first line whose label is neither."""
    found = [_score(row.label) if task.labels is None else _class(task, row.label) for row in rows]
    bad = next((i for i, label in enumerate(found) if label is None), None)
    if bad is None:
        return np.array(found, dtype=np.float32 if task.labels is None else np.int64)
    if task.labels is None:
        allowed = f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
    else:
        names = ", ".join(task.labels)
        allowed = names if task.label_names else f"{', '.join(map(str, range(len(task.labels))))} ({names})"
    row = rows[bad]
    hint = " (as in an unlabelled split)" if row.label in (-1, "-1") else ""
    raise InputError(f"{KEY}: {source}, {row.place}: the label is {row.label!r}{hint}; allowed: {allowed}")


def _class(task: GlueTask, given: Any) -> int | None:
    """The id of a class given by name or id; a file of text gives ids only where the official one does."""
    assert task.labels is not None
    if isinstance(given, str):
        if given in task.labels:
            return task.labels.index(given)
        if task.label_names or not (given.isascii() and given.isdigit()):
            return None
        given = int(given) if len(given) < 4 else -1
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(task.labels):
        return given
    return None


def _score(given: Any) -> float | None:
    """A similarity from 0 to 5."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        score = float(given)
    except (ValueError, OverflowError):
        return None
    return score if math.isfinite(score) and SCORES[0] <= score <= SCORES[1] else None
