"""Translations compared on resampled test sets, from the files `translations/<split>.txt` that runs have kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import SEED, against_first, bootstrap_interval
from fullrank.evaluation.tasks import Metric, check_pairs, metric_named, settings_of
from fullrank.files import text_of
from fullrank.reporting import runs
from fullrank.reporting.figures import BLEU
from fullrank.reporting.rows import Row
from fullrank.reporting.runs import RunRecord, read_run

SAMPLES = 1000  # resampled test sets
_ROUNDING = 0.005  # BLEU of kept translations and of the result agree to the digits shown


@dataclass(frozen=True)
class Difference:
    """A row against its baseline on resampled test sets, means over the runs of each.

    low, high: 95 % interval of `difference` over sentences, for these very models; seeds_low, seeds_high: over seeds, by
    Welch, None where a row has one run. ahead: the share of the samples in which the row is above its baseline.
    """

    row: str
    score: float
    runs: int
    baseline: str
    baseline_score: float
    baseline_runs: int
    difference: float
    low: float
    high: float
    p_value: float
    ahead: float
    seeds_low: float | None
    seeds_high: float | None

    @property
    def decided(self) -> bool:
        """The interval over sentences leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Differences:
    """All rows that could be compared with their baselines on a split; `left_out` says why other runs could not."""

    split: str
    samples: int
    seed: int
    sentences: int
    rows: tuple[Difference, ...]
    left_out: tuple[str, ...]


def differences(rows: Sequence[Row], split: str) -> Differences | None:
    """Paired bootstrap of BLEU of every row with its baseline (`baseline_of`); None where nothing can be compared.

    Only rows that were measured on the same text are compared. A run whose translations are missing, or do not have the
    BLEU that its result states, is left out.
    """
    base = next((run for row in rows for run in row.runs if split in run.references), None)
    if base is None or len(rows) < 2:
        return None
    metric = metric_named(BLEU.key, **settings_of(_signature(base, split)))
    left_out: list[str] = []
    counts: dict[str, list[np.ndarray]] = {row.name: [] for row in rows}
    for row in rows:
        for run in row.runs:
            try:
                counts[row.name].append(_checked_counts(run, base, split, metric))
            except InputError as error:
                left_out.append(f"{row.name}, {run.folder if run.seed is None else f'seed {run.seed}'}: {error}")
    texts, parts = {row.name: row.text for row in rows if counts[row.name]}, {row.name: row.part for row in rows}
    baselines = {name: baseline_of(name, [one for one in counts if parts[one] == parts[name]]) for name in texts}
    compared = [name for name, other in baselines.items() if other != name and texts.get(other) == texts[name]]
    sentences = len(counts[compared[0]][0]) if compared else 0
    if sentences < 2:
        return None
    tested: dict[str, Difference] = {}
    for baseline in dict.fromkeys(baselines[name] for name in compared):
        names = [name for name in compared if baselines[name] == baseline]
        pairs = against_first([counts[name] for name in (baseline, *names)], metric, samples=SAMPLES, seed=SEED)
        for name, pair in zip(names, pairs, strict=True):
            tested[name] = Difference(
                name, pair["b"], len(counts[name]), baseline, pair["a"], len(counts[baseline]),
                pair["difference"], pair["low"], pair["high"], pair["p_value"], pair["wins"]["b"] / SAMPLES,
                pair["seeds"]["low"], pair["seeds"]["high"],
            )  # fmt: skip
    return Differences(split, SAMPLES, SEED, sentences, tuple(tested[name] for name in compared), tuple(left_out))


def baseline_of(name: str, names: Sequence[str]) -> str:
    """The row that a row is compared with: `h64-plain` for `h64-a-cross` (longest prefix), else the first row."""
    parts = name.split("-")
    for end in range(len(parts), 0, -1):
        if (baseline := "-".join([*parts[:end], "plain"])) in names and baseline != name:
            return baseline
    prefix = name.removesuffix("plain")
    has_others = any(other.startswith(prefix) and other != name for other in names)
    return name if parts[-1] == "plain" and len(parts) > 1 and has_others else names[0]


def _signature(record: RunRecord, split: str) -> str:
    """Signature of the run's BLEU without the version of sacreBLEU; empty if it has none."""
    return runs.without_version(str(record.get("final", split, "bleu_signature") or ""))


def _checked_counts(run: RunRecord, base: RunRecord, split: str, metric: Metric) -> np.ndarray:
    """Counts (S, F) of n-grams in a run's translations; InputError if they cannot be compared with those of `base`."""
    if split not in run.references:
        raise InputError(f"it has kept no translations of the {split} split")
    if run.references[split] != base.references[split]:
        raise InputError(f"its {split} references are not those of {base.folder}")
    if _signature(run, split) != _signature(base, split):
        raise InputError(f"its BLEU has another signature than that of {base.folder}")
    counts = metric.statistics(*translations(run.folder, split))
    stated, score = BLEU.final(run, split), float(metric.score(counts.sum(axis=0)))
    if stated is not None and abs(score - stated) > _ROUNDING:
        raise InputError(f"its translations have a BLEU of {BLEU.show(score)}, its result says {BLEU.show(stated)}")
    return counts


def translations(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """Detokenised hypotheses and references that a run has kept of a split, a line each.

    InputError if a file is missing or the two have different numbers of lines.
    """
    path, reference = (folder / runs.TRANSLATIONS / f"{split}{ending}" for ending in (".txt", ".reference.txt"))
    for file in (path, reference):
        if not file.is_file():
            kept = sorted(other.name for other in path.parent.glob("*.txt")) if path.parent.is_dir() else []
            there = f"; there are {', '.join(kept)}" if kept else ""
            raise InputError(f"{file}: no such file{there}. Only a finished translation run keeps its translations")
    hypotheses, references = _lines(path), _lines(reference)
    try:
        check_pairs(hypotheses, references)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return hypotheses, references


def _lines(path: Path) -> list[str]:
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
    records = [read_run(Path(folder)) for folder in folders]
    kept = [translations(record.folder, split) for record in records]
    references = kept[0][1]
    for record, (_, other) in zip(records, kept, strict=True):
        if other != references:
            raise InputError(
                f"{record.folder} and {records[0].folder} were not scored on the same {split} references "
                f"({len(other):,} and {len(references):,} lines): their translations do not compare"
            )
    signature = _signature(records[0], split)
    for record in records[1:]:
        if _signature(record, split) != signature:
            raise InputError(
                f"{record.folder} and {records[0].folder}: their BLEU has other signatures ({_signature(record, split)}, "
                f"{signature}), so it does not compare"
            )
    way = settings_of(signature)
    measure = metric_named(metric, **way)
    counts = [measure.statistics(hypotheses, references) for hypotheses, _ in kept]
    resampling: dict[str, Any] = {"samples": samples, "seed": seed}
    pairs = against_first([[one] for one in counts], measure, **resampling)
    return {
        "split": split, "metric": metric, **way, **resampling, "sentences": len(references),
        "runs": [
            {"folder": str(record.folder), "name": record.name, **bootstrap_interval(one, measure, **resampling)}
            for record, one in zip(records, counts, strict=True)
        ],
        "against_first": [
            {"folder": str(record.folder), "first": str(records[0].folder)}
            | {key: value for key, value in pair.items() if key != "seeds"}
            for record, pair in zip(records[1:], pairs, strict=True)
        ],
    }  # fmt: skip
