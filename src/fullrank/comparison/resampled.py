"""Translations compared on resampled test sets, from the files `translations/<split>.txt` that runs have kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.comparison.compare import Comparison, Group
from fullrank.comparison.measures import BLEU
from fullrank.comparison.rows import remove_version
from fullrank.comparison.runs import SPLITS, TRANSLATIONS, Run
from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import SEED, compare_resampled
from fullrank.evaluation.tasks import check_pairs, metric_named, settings_of
from fullrank.files import text_of
from fullrank.records import Record

SAMPLES = 1000  # resampled test sets
DIFFERENCE = "bleu_resampled_difference"
_ROUNDING = 0.005  # BLEU of kept translations and of the result agree to the digits shown


def resample_comparison(compared: Comparison) -> tuple[list[Record], list[str]]:
    """Paired bootstrap of BLEU of every row with its baseline, on the test split and further test sets, else validation.

    The records, and why rows could not be compared.
    """
    records: list[Record] = []
    problems: dict[str, None] = {}
    further = dict.fromkeys(split for run in compared.runs for split in run.references if split not in SPLITS)
    for group in compared.groups if compared.measure is BLEU else ():
        for split in ("test", *further, "valid"):
            if split != "valid" or not records:
                records += _resample_group(group, split, problems)
    return records, list(problems)


def _resample_group(group: Group, split: str, problems: dict[str, None]) -> Iterator[Record]:
    """A row is left out if a run of it has not kept its translations, or others than its result was made of."""
    for row in group.rows:
        base = group.baseline_of(row)
        if base is None or not any(split in run.references for run in group.runs):
            continue
        try:
            metric = metric_named(BLEU.key, **_read_settings(base.first, split))
            before, after = ([_count(run, base.first, split) for run in one.runs] for one in (base, row))
            pair = compare_resampled(before, after, metric, samples=SAMPLES)
        except InputError as error:
            problems[f"{row.name}: {error}"] = None
            continue
        labels = {"row": row.name, "split": split, "baseline": base.name}
        protocol = f"paired bootstrap: {SAMPLES:,} samples of {len(before[0]):,} sentences, seed {SEED}"
        yield Record(labels, DIFFERENCE, pair.difference, "points", (pair.low, pair.high), protocol)
        yield Record(labels, "bleu_resampled_p", pair.p_value)


def _read_settings(run: Run, split: str) -> dict[str, Any]:
    return settings_of(remove_version(str(run.get(f"final.{split}.bleu_signature") or "")))


def _count(run: Run, first: Run, split: str) -> np.ndarray:
    """Counts (S, F) of n-grams in a run's translations; InputError if they cannot be compared with those of `first`."""
    hypotheses, references = read_translations(run.folder, split)
    settings = _read_settings(run, split)
    if run.references[split] != first.references.get(split) or settings != _read_settings(first, split):
        raise InputError(f"{run.folder} and {first.folder} have other {split} references or signatures of BLEU")
    metric = metric_named(BLEU.key, **settings)
    counts = metric.statistics(hypotheses, references)
    score, stated = float(metric.score(counts.sum(axis=0))), BLEU.value(run, split)
    if stated is not None and abs(score - stated) > _ROUNDING:
        raise InputError(f"{run.folder}: its translations have a BLEU of {score:.2f}, its result says {stated:.2f}")
    return counts


def read_translations(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """Detokenised hypotheses and references that a run has kept of a split, a line each.

    InputError if a file is missing or the two have different numbers of lines.
    """
    path, reference = (folder / TRANSLATIONS / f"{split}{ending}" for ending in (".txt", ".reference.txt"))
    for file in (path, reference):
        if not file.is_file():
            raise InputError(f"{file}: no such file. Only a finished translation run keeps its translations")
    hypotheses, references = _read_lines(path), _read_lines(reference)
    try:
        check_pairs(hypotheses, references)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return hypotheses, references


def _read_lines(path: Path) -> list[str]:
    """Only \\n ends a line: a translation may hold other characters that Python counts as ends."""
    text = text_of(path.read_bytes(), str(path))
    return text.removesuffix("\n").split("\n") if text else []
