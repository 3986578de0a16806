"""Translations that runs have kept (`translations/<split>.txt`), and tests of differences on resampled test sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import SEED, against_first, bootstrap_interval
from fullrank.evaluation.tasks import check_pairs, metric_named
from fullrank.reporting import format
from fullrank.reporting.measure import BLEU
from fullrank.reporting.runs import SPLITS, TRANSLATIONS, RunRecord, read_run

SAMPLES = 1000
_ROUNDING = 0.005  # BLEU of kept translations and of the result agree to the digits shown


def translations(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """Detokenised hypotheses and references that a run has kept of a split, a line each.

    InputError if a file is missing or the two have different numbers of lines.
    """
    path, reference = (folder / TRANSLATIONS / f"{split}{ending}" for ending in (".txt", ".reference.txt"))
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
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error
    return text.removesuffix("\n").split("\n") if text else []


def in_lower_case(record: RunRecord, split: str) -> bool:
    """The run's BLEU ignores case, as its signature says."""
    return "case:lc" in str(record.of("final", split, "bleu_signature") or "").split("|")


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

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.baseline for row in self.rows))

    def of(self, name: str) -> Difference | None:
        """The difference of a row."""
        return next((row for row in self.rows if row.row == name), None)


Arms = Sequence[tuple[str, Sequence[RunRecord], int]]  # name, runs and text of each row


def all_differences(arms: Arms) -> tuple[Differences, ...]:
    """Differences on the test split (else on validation, where translations of it were kept), then on further test sets."""
    judged = (differences(arms, split) for split in reversed(SPLITS))
    others = dict.fromkeys(split for _, runs, _ in arms for run in runs for split in run.references)
    found = [next((one for one in judged if one is not None), None)]
    found += [differences(arms, split) for split in others if split not in SPLITS]
    return tuple(one for one in found if one is not None)


def differences(arms: Arms, split: str) -> Differences | None:
    """Paired bootstrap of BLEU of every row with its baseline (`baseline_of`); None where nothing can be compared.

    Only rows that were measured on the same text are compared. A run whose translations are missing, or do not have the
    BLEU that its result states, is left out.
    """
    base = next((run for _, runs, _ in arms for run in runs if split in run.references), None)
    if base is None or len(arms) < 2:
        return None
    lowercase = in_lower_case(base, split)
    left_out: list[str] = []
    counts: dict[str, list[np.ndarray]] = {name: [] for name, _, _ in arms}
    for name, runs, _ in arms:
        for run in runs:
            try:
                counts[name].append(_checked_counts(run, base, split, lowercase))
            except InputError as error:
                left_out.append(f"{name}, {run.folder if run.seed is None else f'seed {run.seed}'}: {error}")
    texts = {name: text for name, _, text in arms}
    groups: dict[str, list[str]] = {}
    for name in texts:
        baseline = baseline_of(name, list(texts))
        if baseline != name and texts[baseline] == texts[name] and counts[name] and counts[baseline]:
            groups.setdefault(baseline, []).append(name)
    found: dict[str, Difference] = {}
    sentences = 0
    for baseline, names in groups.items():
        sentences = len(counts[baseline][0])
        if sentences < 2:
            return None
        metric = metric_named(BLEU.key, lowercase=lowercase)
        pairs = against_first([counts[name] for name in (baseline, *names)], metric, samples=SAMPLES, seed=SEED)
        for name, pair in zip(names, pairs, strict=True):
            found[name] = Difference(
                name, pair["b"], len(counts[name]), baseline, pair["a"], len(counts[baseline]),
                pair["difference"], pair["low"], pair["high"], pair["p_value"], pair["wins"]["b"] / SAMPLES,
                pair["seeds"]["low"], pair["seeds"]["high"],
            )  # fmt: skip
    rows = tuple(found[name] for name in texts if name in found)
    return Differences(split, SAMPLES, SEED, sentences, rows, tuple(left_out)) if rows else None


def baseline_of(name: str, names: Sequence[str]) -> str:
    """The row that a row is compared with: `h64-plain` for `h64-a-cross` (longest prefix), else the first row."""
    parts = name.split("-")
    for end in range(len(parts), 0, -1):
        if (baseline := "-".join([*parts[:end], "plain"])) in names and baseline != name:
            return baseline
    prefix = name.removesuffix("plain")
    has_others = any(other.startswith(prefix) and other != name for other in names)
    return name if parts[-1] == "plain" and len(parts) > 1 and has_others else names[0]


def _checked_counts(run: RunRecord, base: RunRecord, split: str, lowercase: bool) -> np.ndarray:
    """Counts (S, F) of n-grams in a run's translations; InputError if they cannot be compared with those of `base`."""
    if split not in run.references:
        raise InputError(f"it has kept no translations of the {split} split")
    if run.references[split] != base.references[split]:
        raise InputError(f"its {split} references are not those of {base.folder}")
    if in_lower_case(run, split) != lowercase:
        raise InputError(f"case counts in only one of its BLEU and that of {base.folder}")
    metric = metric_named(BLEU.key, lowercase=lowercase)
    counts = metric.statistics(*translations(run.folder, split))
    stated, score = BLEU.final(run, split), float(metric.score(counts.sum(axis=0)))
    if stated is not None and abs(score - stated) > _ROUNDING:
        raise InputError(f"its translations have a BLEU of {BLEU.show(score)}, its result says {BLEU.show(stated)}")
    return counts


def interval(low: float | None, high: float | None) -> str:
    """Ends of an interval of differences, with their signs."""
    return format.MISSING if low is None or high is None else f"{format.points(low)} to {format.points(high)}"


def compare_runs(
    folders: Sequence[Path], split: str = "test", samples: int = SAMPLES, seed: int = SEED, metric: str = "bleu"
) -> dict[str, Any]:
    """Paired bootstrap of the runs in `folders` with the first of them, on the translations they have kept of a split.

    `runs` has for each folder its score with its own interval, `against_first` for each folder after the first the result of
    `evaluation.statistics.paired_bootstrap` (a: the first, b: this one). Case is ignored where the signatures say so.
    Raises InputError for fewer than two folders, for runs without translations, and where their references differ.
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
    cases = [in_lower_case(record, split) for record in records]
    if len(set(cases)) > 1:
        raise InputError(f"{records[cases.index(True)].folder}: its BLEU ignores case, that of the others does not")
    measure = metric_named(metric, lowercase=cases[0])
    arms = [[measure.statistics(hypotheses, references)] for hypotheses, _ in kept]
    pairs = against_first(arms, measure, samples=samples, seed=seed)
    how: dict[str, Any] = {"metric": metric, "lowercase": cases[0], "samples": samples, "seed": seed}
    return {
        "split": split, **how, "sentences": len(references),
        "runs": [
            {"folder": str(record.folder), "name": record.name, **bootstrap_interval(hypotheses, references, **how)}
            for record, (hypotheses, _) in zip(records, kept, strict=True)
        ],
        "against_first": [
            {"folder": str(record.folder), "first": str(records[0].folder)}
            | {key: value for key, value in pair.items() if key != "seeds"}
            for record, pair in zip(records[1:], pairs, strict=True)
        ],
    }  # fmt: skip
