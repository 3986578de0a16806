"""Whether rows differ by more than the choice of test sentences: every row against the first, from the translations kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import against_first
from fullrank.evaluation.tasks import metric_named
from fullrank.reporting import format
from fullrank.reporting.measure import BLEU
from fullrank.reporting.results import SPLITS, RunRecord
from fullrank.reporting.table import Comparison, Row
from fullrank.reporting.translations import counts, in_lower_case

SAMPLES, SEED = 1000, 12345
_AGREE = 0.005  # BLEU of kept translations and of the result: the digits shown


@dataclass(frozen=True)
class Difference:
    """A row (b) against its baseline (a) on resampled test sets, means over the runs of each.

    low, high: 95 % interval of `difference` over sentences, for these very models; seeds_low, seeds_high: over seeds, by
    Welch, None where a row has one run. `ahead`: the share of the samples in which the row is above its baseline.
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
        """Whether the interval over sentences leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Differences:
    """All rows that could be compared with their baselines, and in `left_out` why other runs could not, a sentence each."""

    split: str
    samples: int
    seed: int
    sentences: int
    rows: tuple[Difference, ...]
    left_out: tuple[str, ...]

    @property
    def baselines(self) -> tuple[str, ...]:
        """The rows that others are compared with."""
        return tuple(dict.fromkeys(row.baseline for row in self.rows))

    def of(self, row: Row) -> Difference | None:
        """What is known of a row."""
        return next((found for found in self.rows if found.row == row.name), None)


def all_differences(compared: Comparison) -> tuple[Differences, ...]:
    """`differences` on the split by which rows are judged, then on further test sets."""
    others = dict.fromkeys(split for row in compared.rows for run in row.runs for split in run.references)
    splits = (None, *(split for split in others if split not in SPLITS))
    return tuple(found for split in splits if (found := differences(compared, split)) is not None)


def differences(compared: Comparison, split: str | None = None) -> Differences | None:
    """Paired bootstrap of BLEU of every row with its baseline; None where there is nothing to compare.

    The baseline is the row `<prefix>-plain` with the longest prefix of the row's name, if there is one, else the first row.
    Only rows that were measured on the same text are compared: on the test split, else on the validation split, where they
    have kept translations of it. A run whose translations are missing, or do not have the BLEU that its result states, is
    left out.
    """
    if compared.measure is not BLEU or len(compared.rows) < 2:
        return None
    if split is None:
        tests = (differences(compared, name) for name in reversed(SPLITS))
        return next((found for found in tests if found is not None), None)
    base = next((run for row in compared.rows for run in row.runs if split in run.references), None)
    if base is None:
        return None
    lowercase, left_out = in_lower_case(base, split), list[str]()
    arms = {row.name: _arm(row, base, split, lowercase, left_out) for row in compared.rows}
    groups: dict[str, list[str]] = {}
    texts = {row.name: row.text for row in compared.rows}
    for row in compared.rows:
        baseline = baseline_of(row.name, list(arms))
        if baseline != row.name and texts[baseline] == row.text and arms[row.name] and arms[baseline]:
            groups.setdefault(baseline, []).append(row.name)
    metric, found, sentences = metric_named(BLEU.key, lowercase=lowercase), dict[str, Difference](), 0
    for baseline, names in groups.items():
        by_row = [arms[name] for name in (baseline, *names)]
        sentences = len(by_row[0][0])
        if sentences < 2:
            return None
        pairs = against_first(by_row, metric, samples=SAMPLES, seed=SEED)
        found |= {
            name: _of_pair(name, len(arms[name]), baseline, len(arms[baseline]), pair)
            for name, pair in zip(names, pairs, strict=True)
        }
    rows = tuple(found[row.name] for row in compared.rows if row.name in found)
    return Differences(split, SAMPLES, SEED, sentences, rows, tuple(left_out)) if rows else None


def baseline_of(name: str, names: Sequence[str]) -> str:
    """The row that a row is compared with: `h64-plain` for `h64-a-cross`, and the first where there is none of its kind."""
    parts = name.split("-")
    for end in range(len(parts), 0, -1):
        if (baseline := "-".join([*parts[:end], "plain"])) in names and baseline != name:
            return baseline
    return name if parts[-1] == "plain" and len(parts) > 1 and _has_others(name, names) else names[0]


def _has_others(name: str, names: Sequence[str]) -> bool:
    """Whether a row `<prefix>-plain` is the baseline of other rows."""
    prefix = name.removesuffix("plain")
    return any(other.startswith(prefix) and other != name for other in names)


def _arm(row: Row, base: RunRecord, split: str, lowercase: bool, left_out: list[str]) -> list[np.ndarray]:
    """What is counted in the translations of a row's runs; why runs are left out goes to `left_out`."""
    arm: list[np.ndarray] = []
    for run in row.runs:
        problem = _problem(run, base, split, lowercase)
        if not problem:
            try:
                found = counts(run.folder, split, BLEU.key, lowercase)
                problem = _disagreement(run, split, found, lowercase)
            except InputError as error:
                problem = str(error)
        if problem:
            left_out.append(f"{row.name}, {_seed(run)}: {problem}")
        else:
            arm.append(found)
    return arm


