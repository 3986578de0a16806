"""The nine tasks of GLUE: their sentences, labels, metrics, published sizes and files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    labels: tuple[str, ...] | None
    sizes: Mapping[str, int]
    licence: str
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


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")

_ALL = (
    GlueTask(
        name="cola", title="Corpus of Linguistic Acceptability", folder="CoLA",
        sentences=("sentence",), labels=("unacceptable", "acceptable"), metrics=("matthews_correlation",),
        sizes={"train": 8_551, "dev": 1_043},
        licence="sentences from published linguistics, for research",
    ),
    GlueTask(
        name="sst2", title="Stanford Sentiment Treebank", folder="SST-2",
        sentences=("sentence",), labels=("negative", "positive"),
        sizes={"train": 67_349, "dev": 872},
        licence="film reviews, no stated licence",
    ),
    GlueTask(
        name="mrpc", title="Microsoft Research Paraphrase Corpus", folder="MRPC",
        sentences=("#1 String", "#2 String"), hub_sentences=_PAIR, label_column="Quality",
        labels=("not_equivalent", "equivalent"), metrics=("accuracy", "f1"),
        sizes={"train": 3_668, "dev": 408},
        licence="Microsoft Research, non-commercial",
    ),
    GlueTask(
        name="qqp", title="Quora Question Pairs", folder="QQP",
        sentences=("question1", "question2"), label_column="is_duplicate",
        labels=("not_duplicate", "duplicate"), metrics=("accuracy", "f1"),
        sizes={"train": 363_846, "dev": 40_430},
        licence="Quora, non-commercial",
    ),
    GlueTask(
        name="stsb", title="Semantic Textual Similarity Benchmark", folder="STS-B",
        sentences=_PAIR, label_column="score", labels=None, metrics=("pearson", "spearman"),
        sizes={"train": 5_749, "dev": 1_500},
        licence="scores CC BY-SA 4.0, texts under their own terms",
    ),
    GlueTask(
        name="mnli", title="Multi-Genre Natural Language Inference", folder="MNLI",
        sentences=_PAIR, hub_sentences=("premise", "hypothesis"), label_column="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        sizes={"train": 392_702, "dev": 9_815, "dev_mismatched": 9_832},
        licence="OANC, CC BY and others",
    ),
    GlueTask(
        name="qnli", title="Question-answering Natural Language Inference", folder="QNLI",
        sentences=("question", "sentence"), labels=_ENTAILMENT,
        sizes={"train": 104_743, "dev": 5_463},
        licence="CC BY-SA 4.0",
    ),
    GlueTask(
        name="rte", title="Recognizing Textual Entailment", folder="RTE",
        sentences=_PAIR, labels=_ENTAILMENT,
        sizes={"train": 2_490, "dev": 277},
        licence="for research",
    ),
    GlueTask(
        name="wnli", title="Winograd Natural Language Inference", folder="WNLI",
        sentences=_PAIR, labels=("not_entailment", "entailment"),
        sizes={"train": 635, "dev": 71},
        licence="CC BY 4.0",
    ),
)  # fmt: skip

GLUE: Mapping[str, GlueTask] = {task.name: task for task in _ALL}


def glue_task(name: str | GlueTask) -> GlueTask:
    """The task of that name, as `sst2` or `SST-2`; InputError suggests the nearest one."""
    if isinstance(name, GlueTask):
        return name
    plain = name.casefold().replace("-", "")
    if plain not in GLUE:
        raise InputError(f"unknown GLUE task '{name}'; {suggest(plain, GLUE, whole=True)}")
    return GLUE[plain]
