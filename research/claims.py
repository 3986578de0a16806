"""Claims of papers, and verdicts on them: two rows of the ledger compared seed by seed.

With y_rs the figure of row r with seed s, the rows of one recipe share a deviation:

    y_rs = mean_r + seed_s + e_rs,   e_rs ~ N(0, deviation^2)

Rows that have not learned trigrams have no part in it, nor has a row whose figures deviate more than the others' by Cochran's
test (`select_alike`). The difference of two rows is the mean of y_bs - y_as over their n common seeds, with the standard error
deviation sqrt(2 / n). Of two rows alone, such as a row that deviates more and another one, this is Student's paired test, which
needs no equal deviations. p-values of a page are corrected by Holm's rule.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from fullrank.config.load import flatten, lay, merge, read_yaml, resolve_any
from fullrank.evaluation.statistics import (
    STILL_FALLING,
    Interval,
    interpolate,
    measure_late_gain,
)  # fmt: skip
from research import build
from research.ledger import Row, differences, identify_text, setting_of

VERDICTS = (
    "supported here", "contradicted here", "no difference that matters", "open", "too early", "not testable here",
)  # fmt: skip
FEWEST_SEEDS = 3
FEWEST_RATES = 3
SIGNIFICANCE = 0.05  # of p-values after Holm's correction
MATTERS = 0.005  # the share of a figure below which a difference does not matter
EQUAL = 1e-9  # deviations of this share of the figures are rounding
RATE = "train.learning_rate"

Lines = Mapping[tuple[str, str], float]  # 4-gram perplexities by the checksums of test text and vocabulary


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper. The keys are explained at the head of claims/mixhead.yaml."""

    table: str
    claim: str
    why: str | None = None
    remark: str | None = None
    key: str = ""
    recipe: str = ""
    scale: str = "small"
    set: Mapping[str, Any] = field(default_factory=dict)
    better: Mapping[str, Any] = field(default_factory=lambda: {"row": "plain"})
    than: Mapping[str, Any] = field(default_factory=lambda: {"row": "plain"})
    figure: str = "final.test.perplexity"
    direction: str = "lower"
    statistic: str = "mean"
    rates: str = "searched"

    def __post_init__(self) -> None:
        if self.direction not in ("lower", "higher", "equal") or self.statistic not in ("mean", "deviation"):
            raise TypeError("direction is lower, higher or equal, statistic is mean or deviation")
        if self.rates not in ("searched", "stated"):
            raise TypeError("rates is searched or stated")
        if (self.better.keys() | self.than.keys()) - {"row", "recipe", "set"}:
            raise TypeError("a side of a claim has a row, a recipe and a set")
        if not self.why and (not self.recipe or self.better == self.than):
            raise TypeError("a claim has a recipe and a row `better`, or `why` it is not testable here")

    @property
    def split(self) -> str:
        return self.figure.split(".")[1] if self.figure.startswith(("final.", "last.")) else "valid"

    def settings_of(self, arm: Mapping[str, Any]) -> list[str]:
        """List the settings of one side as `key=value`."""
        settings = flatten(lay(merge({}, self.set), arm.get("set") or {}))
        return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its runs that have the figure, by seed, and the command that trains them.

    setting: as of `ledger.setting_of`. rate: its learning rate. rates: the mean cost at each one that was tried with otherwise
    equal settings (`tried_rates`).
    """

    row: str
    setting: str
    runs: Mapping[int, Row]
    figures: Mapping[int, float]
    rate: float
    rates: Mapping[float, float]
    command: str


@dataclass(frozen=True)
class Comparison:
    """Both sides of a claim. seeds: those that both have, measured on one text by one protocol."""

    claim: Claim
    than: Side
    better: Side
    seeds: tuple[int, ...]

    @property
    def figures(self) -> tuple[list[float], list[float]]:
        """The figures of `than` and of `better`, by seed."""
        than = [self.than.figures[seed] for seed in self.seeds]
        better = [self.better.figures[seed] for seed in self.seeds]
        return than, better

    @property
    def pool(self) -> tuple[str, ...]:
        """Comparisons with an equal value share a deviation."""
        first = self.than.runs[self.seeds[0]]
        return (self.claim.recipe, self.claim.figure, *measured_on(first, self.claim))


@dataclass(frozen=True)
class Estimate:
    """The difference `better` minus `than` with its 95 % interval; of deviations in percent.

    deviation: of one run, pooled over the rows of the recipe. p_value: of no difference, not corrected.
    """

    difference: float
    interval: Interval
    p_value: float
    deviation: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim with its reason. adjusted: the p-value after Holm's correction."""

    claim: Claim
    word: str
    reason: str
    comparison: Comparison | None = None
    estimate: Estimate | None = None
    adjusted: float | None = None


