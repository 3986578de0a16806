"""Statistics against sacreBLEU, scipy and hand computation; intervals cover the truth as often as they say."""

from __future__ import annotations

import math
import random
import statistics as exact
from typing import Any

import numpy as np
import pytest
import sacrebleu
import scipy.stats
from sacrebleu.significance import PairedTest

from fullrank.core.errors import InputError
from fullrank.evaluation import statistics
from fullrank.evaluation.statistics import Resampled, compare_resampled, welch_interval
from fullrank.evaluation.tasks import metric_named

WORDS = [f"w{index}" for index in range(40)]
BASE, OTHER = [41.2, 43.0, 40.1, 42.4, 41.9], [42.5, 42.9, 42.2, 43.1, 42.0]


def texts(count: int, seed: int) -> list[list[str]]:
    drawn = random.Random(seed)
    return [[drawn.choice(WORDS) for _ in range(drawn.randint(4, 16))] for _ in range(count)]


def system(references: list[list[str]], seed: int, wrong: float) -> list[str]:
    """Translations in which a share of the words is wrong."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choice(WORDS) if drawn.random() < wrong else word for word in line) for line in references]


def joined(references: list[list[str]]) -> list[str]:
    return [" ".join(line) for line in references]


def bootstrap(a: list[str], b: list[str], references: list[str], *, metric: str = "bleu", **options: int) -> Resampled:
    measure = metric_named(metric)
    counts = ([measure.statistics(lines, references)] for lines in (a, b))
    return compare_resampled(*counts, measure, **options)


# -- resampled test sets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_samples_are_those_of_sacrebleus_paired_test(metric: str) -> None:
    words = texts(80, 1)
    a, b, references = system(words, 2, 0.25), system(words, 3, 0.22), joined(words)
    scorer = sacrebleu.BLEU(references=[references]) if metric == "bleu" else sacrebleu.CHRF(references=[references])
    _, scores = PairedTest([("a", a), ("b", b)], {metric: scorer}, None, test_type="bs", n_samples=300)()
    theirs: Any = scores[next(name for name in scores if name != "System")]
    ours = bootstrap(a, b, references, samples=300, metric=metric)
    assert ours.difference == pytest.approx(theirs[1].score - theirs[0].score, abs=1e-9)
    measure = metric_named(metric)
    sampled = statistics._resample([measure.statistics(b, references)], measure, 300, statistics.SEED)[0]
    assert sampled.mean() == pytest.approx(theirs[1].mean, rel=1e-5)  # theirs adds up in single precision


def test_samples_written_out() -> None:
    """Runs over seeds; interval and p-value computed one sample at a time, by indices into the sentences."""
    words = texts(25, 4)
    arms = [[system(words, seed, 0.3) for seed in (5, 7, 8)], [system(words, seed, 0.25) for seed in (6, 9)]]
    references, scorer, metric = joined(words), sacrebleu.BLEU(), metric_named("bleu")

    def score(arm: list[list[str]], chosen: Any) -> float:
        lines = [references[i] for i in chosen]
        return exact.fmean(scorer.corpus_score([run[i] for i in chosen], [lines]).score for run in arm)

    samples = np.random.default_rng(9).integers(25, size=(120, 25))
    differences = [score(arms[1], chosen) - score(arms[0], chosen) for chosen in samples]
    a, b = ([metric.statistics(run, references) for run in arm] for arm in arms)
    result = compare_resampled(a, b, metric, samples=120, seed=9)
    assert result.difference == pytest.approx(score(arms[1], range(25)) - score(arms[0], range(25)), abs=1e-9)
    ordered, mean = sorted(differences), exact.fmean(differences)
    assert (result.low, result.high) == pytest.approx((ordered[3], ordered[-4]), abs=1e-9)
    extreme = sum(abs(d - mean) >= abs(result.difference) for d in differences)
    assert result.p_value == pytest.approx((1 + extreme) / 121)


def test_a_run_against_itself_and_a_clear_difference() -> None:
    words = texts(60, 1)
    lines = system(words, 2, 0.6)
    assert bootstrap(lines, lines, joined(words), samples=100) == (0, 0, 0, 1)
    clear = bootstrap(lines, system(words, 3, 0.1), joined(words), samples=200)
    assert clear.low > 0
    assert clear.p_value == 1 / 201


@pytest.mark.full
def test_p_values_under_the_null_are_level() -> None:
    """Systems of equal quality: a p-value below 10 % is found about one time in ten, and intervals hold 0 as often."""
    words = texts(40, 11)
    references = joined(words)
    results = []
    for trial in range(120):
        a, b = system(words, 2 * trial + 100, 0.3), system(words, 2 * trial + 101, 0.3)
        results.append(bootstrap(a, b, references, samples=200, seed=trial))
    rejected = {level: sum(result.p_value <= level for result in results) for level in (0.1, 0.5)}
    assert 12 - 3.3 * 3.29 < rejected[0.1] < 12 + 3.3 * 3.29, "binomial(120, 0.1) has a deviation of 3.29"
    assert 60 - 3.3 * 5.48 < rejected[0.5] < 60 + 3.3 * 5.48
    held = sum(result.low <= 0 <= result.high for result in results)
    assert held >= 114 - 3.3 * 2.39, "of 120, 95 % are 114 with a deviation of 2.39"


def test_one_sentence_cannot_be_resampled_and_empty_lines_are_sentences() -> None:
    with pytest.raises(InputError, match="one sentence"):
        bootstrap(["a"], ["b"], ["a"])
    references = ["a b c d", "x y z z", "e f g h"]
    assert bootstrap(["", "", ""], ["a b c d", "", "e f g h"], references, samples=50).difference > 0


# -- means over seeds -------------------------------------------------------------------------------------------------


def test_intervals_of_means_by_hand() -> None:
    """t(0.975, 4) = 2.776445 and t(0.975, 3) = 3.182446, from tables."""
    differences = [y - x for x, y in zip(BASE, OTHER, strict=True)]
    mean, reach = exact.fmean(differences), 2.776445 * exact.stdev(differences) / math.sqrt(5)
    assert statistics.paired_interval(BASE, OTHER) == (pytest.approx(mean - reach), pytest.approx(mean + reach))
    # Welch: variances 2 and 4 give (1 + 4/3)^2 / (1 + 8/9) = 2.88235 degrees of freedom, for which t is 3.25721
    reach = 3.25721 * math.sqrt(2 / 2 + 4 / 3)
    assert welch_interval([1, 3], [2, 4, 6]) == (pytest.approx(2 - reach, abs=1e-4), pytest.approx(2 + reach, abs=1e-4))
    assert welch_interval([10, 10], [12, 12]) is None
    assert welch_interval([10], [12, 13]) is None
    with pytest.raises(ValueError, match="zip"):
        statistics.paired_interval(BASE, OTHER[:3])


# -- deviations over seeds --------------------------------------------------------------------------------------------


def test_change_of_deviation_is_the_papers() -> None:
    """Skip Cross-head, Table 4, MRPC: 1.281 and 1.4 are +9.3 %, 0.988 and 0.91 are -7.9 %; CoLA 1.23 and 1.1 are -10.6 %."""

    def spread(deviation: float) -> list[float]:
        return [80 - deviation, 80.0, 80 + deviation]  # its sample deviation is `deviation`

    for base, other, stated in ((1.281, 1.4, 9.3), (0.988, 0.91, -7.9), (1.23, 1.1, -10.6)):
        assert statistics.deviation_change(spread(base), spread(other)) == pytest.approx(stated, abs=0.05)


def test_interval_of_the_deviation_by_hand() -> None:
    """r = s_b^2 / s_a^2; with 4 and 4 degrees of freedom F(0.975) = 9.60453 (tables), and F(0.025) is its inverse."""
    ratio = exact.variance(OTHER) / exact.variance(BASE)
    low, high = statistics.deviation_interval(BASE, OTHER) or (0, 0)
    assert low == pytest.approx(100 * (math.sqrt(ratio / 9.60453) - 1), abs=1e-3)
    assert high == pytest.approx(100 * (math.sqrt(ratio * 9.60453) - 1), abs=1e-3)
    # of unequal numbers the other arm's degrees of freedom come first
    low, _ = statistics.deviation_interval(BASE, OTHER[:3]) or (0, 0)
    ratio = exact.variance(OTHER[:3]) / exact.variance(BASE)
    assert low == pytest.approx(100 * (math.sqrt(ratio / scipy.stats.f.ppf(0.975, 2, 4)) - 1))


def test_brown_forsythe_by_hand() -> None:
    """Distances to the medians are 1, 0, 1 and 4, 0, 4: F = 4 between / within, of 1 and 4 degrees of freedom."""
    a, b = [1.0, 2.0, 3.0], [1.0, 5.0, 9.0]
    between, within = 3 * 2 * 1.0, 2 / 3 + 32 / 3  # means 2/3 and 8/3, both 1 from 5/3
    assert statistics.brown_forsythe(a, b) == pytest.approx(scipy.stats.f.sf(4 * between / within, 1, 4))


@pytest.mark.parametrize(
    ("a", "b"), [([], [1.0, 2.0]), ([1.0], [2.0]), ([1.0, 1.0, 1.0], [2.0, 3.0, 4.0]), ([0.3, 0.3], [0.5, 0.5])]
)
def test_nothing_is_said_that_cannot_be_known(a: list[float], b: list[float]) -> None:
    assert statistics.deviation_change(a, b) is None
    assert statistics.deviation_interval(a, b) is None


def test_few_seeds_leave_more_unknown() -> None:
    same = [56.3, 56.3, 56.3]
    assert statistics.deviation_change(BASE, same) == -100  # WNLI: every seed predicts the larger class
    assert statistics.deviation_interval(BASE, same) is None
    assert statistics.brown_forsythe(BASE[:2], OTHER) is None
    assert statistics.brown_forsythe(same, same) is None
    assert statistics.paired_interval([1.0], [2.0]) is None
    assert statistics.paired_interval([0.1, 0.2, 0.3], [0.2, 0.3, 0.4]) is None  # all differences are 0.1
