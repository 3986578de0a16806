"""The translations that runs have kept, `translations/<split>.txt`, and how two runs differ on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import against_first, bootstrap_interval
from fullrank.evaluation.tasks import check_pairs, metric_named
from fullrank.reporting.results import TRANSLATIONS, RunRecord, mapping, read_run


@dataclass(frozen=True)
class Translations:
    """Detokenised hypotheses of a run on a split, and the references that they were scored with, a line each."""

    hypotheses: tuple[str, ...]
    references: tuple[str, ...]


def translations(folder: Path, split: str) -> Translations:
    """What a run has kept of a split; InputError if it is missing or its two files have different numbers of lines."""
    path, reference = translation_files(folder, split)
    for file in (path, reference):
        if not file.is_file():
            kept = sorted(other.name for other in path.parent.glob("*.txt")) if path.parent.is_dir() else []
            there = f"; there are {', '.join(kept)}" if kept else ""
            raise InputError(f"{file}: no such file{there}. Only a finished translation run keeps its translations")
    found = Translations(_lines(path), _lines(reference))
    try:
        check_pairs(found.hypotheses, found.references)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return found


def translation_files(folder: Path, split: str) -> tuple[Path, Path]:
    """Where a run keeps hypotheses and references of a split."""
    return folder / TRANSLATIONS / f"{split}.txt", folder / TRANSLATIONS / f"{split}.reference.txt"


def in_lower_case(record: RunRecord, split: str) -> bool:
    """Whether the run's BLEU ignores case, as its signature says."""
    final = mapping(mapping(mapping(record.result).get("final")).get(split))
    return "case:lc" in str(final.get("bleu_signature") or "").split("|")


def counts(folder: Path, split: str, metric: str, lowercase: bool) -> np.ndarray:
    """What `metric` counts in each sentence of a run, (S, F); counted once as long as the files stay as they are."""
    stamps = tuple((str(path), _stamp(path)) for path in translation_files(folder, split))
    return _counts(folder, split, metric, lowercase, stamps)


@lru_cache(maxsize=64)
def _counts(folder: Path, split: str, metric: str, lowercase: bool, stamps: object) -> np.ndarray:
    found = translations(folder, split)
    return metric_named(metric, lowercase=lowercase).statistics(found.hypotheses, found.references)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def _lines(path: Path) -> tuple[str, ...]:
    """Only \\n ends a line: a translation may hold other characters that Python counts as ends."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error
    return tuple(text.removesuffix("\n").split("\n")) if text else ()


def compare_runs(
    folders: Sequence[Path], split: str = "test", samples: int = 1000, seed: int = 12345, metric: str = "bleu"
) -> dict[str, Any]:
    """Paired bootstrap of the runs in `folders` with the first of them, on the translations they have kept of a split.

    `runs` has for each folder its score with its own interval, `against_first` for each folder after the first what
    `paired_bootstrap` gives (a: the first, b: this one). Case is ignored where the runs' signatures say so.
    Raises InputError for fewer than two folders, for runs without translations, and where their references differ.
    """
    if len(folders) < 2:
        raise InputError(f"at least two runs are compared, given {len(folders)}")
    records = [read_run(Path(folder)) for folder in folders]
    found = [translations(record.folder, split) for record in records]
    for record, other in zip(records[1:], found[1:], strict=True):
        if other.references != found[0].references:
            raise InputError(
                f"{record.folder} and {records[0].folder} were not scored on the same {split} references "
                f"({len(other.references):,} and {len(found[0].references):,} lines): their translations do not compare"
            )
    cases = [in_lower_case(record, split) for record in records]
    if len(set(cases)) > 1:
        raise InputError(f"{records[cases.index(True)].folder}: its BLEU ignores case, that of the others does not")
    lowercase = cases[0]
    arms = [[counts(record.folder, split, metric, lowercase)] for record in records]
    pairs = against_first(arms, metric_named(metric, lowercase=lowercase), samples=samples, seed=seed)
    return {
        "split": split, "metric": metric, "lowercase": lowercase, "samples": samples, "seed": seed,
        "sentences": len(found[0].references),
        "runs": [
            {"folder": str(record.folder), "name": record.name}
            | bootstrap_interval(
                one.hypotheses, one.references, samples=samples, seed=seed, metric=metric, lowercase=lowercase
            )
            for record, one in zip(records, found, strict=True)
        ],
        "against_first": [
            {"folder": str(record.folder), "first": str(records[0].folder)}
            | {key: value for key, value in pair.items() if key != "seeds"}
            for record, pair in zip(records[1:], pairs, strict=True)
        ],
    }  # fmt: skip
