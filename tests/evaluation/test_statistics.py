"""Statistics against sacreBLEU, scipy and hand computation; intervals cover the truth as often as they say."""

from __future__ import annotations

import itertools
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
from fullrank.evaluation.statistics import against_first, bootstrap_interval, welch_interval
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


def paired_bootstrap(
    a: list[str], b: list[str], references: list[str], *, metric: str = "bleu", **options: int
) -> dict[str, Any]:
    measure = metric_named(metric)
    (pair,) = against_first([[measure.statistics(lines, references)] for lines in (a, b)], measure, **options)
    return pair


# -- resampled test sets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_equals_sacrebleus_paired_test(metric: str) -> None:
    words = texts(80, 1)
    a, b, references = system(words, 2, 0.25), system(words, 3, 0.22), joined(words)
    scorer = sacrebleu.BLEU(references=[references]) if metric == "bleu" else sacrebleu.CHRF(references=[references])
    _, scores = PairedTest([("a", a), ("b", b)], {metric: scorer}, None, test_type="bs", n_samples=300)()
    ours = paired_bootstrap(a, b, references, samples=300, metric=metric)
    key = next(name for name in scores if name != "System")
    theirs: Any = scores[key]
    assert (ours["a"], ours["b"]) == pytest.approx((theirs[0].score, theirs[1].score), abs=1e-9)
    assert ours["difference"] == pytest.approx(theirs[1].score - theirs[0].score, abs=1e-9)
    assert ours["p_value_sacrebleu"] == pytest.approx(theirs[1].p_value, abs=1e-12)
    measure = metric_named(metric)
    alone = bootstrap_interval(measure.statistics(b, references), measure, samples=300)
    assert alone["mean"] == pytest.approx(theirs[1].mean, rel=1e-5)  # theirs adds up in single precision
    assert (alone["high"] - alone["low"]) / 2 == pytest.approx(theirs[1].ci, rel=1e-5)


