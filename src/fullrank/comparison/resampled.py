"""Translations compared on resampled test sets, from the files `translations/<split>.txt` that runs have kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.comparison.compare import Comparison, Group
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
    left_out: list[str] = []
    splits = dict.fromkeys(split for run in compared.runs for split in run.references if split not in SPLITS)
    for group in compared.groups if compared.groups and compared.groups[0].measure is BLEU else ():
        for split in ("test", *splits):
            records += _resample_group(group, split, left_out)
        if not records:
            records += _resample_group(group, "valid", left_out)
    return records, list(dict.fromkeys(left_out))


def _resample_group(group: Group, split: str, left_out: list[str]) -> list[Record]:
    """A run whose translations are missing, or do not have the BLEU that its result states, is left out."""
    first = next((run for row in group.rows for run in row.runs if split in run.references), None)
    if first is None or len(group.rows) < 2:
        return []
    metric = metric_named(BLEU.key, **settings_of(_find_signature(first, split)))
    counts: dict[str, list[np.ndarray]] = {}
    for row in group.rows:
        for run in row.runs:
            try:
                own_counts = _count(run, first, split, metric)
                counts.setdefault(row.name, []).append(own_counts)
            except InputError as error:
                left_out.append(f"{row.name}, {run.folder if run.seed is None else f'seed {run.seed}'}: {error}")
    rows = {row.name: row for row in group.rows if row.name in counts}
    records = []
    for name, row in rows.items():
        base = rows.get(find_baseline(name, [row.name for row in group.rows]))
        if base is None or base is row or len(counts[name][0]) < 2:
            continue
        (pair,) = against_first([counts[base.name], counts[name]], metric, samples=SAMPLES, seed=SEED)
        records += _describe_pair(group, row, base, split, pair)
    return records


def _describe_pair(group: Group, row: Row, base: Row, split: str, pair: dict[str, Any]) -> list[Record]:
    labels = {"row": row.name, "split": split, "baseline": base.name}
    protocol = f"paired bootstrap: {SAMPLES:,} samples of {pair['sentences']:,} sentences, seed {SEED}"
    records = [
        Record(labels, "bleu_resampled", pair["b"], "points"),
        Record(labels, DIFFERENCE, pair["difference"], "points", (pair["low"], pair["high"]), protocol),
        Record(labels, "bleu_resampled_p", pair["p_value"]),
        Record(labels, "bleu_resampled_ahead", pair["wins"]["b"] / SAMPLES, "share of samples"),
    ]
    seeds = group.difference(row, base, BLEU, split)
    if seeds is not None and seeds.interval is not None:
        records.append(Record(labels, "bleu_seeds_difference", seeds.value, "points", seeds.interval, seeds.protocol))
    return records


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
    return remove_version(str(run.get("final", split, "bleu_signature") or ""))


def _count(run: Run, first: Run, split: str, metric: Metric) -> np.ndarray:
    """Counts (S, F) of n-grams in a run's translations; InputError if they cannot be compared with those of `first`."""
    if split not in run.references:
        raise InputError(f"it has kept no translations of the {split} split")
    if run.references[split] != first.references[split]:
        raise InputError(f"its {split} references are not those of {first.folder}")
    if _find_signature(run, split) != _find_signature(first, split):
        raise InputError(f"its BLEU has another signature than that of {first.folder}")
    counts = metric.statistics(*read_translations(run.folder, split))
    stated, score = BLEU.value(run, split), float(metric.score(counts.sum(axis=0)))
    if stated is not None and abs(score - stated) > _ROUNDING:
        raise InputError(f"its translations have a BLEU of {score:.2f}, its result says {stated:.2f}")
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
    first, signature = runs[0], _find_signature(runs[0], split)
    settings = settings_of(signature)
    measure = metric_named(metric, **settings)
    references = read_translations(first.folder, split)[1]
    counts = []
    for run in runs:
        hypotheses, own_references = read_translations(run.folder, split)
        if own_references != references:
            raise InputError(
                f"{run.folder} and {first.folder} were not scored on the same {split} references "
                f"({len(own_references):,} and {len(references):,} lines): their translations do not compare"
            )
        if _find_signature(run, split) != signature:
            raise InputError(
                f"{run.folder} and {first.folder}: their BLEU has other signatures ({_find_signature(run, split)}, "
                f"{signature}), so it does not compare"
            )
        counts.append(measure.statistics(hypotheses, references))
    resampling: dict[str, Any] = {"samples": samples, "seed": seed}
    pairs = against_first([[one] for one in counts], measure, **resampling)
    alone = [bootstrap_interval(one, measure, **resampling) for one in counts]
    return {
        "split": split, "metric": metric, **settings, **resampling, "sentences": len(references),
        "runs": [
            {"folder": str(run.folder), "name": run.name, **interval} for run, interval in zip(runs, alone, strict=True)
        ],
        "against_first": [
            {"folder": str(run.folder), "first": str(first.folder), **_drop_seeds(pair)}
            for run, pair in zip(runs[1:], pairs, strict=True)
        ],
    }  # fmt: skip


def _drop_seeds(pair: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in pair.items() if key != "seeds"}
