"""Whether rows differ by more than the choice of test sentences: every row against the first, from the translations kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fullrank.errors import InputError
from fullrank.evaluation.bootstrap import against_first
from fullrank.evaluation.ngrams import metric_named
from fullrank.reporting import format
from fullrank.reporting.measure import BLEU
from fullrank.reporting.results import SPLITS, RunRecord
from fullrank.reporting.table import Comparison, Row
from fullrank.reporting.translations import counts, in_lower_case

SAMPLES, SEED = 1000, 12345
_AGREE = 0.005  # BLEU of kept translations and of the result: the digits shown


@dataclass(frozen=True)
class Difference:
    """A row (b) against the first (a) on resampled test sets, means over the runs of each.

    low, high: 95 % interval of `difference` over sentences, for these very models; seeds_low, seeds_high: over seeds, by
    Welch, None where a row has one run. `ahead`: the share of the samples in which the row is above the first.
    """

    row: str
    score: float
    difference: float
    low: float
    high: float
    p_value: float
    ahead: float
    runs: int
    seeds_low: float | None
    seeds_high: float | None

    @property
    def decided(self) -> bool:
        """Whether the interval over sentences leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Differences:
    """All rows that could be compared with the first, and in `left_out` why others could not, a sentence each."""

    split: str
    first: str
    first_score: float
    first_runs: int
    samples: int
    seed: int
    sentences: int
    rows: tuple[Difference, ...]
    left_out: tuple[str, ...]

    def of(self, row: Row) -> Difference | None:
        """What is known of a row."""
        return next((found for found in self.rows if found.row == row.name), None)


def differences(compared: Comparison) -> Differences | None:
    """Paired bootstrap of BLEU of every row with the first one; None where there is nothing to compare.

    On the test split where the first row has kept translations of it, else on the validation split. A run whose translations
    are missing, or do not have the BLEU that its result states, is left out.
    """
    if compared.measure is not BLEU or len(compared.rows) < 2:
        return None
    kept = [split for split in reversed(SPLITS) if any(split in run.references for run in compared.rows[0].runs)]
    if not kept:
        return None
    first, left_out = compared.rows[0], list[str]()
    lowercase = in_lower_case(first.runs[0], kept[0])
    arms: dict[str, list[Any]] = {}
    for row in compared.rows:
        arms[row.name] = []
        for run in row.runs:
            if problem := _problem(run, first, kept[0], lowercase):
                left_out.append(f"{row.name}, {_seed(run)}: {problem}")
                continue
            try:
                found = counts(run.folder, kept[0], BLEU.key, lowercase)
            except InputError as error:
                left_out.append(f"{row.name}, {_seed(run)}: {error}")
                continue
            if problem := _disagreement(run, kept[0], found, lowercase):
                left_out.append(f"{row.name}, {_seed(run)}: {problem}")
            else:
                arms[row.name].append(found)
    names = [row.name for row in compared.rows[1:] if arms[row.name]]
    if not arms[first.name] or not names:
        return None
    try:
        by_row = [arms[name] for name in (first.name, *names)]
        pairs = against_first(by_row, metric_named(BLEU.key), samples=SAMPLES, seed=SEED)
    except InputError:  # a single sentence
        return None
    return Differences(
        kept[0], first.name, pairs[0]["a"], len(arms[first.name]), SAMPLES, SEED, pairs[0]["sentences"],
        tuple(_of_pair(name, len(arms[name]), pair) for name, pair in zip(names, pairs, strict=True)), tuple(left_out),
    )  # fmt: skip


def _of_pair(name: str, runs: int, pair: dict[str, Any]) -> Difference:
    return Difference(
        row=name,
        score=pair["b"],
        difference=pair["difference"],
        low=pair["low"],
        high=pair["high"],
        p_value=pair["p_value"],
        ahead=pair["wins"]["b"] / pair["samples"],
        runs=runs,
        seeds_low=pair["seeds"]["low"],
        seeds_high=pair["seeds"]["high"],
    )


def _problem(run: RunRecord, first: Row, split: str, lowercase: bool) -> str:
    """Why the translations of a run do not compare with those of the first row; empty if they may."""
    base = next(one for one in first.runs if split in one.references)
    if split not in run.references:
        return f"it has kept no translations of the {split} split"
    if run.references[split] != base.references[split]:
        return f"its {split} references are not those of {first.name}"
    if in_lower_case(run, split) != lowercase:
        return f"case counts in only one of its BLEU and that of {first.name}"
    return ""


def _disagreement(run: RunRecord, split: str, found: Any, lowercase: bool) -> str:
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


def how(tested: Differences) -> Sequence[str]:
    """How the table of differences was made, and what it does not say: a sentence each."""
    return (
        f"Paired bootstrap (Koehn 2004): {tested.samples:,} samples of the {tested.sentences:,} {tested.split} sentences, "
        f"the same for all rows, seed {tested.seed}; of a row with several runs the mean of their BLEU.",
        "The interval over sentences and p are about these very models on other sentences like these. The interval over seeds "
        "(Welch) is about training again; two runs a row leave it wide.",
        *(f"Left out: {sentence}." for sentence in tested.left_out),
    )


def mean_and_runs(score: float, runs: int) -> str:
    """A mean BLEU, and of how many runs where there are several."""
    return BLEU.show(score) + (f" (n = {runs})" if runs > 1 else "")
