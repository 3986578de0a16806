"""The nine tasks of GLUE: their sentences, labels, metrics, published sizes and files. They are listed in glue.yaml."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fullrank.core.errors import InputError, suggest

HUB = "nyu-mll/glue"  # on the Hugging Face hub
HUB_REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
SCORES = (0.0, 5.0)  # least and greatest similarity in STS-B


@dataclass(frozen=True, eq=False)  # there is one of each
class GlueTask:
    """One task.

    folder: its usual name, that of its folder. sentences, hub_sentences: the columns of its one or two sentences, in files and
    on the hub (None: the same). labels: names of the classes, in the order of their ids, which is the hub's; None where a score
    is predicted. metrics: the first is the one that runs are compared by. sizes: published number of rows of each split with
    labels.
    """

    name: str
    title: str
    folder: str
    sentences: tuple[str, ...]
    sizes: Mapping[str, int]
    licence: str
    labels: tuple[str, ...] | None = None
    hub_sentences: tuple[str, ...] | None = None
    label_column: str = "label"
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def outputs(self) -> int:
        """Numbers that a model of the task gives: one for each class, or a score."""
        return 1 if self.labels is None else len(self.labels)

    def read_label(self, label: Any, where: str) -> float:
        """The id of a class by its name or id, or a score; InputError, which says `where`, for any other label."""
        if self.labels is None:
            allowed = f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
            try:
                score = float(label)
            except ValueError:
                score = math.nan
            if SCORES[0] <= score <= SCORES[1]:
                return score
        else:
            allowed = ", ".join(f"{number} ({name})" for number, name in enumerate(self.labels))
            for number, name in enumerate(self.labels):
                if label in (name, number, str(number)):
                    return number
        raise InputError(f"{where}: the label is {label!r}; allowed: {allowed}")

    @property
    def files(self) -> dict[str, str]:
        """The official file of each split."""
        files = {split: f"{self.folder}/{split}.tsv" for split in self.sizes}
        return files | {"dev": "MNLI/dev_matched.tsv"} if self.name == "mnli" else files

    def check_split(self, split: str) -> None:
        """InputError for a split that the task does not have."""
        if split not in self.sizes:
            near = suggest(split, self.sizes, whole=True)
            raise InputError(f"GLUE {self.folder} has no split '{split}'; {near}")


def _read_tasks() -> dict[str, GlueTask]:
    tasks = {}
    for name, entry in yaml.safe_load(Path(__file__).with_name("glue.yaml").read_bytes()).items():
        columns: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        tasks[name] = GlueTask(name=name, **columns)
    return tasks


GLUE: Mapping[str, GlueTask] = _read_tasks()


def glue_task(name: str | GlueTask) -> GlueTask:
    """The task of that name, as `sst2` or `SST-2`; InputError suggests the nearest one."""
    if isinstance(name, GlueTask):
        return name
    plain = name.casefold().replace("-", "")
    if plain not in GLUE:
        raise InputError(f"unknown GLUE task '{name}'; {suggest(plain, GLUE, whole=True)}")
    return GLUE[plain]