def test_samples_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs over seeds; interval, wins and p-values computed one sample at a time, by indices into the sentences."""
    words = texts(25, 4)
    a = [system(words, seed, 0.3) for seed in (5, 7, 8)]
    b = [system(words, seed, 0.25) for seed in (6, 9)]
    references, scorer, metric = joined(words), sacrebleu.BLEU(), metric_named("bleu")
    differences = []
    for chosen in np.random.default_rng(9).integers(25, size=(120, 25)):
        means = [
            exact.fmean(
                scorer.corpus_score([run[i] for i in chosen], [[references[i] for i in chosen]]).score for run in arm
            )
            for arm in (a, b)
        ]
        differences.append(means[1] - means[0])
    counts = [[metric.statistics(run, references) for run in arm] for arm in (a, b)]
    (result,) = against_first(counts, metric, samples=120, seed=9)
    scores = [[scorer.corpus_score(run, [references]).score for run in arm] for arm in (a, b)]
    assert result["difference"] == pytest.approx(exact.fmean(scores[1]) - exact.fmean(scores[0]), abs=1e-9)
    ordered, mean = sorted(differences), exact.fmean(differences)
    assert (result["low"], result["high"]) == pytest.approx((ordered[3], ordered[-4]), abs=1e-9)
    assert result["wins"] == {"a": sum(d < 0 for d in differences), "b": sum(d > 0 for d in differences), "ties": 0}
    extreme = sum(abs(d - mean) >= abs(result["difference"]) for d in differences)
    assert result["p_value"] == pytest.approx((1 + extreme) / 121)
    assert result["seeds"]["a"]["scores"] == pytest.approx(scores[0], abs=1e-9)
    assert result["seeds"]["b"]["deviation"] == pytest.approx(exact.stdev(scores[1]), abs=1e-9)
    assert (result["seeds"]["low"], result["seeds"]["high"]) == pytest.approx(welch_interval(*scores))
    monkeypatch.setattr(statistics, "_CHUNK", 100)  # a large test set is drawn a few samples at a time
    assert against_first(counts, metric, samples=120, seed=9) == [result]


def test_a_run_against_itself_and_a_clear_difference() -> None:
    words = texts(60, 1)
    lines = system(words, 2, 0.6)
    same = paired_bootstrap(lines, lines, joined(words), samples=100)
    assert (same["difference"], same["low"], same["high"], same["p_value"]) == (0, 0, 0, 1)
    assert same["wins"] == {"a": 0, "b": 0, "ties": 100}
    clear = paired_bootstrap(lines, system(words, 3, 0.1), joined(words), samples=200)
    assert clear["low"] > 0
    assert (clear["p_value"], clear["wins"]["b"]) == (1 / 201, 200)


@pytest.mark.full
def test_p_values_under_the_null_are_level() -> None:
    """Systems of equal quality: a p-value below 10 % is found about one time in ten, and intervals hold 0 as often."""
    words = texts(40, 11)
    references = joined(words)
    p_values, held, theirs = [], 0, []
    for trial in range(120):
        a, b = system(words, 2 * trial + 100, 0.3), system(words, 2 * trial + 101, 0.3)
        result = paired_bootstrap(a, b, references, samples=200, seed=trial)
        p_values.append(result["p_value"])
        theirs.append(result["p_value_sacrebleu"])
        held += result["low"] <= 0 <= result["high"]
    rejected = {level: sum(p <= level for p in p_values) for level in (0.1, 0.5)}
    assert 12 - 3.3 * 3.29 < rejected[0.1] < 12 + 3.3 * 3.29, "binomial(120, 0.1) has a deviation of 3.29"
    assert 60 - 3.3 * 5.48 < rejected[0.5] < 60 + 3.3 * 5.48
    assert held >= 114 - 3.3 * 2.39, "of 120, 95 % are 114 with a deviation of 2.39"
    assert sum(p <= 0.1 for p in theirs) > 1.5 * rejected[0.1], "the other convention is nearer to a one-sided test"


def test_what_cannot_be_resampled() -> None:
    with pytest.raises(InputError, match="one sentence"):
        paired_bootstrap(["a"], ["b"], ["a"])
    with pytest.raises(InputError, match="samples: at least 40"):
        paired_bootstrap(["a"], ["b"], ["a"], samples=10)


def test_empty_lines_are_sentences() -> None:
    result = paired_bootstrap(["", "", ""], ["a b c d", "", "e f g h"], ["a b c d", "x y z z", "e f g h"], samples=50)
    assert result["a"] == 0
    assert result["difference"] > 0
    assert result["sentences"] == 3


# -- means over seeds -------------------------------------------------------------------------------------------------


def test_intervals_of_means_by_hand() -> None:
    """t(0.975, 4) = 2.776445 and t(0.975, 3) = 3.182446, from tables."""
    differences = [y - x for x, y in zip(BASE, OTHER, strict=True)]
    mean, reach = exact.fmean(differences), 2.776445 * exact.stdev(differences) / math.sqrt(5)
    assert statistics.paired_interval(BASE, OTHER) == (pytest.approx(mean - reach), pytest.approx(mean + reach))
    # Welch: variances 2 and 4 give (1 + 4/3)^2 / (1 + 8/9) = 2.88235 degrees of freedom, for which t is 3.25721
    reach = 3.25721 * math.sqrt(2 / 2 + 4 / 3)
    assert welch_interval([1, 3], [2, 4, 6]) == (pytest.approx(2 - reach, abs=1e-4), pytest.approx(2 + reach, abs=1e-4))
    assert welch_interval([10, 10], [12, 12]) == (2, 2)
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


def test_bootstrap_of_four_seeds_by_counting() -> None:
    """Four seeds an arm: 256 draws each, all of which can be counted; 1 in 64 has no spread, below 2.5 %."""
    a, b = [1.0, 2.0, 4.0, 8.0], [1.0, 1.5, 2.0, 2.25]
    draws = list(itertools.product(range(4), repeat=4))

    def deviations(scores: list[float]) -> np.ndarray:
        return np.array([np.std([scores[i] for i in draw], ddof=1) for draw in draws])

    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = deviations(b)[:, None] / deviations(a)[None, :]
    high = np.sort(np.where(np.isnan(ratios), np.inf, ratios).ravel())
    result = statistics.deviation_bootstrap(a, b, samples=40_000)
    assert result is not None
    # ends lie between the exact quantiles at 2.5 % -+ 0.3 % (four standard errors of 40,000 samples)
    assert 100 * (high[int(0.972 * len(high))] - 1) <= result.high <= 100 * (high[int(0.978 * len(high))] - 1)
    assert result == statistics.deviation_bootstrap(a, b, samples=40_000)
    assert result != statistics.deviation_bootstrap(a, b, samples=40_000, seed=2)


def test_paired_bootstrap_draws_seeds_of_both_arms_at_once() -> None:
    """If one arm is twice the other seed by seed, every sample says +100 %; independent draws do not."""
    a = [1.0, 2.0, 4.0, 7.0, 11.0, 11.5, 13.0]
    b = [2 * x for x in a]
    assert statistics.deviation_bootstrap(a, b, paired=True) == (pytest.approx(100), pytest.approx(100))
    loose = statistics.deviation_bootstrap(a, b)
    assert loose is not None
    assert loose.low < 50 < 150 < loose.high
    with pytest.raises(ValueError, match="as many seeds"):
        statistics.deviation_bootstrap(a, b[:3], paired=True)


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
    assert statistics.deviation_bootstrap(a, b) is None


def test_few_seeds_leave_more_unknown() -> None:
    same = [56.3, 56.3, 56.3]
    assert statistics.deviation_change(BASE, same) == -100  # WNLI: every seed predicts the larger class
    assert statistics.deviation_interval(BASE, same) is None
    assert statistics.deviation_bootstrap(BASE, same) is None
    assert statistics.deviation_bootstrap(BASE[:3], OTHER[:3]) is None  # one draw in nine has no spread
    assert statistics.brown_forsythe(BASE[:2], OTHER) is None
    assert statistics.brown_forsythe(same, same) is None
    assert statistics.paired_interval([1.0], [2.0]) is None
    assert statistics.paired_interval([0.1, 0.2, 0.3], [0.2, 0.3, 0.4]) is None  # all differences are 0.1