def read_claims(path: Path) -> tuple[str, list[Claim]]:
    """Read the title of a paper and its claims. Raises InputError with the file."""
    content = read_yaml(path)
    return content["paper"], [build(Claim, claim, str(path)) for claim in content["claims"]]


def judge(claims: Sequence[Claim], rows: Sequence[Row], lines: Lines | None = None) -> list[Verdict]:
    """Judge the claims of one page.

    Args:
        claims: the claims.
        rows: rows of the ledger.
        lines: perplexity of counting 4-grams by the checksums of test text and vocabulary; None without.

    Returns:
        A verdict for each claim.
    """
    lines = lines or {}
    comparisons = [None if claim.why else compare(claim, rows) for claim in claims]
    measured = []
    for comparison in comparisons:
        if comparison is not None and len(comparison.seeds) >= FEWEST_SEEDS:
            measured.append(comparison)
    learned = []
    for comparison in measured:
        if not (explain_line(comparison.than, lines) or explain_line(comparison.better, lines)):
            learned.append(comparison)
    estimates = {}
    for comparison in measured:
        pooled = [other for other in learned if other.pool == comparison.pool]
        estimates[id(comparison)] = estimate(comparison, pooled)
    p_values = [value.p_value for value in estimates.values()]
    adjusted = dict(zip(estimates, correct(p_values), strict=True))
    verdicts = []
    for claim, comparison in zip(claims, comparisons, strict=True):
        if comparison is None:
            verdicts.append(Verdict(claim, "not testable here", claim.why or ""))
        elif id(comparison) not in estimates:
            reason = f"fewer than {FEWEST_SEEDS} seeds in common"
            verdicts.append(Verdict(claim, "open", reason, comparison))
        else:
            value = estimates[id(comparison)]
            p_value = adjusted[id(comparison)]
            word, reason = decide(comparison, value, p_value, lines)
            verdicts.append(Verdict(claim, word, reason, comparison, value, p_value))
    return verdicts


# -- the two sides of a claim -----------------------------------------------------------------------------------------


def compare(claim: Claim, rows: Sequence[Row]) -> Comparison:
    """Find the runs of both sides, and their common seeds."""
    than = find_side(claim, claim.than, rows)
    better = find_side(claim, claim.better, rows)
    common = sorted(than.runs.keys() & better.runs.keys())
    seeds = []
    for seed in common:
        if measured_on(than.runs[seed], claim) == measured_on(better.runs[seed], claim):
            seeds.append(seed)
    return Comparison(claim, than, better, tuple(seeds))