def _of_pair(name: str, runs: int, baseline: str, baseline_runs: int, pair: dict[str, Any]) -> Difference:
    return Difference(
        row=name,
        score=pair["b"],
        runs=runs,
        baseline=baseline,
        baseline_score=pair["a"],
        baseline_runs=baseline_runs,
        difference=pair["difference"],
        low=pair["low"],
        high=pair["high"],
        p_value=pair["p_value"],
        ahead=pair["wins"]["b"] / pair["samples"],
        seeds_low=pair["seeds"]["low"],
        seeds_high=pair["seeds"]["high"],
    )


def _problem(run: RunRecord, base: RunRecord, split: str, lowercase: bool) -> str:
    """Why the translations of a run do not compare with those of another; empty if they may."""
    if split not in run.references:
        return f"it has kept no translations of the {split} split"
    if run.references[split] != base.references[split]:
        return f"its {split} references are not those of {base.folder}"
    if in_lower_case(run, split) != lowercase:
        return f"case counts in only one of its BLEU and that of {base.folder}"
    return ""


def _disagreement(run: RunRecord, split: str, found: np.ndarray, lowercase: bool) -> str:
    """Translations that are not those of the result; empty if they are, or if it states no BLEU."""
    stated = BLEU.final(run, split)
    score = float(metric_named(BLEU.key, lowercase=lowercase).score(found.sum(axis=0)))
    if stated is None or abs(score - stated) <= _AGREE:
        return ""
    return f"its translations have a BLEU of {BLEU.show(score)}, its result says {BLEU.show(stated)}"


def _seed(run: RunRecord) -> str:
    return str(run.folder) if run.seed is None else f"seed {run.seed}"


def over_sentences(found: Difference) -> str:
    """`+0.62 (+0.10 to +1.15)`."""
    return f"{BLEU.show_difference(found.difference)} ({interval(found.low, found.high)})"


def interval(low: float | None, high: float | None) -> str:
    """The ends of an interval of differences, with their signs."""
    if low is None or high is None:
        return format.MISSING
    return f"{BLEU.show_difference(low)} to {BLEU.show_difference(high)}"


def heading(tested: Differences) -> str:
    """What a table of differences is of; with the baseline where there is one."""
    split = {"valid": "Validation", "test": "Test"}.get(tested.split, tested.split)
    first = tested.rows[0]
    if len(tested.baselines) > 1:
        return f"{split} BLEU, every row against its baseline"
    return f"{split} BLEU against {first.baseline}, {mean_and_runs(first.baseline_score, first.baseline_runs)}"


def table_of(tested: Differences) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table of differences, the name of the row first."""
    several = len(tested.baselines) > 1
    heads = [
        "BLEU",
        *(["against"] if several else []),
        "difference",
        "95 % over sentences",
        "p",
        "samples ahead",
        "95 % over seeds",
    ]
    rows = [
        [
            row.row,
            mean_and_runs(row.score, row.runs),
            *([f"{row.baseline} {mean_and_runs(row.baseline_score, row.baseline_runs)}"] if several else []),
            BLEU.show_difference(row.difference),
            interval(row.low, row.high),
            f"{row.p_value:.3f}",
            f"{row.ahead:.0%}",
            interval(row.seeds_low, row.seeds_high),
        ]
        for row in tested.rows
    ]
    return heads, rows


def how(tests: Sequence[Differences]) -> Sequence[str]:
    """How tables of differences were made, and what they do not say: a sentence each."""
    sizes = format.listed([f"{tested.sentences:,} {tested.split} sentences" for tested in tests])
    left_out = dict.fromkeys(sentence for tested in tests for sentence in tested.left_out)
    return (
        f"Paired bootstrap (Koehn 2004): {tests[0].samples:,} samples of the {sizes}, the same for all rows, seed "
        f"{tests[0].seed}; of a row with several runs (n) the mean of their BLEU.",
        "The interval over sentences and p are about these very models on other sentences like these. The interval over seeds "
        "(Welch) is about training again; two runs a row leave it wide.",
        *(f"Left out: {sentence}." for sentence in left_out),
    )


def mean_and_runs(score: float, runs: int) -> str:
    """A mean BLEU, and of how many runs where there are several."""
    return BLEU.show(score) + (f" (n = {runs})" if runs > 1 else "")
