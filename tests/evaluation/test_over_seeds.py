"""Means and deviations over seeds: quantiles against scipy, intervals by hand and by their coverage."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import scipy.special
import scipy.stats

from fullrank.evaluation import over_seeds
from fullrank.evaluation.distributions import beta_share, f_quantile, f_share, student_quantile

BASE, OTHER = [41.2, 43.0, 40.1, 42.4, 41.9], [42.5, 42.9, 42.2, 43.1, 42.0]


@pytest.mark.parametrize("a", [0.5, 1, 2.5, 19.5, 400])
@pytest.mark.parametrize("b", [0.5, 1, 4, 33.5, 3000])
def test_incomplete_beta(a: float, b: float) -> None:
    for x in (0.0, 1e-9, 0.01, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9, 1.0):
        assert beta_share(a, b, x) == pytest.approx(scipy.special.betainc(a, b, x), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("above", "below"), list(itertools.product([1, 2, 4, 9, 39, 200], repeat=2)))
def test_quantiles_of_f(above: int, below: int) -> None:
    for share in (0.001, 0.025, 0.5, 0.975):
        found = f_quantile(share, above, below)
        assert found == pytest.approx(scipy.stats.f.ppf(share, above, below), rel=1e-9)
        assert f_share(found, above, below) == pytest.approx(share, rel=1e-9)
    assert f_share(-1, above, below) == f_share(0, above, below) == 0


@pytest.mark.parametrize("degrees", [1, 1.47, 2, 8.3, 78, 1e5])
def test_quantiles_of_t(degrees: float) -> None:
    for share in (0.025, 0.5, 0.9, 0.975):
        assert student_quantile(degrees, share) == pytest.approx(scipy.stats.t.ppf(share, degrees), rel=1e-9, abs=1e-12)


def test_what_is_no_share_or_no_distribution_is_refused() -> None:
    for share in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="share"):
            f_quantile(share, 2, 2)
    for a, b, x in ((0, 1, 0.5), (1, -1, 0.5), (1, 1, 1.5)):
        with pytest.raises(ValueError, match="positive"):
            beta_share(a, b, x)


def test_paired_interval_is_scipys() -> None:
    found = over_seeds.paired_interval(BASE, OTHER)
    expected = scipy.stats.ttest_rel(OTHER, BASE).confidence_interval(0.95)
    assert found == (pytest.approx(expected.low), pytest.approx(expected.high))
    with pytest.raises(ValueError, match="zip"):
        over_seeds.paired_interval(BASE, OTHER[:3])


def test_change_of_deviation_is_the_papers() -> None:
    """Skip Cross-head, Table 4, MRPC: 1.281 and 1.4 are +9.3 %, 0.988 and 0.91 are -7.9 %; CoLA 1.23 and 1.1 are -10.6 %."""

    def spread(deviation: float) -> list[float]:
        return [80 - deviation, 80.0, 80 + deviation]  # its sample deviation is `deviation`

    for base, other, stated in ((1.281, 1.4, 9.3), (0.988, 0.91, -7.9), (1.23, 1.1, -10.6)):
        assert over_seeds.deviation_change(spread(base), spread(other)) == pytest.approx(stated, abs=0.05)


def test_interval_of_the_deviation_by_hand() -> None:
    """r = s_b^2 / s_a^2; with 4 and 4 degrees of freedom F(0.975) = 9.60453 (tables), and F(0.025) is its inverse."""
    ratio = statistics.variance(OTHER) / statistics.variance(BASE)
    low, high = over_seeds.deviation_interval(BASE, OTHER) or (0, 0)
    assert low == pytest.approx(100 * (math.sqrt(ratio / 9.60453) - 1), abs=1e-3)
    assert high == pytest.approx(100 * (math.sqrt(ratio * 9.60453) - 1), abs=1e-3)
    # of unequal numbers the other arm's degrees of freedom come first
    low, _ = over_seeds.deviation_interval(BASE, OTHER[:3]) or (0, 0)
    ratio = statistics.variance(OTHER[:3]) / statistics.variance(BASE)
    assert low == pytest.approx(100 * (math.sqrt(ratio / scipy.stats.f.ppf(0.975, 2, 4)) - 1))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """2,000 pairs of normal samples whose deviations are as 1 to 0.7: 95 % of intervals by F hold -30 %."""
    drawn = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        found = over_seeds.deviation_interval(drawn.normal(0, 1, 5).tolist(), drawn.normal(3, 0.7, 5).tolist())
        assert found is not None
        held += found.low <= -30 <= found.high
    assert held / 2000 == pytest.approx(0.95, abs=0.02)  # four standard errors


def test_bootstrap_of_three_seeds_by_counting() -> None:
    """Four seeds an arm: 256 draws each, all of which can be counted; 1 in 64 has no spread, below 2.5 %."""
    a, b = [1.0, 2.0, 4.0, 8.0], [1.0, 1.5, 2.0, 2.25]
    draws = list(itertools.product(range(4), repeat=4))

    def deviations(scores: list[float]) -> np.ndarray:
        return np.array([np.std([scores[i] for i in draw], ddof=1) for draw in draws])

    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = deviations(b)[:, None] / deviations(a)[None, :]
    high = np.sort(np.where(np.isnan(ratios), np.inf, ratios).ravel())
    found = over_seeds.deviation_bootstrap(a, b, samples=40_000)
    assert found is not None
    # ends lie between the exact quantiles at 2.5 % -+ 0.3 % (four standard errors of 40,000 samples)
    assert 100 * (high[int(0.972 * len(high))] - 1) <= found.high <= 100 * (high[int(0.978 * len(high))] - 1)
    assert found == over_seeds.deviation_bootstrap(a, b, samples=40_000)
    assert found != over_seeds.deviation_bootstrap(a, b, samples=40_000, seed=2)


def test_paired_bootstrap_draws_seeds_of_both_arms_at_once() -> None:
    """Where one arm is twice the other seed by seed, every sample says +100 %; independent draws do not."""
    a = [1.0, 2.0, 4.0, 7.0, 11.0, 11.5, 13.0]
    b = [2 * x for x in a]
    assert over_seeds.deviation_bootstrap(a, b, paired=True) == (pytest.approx(100), pytest.approx(100))
    loose = over_seeds.deviation_bootstrap(a, b)
    assert loose is not None
    assert loose.low < 50 < 150 < loose.high
    with pytest.raises(ValueError, match="as many seeds"):
        over_seeds.deviation_bootstrap(a, b[:3], paired=True)


def test_brown_forsythe_is_scipys() -> None:
    for b in (OTHER, OTHER[:3], [40.0, 47.0, 44.0, 31.0]):
        expected = scipy.stats.levene(BASE, b, center="median").pvalue
        assert over_seeds.brown_forsythe(BASE, b) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("a", "b"), [([], [1.0, 2.0]), ([1.0], [2.0]), ([1.0, 1.0, 1.0], [2.0, 3.0, 4.0]), ([0.3, 0.3], [0.5, 0.5])]
)
def test_nothing_is_said_that_cannot_be_known(a: list[float], b: list[float]) -> None:
    assert over_seeds.deviation_change(a, b) is None
    assert over_seeds.deviation_interval(a, b) is None
    assert over_seeds.deviation_bootstrap(a, b) is None


def test_few_seeds_leave_more_unknown() -> None:
    same = [56.3, 56.3, 56.3]
    assert over_seeds.deviation_change(BASE, same) == -100  # WNLI: every seed predicts the larger class
    assert over_seeds.deviation_interval(BASE, same) is None
    assert over_seeds.deviation_bootstrap(BASE, same) is None
    assert over_seeds.deviation_bootstrap(BASE[:3], OTHER[:3]) is None  # one draw in nine has no spread
    assert over_seeds.brown_forsythe(BASE[:2], OTHER) is None
    assert over_seeds.brown_forsythe(same, same) is None
    assert over_seeds.paired_interval([1.0], [2.0]) is None
    assert over_seeds.paired_interval([0.1, 0.2, 0.3], [0.2, 0.3, 0.4]) is None  # all differences are 0.1
