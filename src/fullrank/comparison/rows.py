"""Rows of a comparison: runs that differ only in their seed, what a row is called, and which rows read the same text."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullrank.comparison.measures import Measure
from fullrank.comparison.runs import MASKED_MODELING, SPLITS, TRANSLATION, Run

# two runs that differ only in where they ran and how they were watched are seeds of one row
CIRCUMSTANCES = {
    "train.seed", "train.device", "train.threads", "train.track", "train.log_every_steps", "train.save_every_steps",
    "train.keep_checkpoints", "train.keep_model", "eval.test",
    "data.cache", "data.dir",
}  # fmt: skip
# what decides if two figures compare, by its name in words, with the keys that hold it
_CORPUS = {"corpus": "corpus.name", "label": "corpus.label"}
_TOKENS = _CORPUS | {
    "vocabulary": "corpus.vocabulary",
    "vocabulary fingerprint": "corpus.fingerprint",
    "validation tokens": "corpus.tokens.valid",
    "test tokens": "corpus.tokens.test",
    "validation text": "corpus.sha256.valid",
    "test text": "corpus.sha256.test",
}
_PAIRS = _CORPUS | {"validation pairs": "corpus.pairs.valid", "test pairs": "corpus.pairs.test"}
_SEED_SUFFIX = re.compile(r"[-_./ ]+(seed|s)[-_ ]?\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed. slot: its colour. text: number of the text that it was measured on.

    part: the part of a table in which rows are compared: a backbone, a task of fine-tuning; empty where there is one.
    """

    name: str
    slot: int
    runs: tuple[Run, ...]
    text: int = 0
    part: str = ""

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the records of this row."""
        return {"row": self.name, "part": self.part} if self.part else {"row": self.name}

    @property
    def curve_name(self) -> str:
        """Name at curves: a dagger where validation figures while training are no next-token perplexities."""
        mark = " †" if self.first.sees_future else ""
        ending = "" if self.first.result is not None else " (unfinished)"
        return self.name + mark + ending

    def is_marked(self, measure: Measure) -> bool:
        """True if figures look like next-token perplexities and are none: they compare with no other row."""
        if measure.higher or self.first.task == MASKED_MODELING:
            return False
        return not all(run.next_token for run in self.runs)

    def values(self, measure: Measure, split: str) -> dict[int | str, float]:
        """Final figures by seed; by folder where a run has recorded none."""
        values = {}
        for run in self.runs:
            value = measure.value(run, split)
            if value is not None:
                seed = str(run.folder) if run.seed is None else run.seed
                values[seed] = value
        return values

    def mean(self, measure: Measure, split: str) -> float | None:
        """Mean of the runs' figures: of perplexities, never the exponential of a mean loss."""
        values = self.values(measure, split)
        return statistics.fmean(values.values()) if values else None


# -- the same text -----------------------------------------------------------------------------------------------------


def identify_text(run: Run) -> dict[str, Any]:
    """Identity of the text behind a figure, as far as recorded. Another training text is another model, not another text.

    Perplexities are of its tokens, BLEU is of reference translations by a signature, scores of fine-tuning are of examples.
    """
    if run.finetunes:
        digests = run.get_mapping("sha256")
        return {f"{split} examples": digest for split, digest in digests.items() if split != "train"}
    keys = _PAIRS if run.task == TRANSLATION else _TOKENS
    text = {name: run.get(key) for name, key in keys.items()}
    if run.task == TRANSLATION:
        # another version of sacreBLEU alone makes no other measurement
        signature = next(iter(find_signatures([run])), None)
        text["BLEU signature"] = signature and re.sub(r"\|version:[^|]*", "", signature)
        for split in SPLITS:
            text[f"{split} references"] = run.references.get(split)
    return {name: value for name, value in text.items() if value is not None}


def find_signatures(runs: Sequence[Run]) -> list[str]:
    """sacreBLEU's signatures of the BLEU of runs, each once."""
    signatures = [run.get(f"final.{split}.bleu_signature") for run in runs for split in SPLITS]
    return list(dict.fromkeys(str(signature) for signature in signatures if signature))


def compare_texts(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What two texts differ in; what only one of them records decides nothing."""
    if bool(first) != bool(second):
        return ["corpus (not recorded in every run)"]
    shared = [name for name in first if name in second]
    return [name for name in shared if first[name] != second[name]]


def number_texts(rows: Sequence[Sequence[Run]]) -> list[int]:
    """For each row the number of the text it was measured on; figures compare where the numbers are equal."""
    distinct: list[dict[str, Any]] = []
    numbers = []
    for row in rows:
        text = identify_text(row[0])
        equal = [index for index, other in enumerate(distinct) if not compare_texts(other, text)]
        if equal:
            numbers.append(equal[0])
        else:
            numbers.append(len(distinct))
            distinct.append(text)
    return numbers


# -- seeds of one row --------------------------------------------------------------------------------------------------


def group_by_seed(runs: Sequence[Run]) -> list[tuple[Run, ...]]:
    """Runs gathered into rows, in order of first appearance.

    A second run with the same seed (or none recorded) is no independent sample and opens a row of its own, so that a
    spread is always over different seeds. So does a run that was measured on another text.
    """
    rows: list[list[Run]] = []
    for run in runs:
        row = next((row for row in rows if _is_another_seed(run, row)), None)
        if row is None:
            rows.append([run])
        else:
            row.append(run)
    return [tuple(row) for row in rows]


def _is_another_seed(run: Run, row: Sequence[Run]) -> bool:
    if run.seed is None or any(run.seed == other.seed for other in row):
        return False
    if read_settings(run) != read_settings(row[0]):
        return False
    text = identify_text(run)
    return not any(compare_texts(identify_text(other), text) for other in row)


def read_settings(run: Run) -> dict[str, Any]:
    """The settings that make a row: recipe, row and scale, and the configuration as dotted keys."""
    settings = {key: value for key, value in run.settings.items() if key not in CIRCUMSTANCES}
    return {
        "scale": run.get("scale"),
        "recipe": run.get("recipe"),
        "row": run.get("row"),
        **settings,
    }


# -- names -------------------------------------------------------------------------------------------------------------


def name_rows(rows: Sequence[Sequence[Run]]) -> list[str]:
    """A distinct name for each row: that in the recipe, else its own without its seed."""
    names = []
    for run, *others in rows:
        own = _SEED_SUFFIX.sub("", run.name) if others else run.name
        names.append(str(run.get("row") or own))
    return number_names(names)


def number_names(names: Sequence[str]) -> list[str]:
    """Equal names made distinct by `(2)`, `(3)` ..."""
    distinct = []
    for index, name in enumerate(names):
        count = names[: index + 1].count(name)
        distinct.append(name if count == 1 else f"{name} ({count})")
    return distinct