def find_side(claim: Claim, arm: Mapping[str, Any], rows: Sequence[Row]) -> Side:
    """Find the runs of one side. Of two with one seed the later one counts.

    Args:
        claim: the claim.
        arm: row and settings of the side, `claim.than` or `claim.better`.
        rows: rows of the ledger.

    Returns:
        Its runs and figures by seed, with the learning rates that were tried.
    """
    recipe = arm.get("recipe") or claim.recipe
    name = arm.get("row", "plain")
    overrides = claim.settings_of(arm)
    config = resolve_any(recipe, name, claim.scale, overrides).config
    settings = differences(config, recipe, name, claim.scale) or {}
    place = [recipe, name, claim.scale]
    of_row = [row for row in rows if [row["recipe"], row["row"], row["scale"]] == place]
    runs = {}
    figures = {}
    for row in sorted(of_row, key=lambda row: row["seed"]):
        figure = figure_of(row, claim.figure)
        if row["settings"] == settings and figure is not None:
            seed = row["seed"]
            runs[seed] = row
            figures[seed] = figure
    usual = resolve_any(recipe, name, claim.scale).config.train.learning_rate
    rate = config.train.learning_rate
    rates = tried_rates(of_row, settings, rate, usual, claim)
    seeds = ",".join(map(str, runs)) or "1,2,3"
    words = ["fullrank", "reproduce", recipe, "--rows", name, "--scale", claim.scale, "--seeds", seeds, *overrides]
    setting = setting_of(recipe, name, claim.scale, settings)
    return Side(name, setting, runs, figures, rate, rates, shlex.join(words))


def figure_of(row: Row, figure: str) -> float | None:
    """Return a figure of a run; None if the ledger lacks it.

    `figure` is a column, `curve.half` (the validation perplexity after half of the steps), or `ms_per_step.train`.
    """
    if figure == "curve.half":
        curve = row.get("curve") or []
        return math.exp(interpolate(curve, 0.5)) if len(curve) > 1 else None
    times = row.get("ms_per_step") or {}
    value: float | None = times.get("train") if figure == "ms_per_step.train" else row.get(figure)
    return value


def tried_rates(
    rows: Sequence[Row], settings: Mapping[str, Any], rate: float, usual: float, claim: Claim
) -> dict[float, float]:
    """Compute the mean cost at each learning rate, of rows that differ from `settings` in nothing else.

    The cost is the validation perplexity, or the claim's own figure where there is none. Of seeds that a rate has in common
    with `rate` the mean difference counts, so that a rate is no better for an easy seed.

    Args:
        rows: rows of the ledger.
        settings: those of the side.
        rate: learning rate of the side.
        usual: learning rate of rows whose settings have none.
        claim: the claim.

    Returns:
        The cost by learning rate.
    """
    sign = -1 if claim.direction == "higher" else 1
    others = {key: value for key, value in settings.items() if key != RATE}
    tried: dict[float, dict[int, float]] = {}
    for row in rows:
        settings_of_row = row["settings"] or {}
        figure = figure_of(row, claim.figure)
        cost = row.get("final.valid.perplexity")
        if cost is None and figure is not None:
            cost = sign * figure
        if cost is not None and {key: value for key, value in settings_of_row.items() if key != RATE} == others:
            tried.setdefault(settings_of_row.get(RATE, usual), {})[row["seed"]] = cost
    at_rate = tried.get(rate, {})
    costs = {}
    for other, by_seed in sorted(tried.items()):
        common = at_rate.keys() & by_seed.keys()
        costs[other] = fmean(by_seed.values())
        if common:
            costs[other] = fmean(at_rate.values()) + fmean(by_seed[seed] - at_rate[seed] for seed in common)
    return costs


def measured_on(row: Row, claim: Claim) -> list[str]:
    """List what figures were measured on: text of the split, vocabulary, protocol and signature, for times the processor.

    Figures compare where these are equal.
    """
    columns = [f"text.{claim.split}", "vocabulary", f"protocol.{claim.split}", "signature"]
    if claim.figure == "ms_per_step.train":
        columns += ["cpu", "threads", "precision"]
    return [row.get(column, "") for column in columns]


# -- the difference ---------------------------------------------------------------------------------------------------


