"""Statistics against scipy and hand computation; intervals cover the truth as often as they say."""

from __future__ import annotations

import math
import statistics as exact

import pytest
import scipy.stats

from fullrank.evaluation import statistics
from fullrank.evaluation.statistics import welch_interval

BASE, OTHER = [41.2, 43.0, 40.1, 42.4, 41.9], [42.5, 42.9, 42.2, 43.1, 42.0]


def test_intervals_of_means_by_hand() -> None:
    """t(0.975, 4) = 2.776445 and t(0.975, 3) = 3.182446, from tables."""
    differences = [y - x for x, y in zip(BASE, OTHER, strict=True)]
    mean, reach = exact.fmean(differences), 2.776445 * exact.stdev(differences) / math.sqrt(5)
    assert statistics.compute_paired_interval(BASE, OTHER) == (pytest.approx(mean - reach), pytest.approx(mean + reach))
    # Welch: variances 2 and 4 give (1 + 4/3)^2 / (1 + 8/9) = 2.88235 degrees of freedom, for which t is 3.25721
    reach = 3.25721 * math.sqrt(2 / 2 + 4 / 3)
    assert welch_interval([1, 3], [2, 4, 6]) == (pytest.approx(2 - reach, abs=1e-4), pytest.approx(2 + reach, abs=1e-4))
    assert welch_interval([10, 10], [12, 12]) is None
    assert welch_interval([10], [12, 13]) is None
    with pytest.raises(ValueError, match="zip"):
        statistics.compute_paired_interval(BASE, OTHER[:3])


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
