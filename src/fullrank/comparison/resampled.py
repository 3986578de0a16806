"""Translations compared on resampled test sets, from the files `translations/<split>.txt` that runs have kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.comparison.compare import Comparison, Group, compare_rows
from fullrank.comparison.measures import BLEU
from fullrank.comparison.rows import Row, remove_version
from fullrank.comparison.runs import SPLITS, TRANSLATIONS, Run, read_run
from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import SEED, against_first, bootstrap_interval
from fullrank.evaluation.tasks import Metric, check_pairs, metric_named, settings_of
from fullrank.files import text_of
from fullrank.records import Record

SAMPLES = 1000  # resampled test sets
_ROUNDING = 0.005  # BLEU of kept translations and of the result agree to the digits shown
DIFFERENCE = "bleu_resampled_difference"


def resample_comparison(compared: Comparison) -> tuple[list[Record], list[str]]:
    """Paired bootstrap of BLEU of every row with its baseline, on the test split (else validation) and further test sets.

    The records, and why other runs could not be compared.
    """
    records: list[Record] = []
    problems: list[str] = []
    if compared.measure is not BLEU:
        return records, problems
    splits = dict.fromkeys(split for run in compared.runs for split in run.references if split not in SPLITS)
    for group in compared.groups:
        for split in ("test", *splits):
            records += _resample_group(group, split, problems)
        if not records:
            records += _resample_group(group, "valid", problems)
    return records, list(dict.fromkeys(problems))


def _resample_group(group: Group, split: str, problems: list[str]) -> list[Record]:
    """A run whose translations are missing, or do not have the BLEU that its result states, is left out."""
    first = next((run for run in group.runs if split in run.references), None)
    if first is None or len(group.rows) < 2:
        return []
    metric = metric_named(BLEU.key, **settings_of(_find_signature(first, split)))
    counts: dict[str, list[np.ndarray]] = {}
    for row in group.rows:
        for run in row.runs:
            try:
                run_counts = _count(run, first, split, metric)
                _check_score(run, split, float(metric.score(run_counts.sum(axis=0))))
                counts.setdefault(row.name, []).append(run_counts)
            except InputError as error:
                problems.append(f"{row.name}, {run.folder if run.seed is None else f'seed {run.seed}'}: {error}")
    rows = {row.name: row for row in group.rows if row.name in counts}
    records: list[Record] = []
    for name, row in rows.items():
        base = rows.get(find_baseline(name, [row.name for row in group.rows]))
        if base is not None and base is not row and len(counts[name][0]) > 1:
            (pair,) = against_first([counts[base.name], counts[name]], metric, samples=SAMPLES, seed=SEED)
            records += _describe_pair(row, base, split, pair)
    return records


def _check_score(run: Run, split: str, score: float) -> None:
    stated = BLEU.value(run, split)
    if stated is not None and abs(score - stated) > _ROUNDING:
        raise InputError(f"its translations have a BLEU of {score:.2f}, its result says {stated:.2f}")


def _describe_pair(row: Row, base: Row, split: str, pair: dict[str, Any]) -> Iterator[Record]:
    labels = {"row": row.name, "split": split, "baseline": base.name}
    protocol = f"paired bootstrap: {SAMPLES:,} samples of {pair['sentences']:,} sentences, seed {SEED}"
    yield Record(labels, "bleu_resampled", pair["b"], "points")
    yield Record(labels, DIFFERENCE, pair["difference"], "points", (pair["low"], pair["high"]), protocol)
    yield Record(labels, "bleu_resampled_p", pair["p_value"])
    yield Record(labels, "bleu_resampled_ahead", pair["wins"]["b"] / SAMPLES, "share of samples")
    seeds = compare_rows(row, base, BLEU, split)
    if seeds is not None and seeds.interval is not None:
        yield Record(labels, "bleu_seeds_difference", seeds.value, "points", seeds.interval, seeds.protocol)


def find_baseline(name: str, names: Sequence[str]) -> str:
    """The row that a row is compared with: `h64-plain` for `h64-a-cross` (longest prefix), else the first row."""
    parts = name.split("-")
    for end in range(len(parts), 0, -1):
        baseline = "-".join([*parts[:end], "plain"])
        if baseline in names and baseline != name:
            return baseline
    prefix = name.removesuffix("plain")
    has_others = any(other.startswith(prefix) and other != name for other in names)
    return name if parts[-1] == "plain" and len(parts) > 1 and has_others else names[0]


def _find_signature(run: Run, split: str) -> str:
    """Signature of the run's BLEU without the version of sacreBLEU; empty if it has none."""
    return remove_version(str(run.get(f"final.{split}.bleu_signature") or ""))


def _count(run: Run, first: Run, split: str, metric: Metric) -> np.ndarray:
    """Counts (S, F) of n-grams in a run's translations; InputError if they cannot be compared with those of `first`."""
    hypotheses, references = read_translations(run.folder, split)
    if run.references[split] != first.references[split]:
        raise InputError(
            f"{run.folder} and {first.folder} were not scored on the same {split} references: their translations do not "
            "compare"
        )
    signatures = [_find_signature(one, split) for one in (run, first)]
    if signatures[0] != signatures[1]:
        raise InputError(f"{run.folder} and {first.folder}: their BLEU has other signatures ({', '.join(signatures)})")
    return metric.statistics(hypotheses, references)


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


def compare_runs(
    folders: Sequence[Path], split: str = "test", samples: int = SAMPLES, seed: int = SEED, metric: str = "bleu"
) -> dict[str, Any]:
    """Paired bootstrap of the runs in `folders` with the first of them, on the translations they have kept of a split.

    `runs` has for each folder its score with its own interval, `against_first` for each folder after the first the result of
    `evaluation.statistics.against_first` (a: the first, b: this one). Case and tokens are as the signatures say.
    Raises InputError for fewer than two folders, for runs without translations, and where references or signatures differ.
    """
    if len(folders) < 2:
        raise InputError(f"at least two runs are compared, given {len(folders)}")
    runs = [read_run(Path(folder)) for folder in folders]
    first = runs[0]
    settings = settings_of(_find_signature(first, split))
    measure = metric_named(metric, **settings)
    counts = [_count(run, first, split, measure) for run in runs]
    resampling: dict[str, Any] = {"samples": samples, "seed": seed}
    scores = []
    for run, run_counts in zip(runs, counts, strict=True):
        interval = bootstrap_interval(run_counts, measure, **resampling)
        scores.append({"folder": str(run.folder), "name": run.name, **interval})
    pairs = []
    for run, pair in zip(runs[1:], against_first([[one] for one in counts], measure, **resampling), strict=True):
        del pair["seeds"]
        pairs.append({"folder": str(run.folder), "first": str(first.folder), **pair})
    return {
        "split": split, "metric": metric, **settings, **resampling, "sentences": len(counts[0]), "runs": scores,
        "against_first": pairs,
    }  # fmt: skip