def estimate(comparison: Comparison, pooled: Sequence[Comparison]) -> Estimate:
    """Estimate the difference of a comparison, with the deviation of it and all `pooled` ones, by the model above."""
    a, b = comparison.figures
    if comparison.claim.statistic == "deviation":
        return compare_deviations(a, b)
    compared = {side.setting: side.figures for side in (comparison.than, comparison.better)}
    arms = dict(compared)
    for other in pooled:
        arms |= {side.setting: side.figures for side in (other.than, other.better)}
    alike = select_alike(arms)
    if not compared.keys() <= alike.keys():
        alike = compared
    deviation, freedom = pool_deviation(list(alike.values()))
    difference = fmean(b) - fmean(a)
    error = deviation * math.sqrt(2 / len(a))
    if error <= EQUAL * max(map(abs, (*a, *b))):
        return Estimate(difference, Interval(difference, difference), float(difference == 0), deviation)
    t = stats.t(freedom)
    half = float(t.ppf(0.975)) * error
    p_value = 2 * float(t.sf(abs(difference) / error))
    return Estimate(difference, Interval(difference - half, difference + half), p_value, deviation)


def compare_deviations(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Estimate the change of the sample standard deviation (n - 1) from a to b, in percent (Skip Cross-head, Table 4).

        100 (s_b / s_a - 1)
        from 100 (sqrt(r / F(0.975)) - 1) to 100 (sqrt(r / F(0.025)) - 1)    with r = s_b^2 / s_a^2

    F has n_b - 1 and n_a - 1 degrees of freedom; exact for independent normal scores. Equal scores say nothing.
    """
    before = statistics.stdev(a)
    after = statistics.stdev(b)
    if before == 0 or after == 0:
        return Estimate(0.0, Interval(-math.inf, math.inf), 1.0)
    change = 100 * (after / before - 1)
    ratio = (1 + change / 100) ** 2
    distribution = stats.f(len(b) - 1, len(a) - 1)
    quantiles = distribution.ppf([0.975, 0.025])
    low, high = 100 * (np.sqrt(ratio / quantiles) - 1)
    below = float(distribution.cdf(ratio))
    return Estimate(change, Interval(float(low), float(high)), 2 * min(below, 1 - below))


def select_alike(arms: Mapping[str, Mapping[int, float]]) -> dict[str, Mapping[int, float]]:
    """Select the arms that may share a deviation: the one that deviates most is left out while chance does not explain it.

    Cochran's test at 5 % (ISO 5725-2): F = s_i^2 / s^2 with the pooled variance s^2 of the other arms, and the p-value of F
    times the number of arms. An arm of one seed stays.
    """
    alike = dict(arms)
    freedoms = {name: len(figures) - 1 for name, figures in arms.items()}
    squares = {name: statistics.pvariance(figures.values()) * len(figures) for name, figures in arms.items()}
    while len(alike) > 2:
        widest = ""
        p_value = 1.0
        for name in alike:
            freedom = sum(freedoms[other] for other in alike) - freedoms[name]
            rest = sum(squares[other] for other in alike) - squares[name]
            if freedoms[name] and rest > 0:
                ratio = squares[name] / freedoms[name] * freedom / rest
                chance = float(stats.f.sf(ratio, freedoms[name], freedom))
                if chance < p_value:
                    widest = name
                    p_value = chance
        if p_value * len(alike) >= SIGNIFICANCE:
            break
        del alike[widest]
    return alike


def pool_deviation(arms: Sequence[Mapping[int, float]]) -> tuple[float, int]:
    """Pool the deviation of a run and its degrees of freedom, by least squares for a mean of each arm and each seed."""
    seeds = sorted({seed for arm in arms for seed in arm})
    cells = []
    for row, arm in enumerate(arms):
        cells += [(row, seeds.index(seed), figure) for seed, figure in arm.items()]
    design = np.zeros((len(cells), len(arms) + len(seeds)))
    for number, (row, column, _) in enumerate(cells):
        design[number, [row, len(arms) + column]] = 1
    figures = np.array([figure for _, _, figure in cells])
    means, _, rank, _ = np.linalg.lstsq(design, figures, rcond=None)
    freedom = len(cells) - int(rank)
    residuals = figures - design @ means
    return (math.sqrt(float(residuals @ residuals) / freedom) if freedom else 0.0), freedom


def correct(p_values: Sequence[float]) -> list[float]:
    """Correct p-values by Holm: the k-th smallest of m times m - k + 1, and never below the one before it."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    ascending = sorted(range(len(p_values)), key=lambda number: p_values[number])
    for place, number in enumerate(ascending):
        left = len(p_values) - place
        largest = max(largest, min(1.0, p_values[number] * left))
        adjusted[number] = largest
    return adjusted


# -- the word ---------------------------------------------------------------------------------------------------------


def decide(comparison: Comparison, value: Estimate, p_value: float, lines: Lines) -> tuple[str, str]:
    """Decide the word of a verdict.

    Args:
        comparison: both sides.
        value: their difference.
        p_value: corrected.
        lines: perplexity of counting 4-grams by the checksums of test text and vocabulary.

    Returns:
        The word and its reason.
    """
    claim = comparison.claim
    for side in (comparison.than, comparison.better):
        if early := explain_too_early(side, comparison.seeds, lines):
            return "too early", early
    if claim.rates == "searched" and claim.statistic == "mean" and claim.direction != "equal":
        for side in (comparison.than, comparison.better):
            if open_rate := explain_open_rate(side):
                return "open", open_rate
    low, high = value.interval
    scale = 100.0 if claim.statistic == "deviation" else abs(fmean(comparison.figures[0]))
    is_small = max(abs(low), abs(high)) <= MATTERS * scale
    is_large = low > MATTERS * scale or high < -MATTERS * scale
    if claim.direction == "equal":
        if is_small:
            return "supported here", f"the interval lies within {MATTERS:.1%}"
        word = "contradicted here" if is_large else "open"
        return word, f"the interval {'lies outside of' if is_large else 'reaches beyond'} {MATTERS:.1%}"
    if is_small:
        return "no difference that matters", f"the interval lies within {MATTERS:.1%}"
    if p_value >= SIGNIFICANCE:
        return "open", "the difference may be chance"
    is_better = value.difference < 0 if claim.direction == "lower" else value.difference > 0
    return ("supported here" if is_better else "contradicted here"), "the difference is hardly chance"


def explain_too_early(side: Side, seeds: Sequence[int], lines: Lines) -> str:
    """Explain why models say little yet: counting 4-grams predicts better, or they were still learning.

    Args:
        side: the runs.
        seeds: those that are compared.
        lines: perplexity of counting 4-grams by the checksums of test text and vocabulary.

    Returns:
        The reason; empty where there is none.
    """
    if above := explain_line(side, lines):
        return above
    gains = []
    for seed in seeds:
        gain = measure_late_gain(side.runs[seed].get("curve") or [])
        if gain is not None:
            gains.append(gain)
    if gains and fmean(gains) > STILL_FALLING:
        return f"the validation perplexity of {side.row} falls by {fmean(gains):.1%} in the last tenth of training"
    return ""


def explain_line(side: Side, lines: Lines) -> str:
    """Explain that the test perplexity of a side is above the 4-gram line; empty where it is not, or one is not known."""
    runs = [run for run in side.runs.values() if run.get("final.test.perplexity") is not None]
    line = lines.get(identify_text(runs[0])) if runs else None
    if line is None:
        return ""
    perplexity = fmean(run["final.test.perplexity"] for run in runs)
    if perplexity <= line:
        return ""
    return f"{side.row} has {perplexity:.1f}, counting 4-grams {line:.1f}: it has not learned trigrams"


def explain_open_rate(side: Side) -> str:
    """Explain why the learning rate of a side is not known to be the best one; empty if a lower and a higher one are worse."""
    rates = list(side.rates)
    best = min(rates, key=lambda rate: side.rates[rate], default=None)
    is_bracketed = len(rates) >= FEWEST_RATES and best not in (rates[0], rates[-1])
    if is_bracketed and best == side.rate:
        return ""
    tried = ", ".join(f"{rate:g}" for rate in rates) or "none"
    return f"the rate of {side.row}, {side.rate:g}, is not known to be the best one (tried: {tried})"
