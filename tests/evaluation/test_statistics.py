"""Intervals of means against computation by hand."""

import math
import statistics as exact

import pytest

from fullrank.evaluation import statistics
from fullrank.evaluation.statistics import welch_interval

BASE, OTHER = [41.2, 43.0, 40.1, 42.4, 41.9], [42.5, 42.9, 42.2, 43.1, 42.0]


def test_intervals_of_means_by_hand():
    """t(0.975, 4) = 2.776445 and t(0.975, 3) = 3.182446, from tables."""
    differences = [y - x for x, y in zip(BASE, OTHER, strict=True)]
    mean = exact.fmean(differences)
    reach = 2.776445 * exact.stdev(differences) / math.sqrt(5)
    assert statistics.compute_paired_interval(BASE, OTHER) == (pytest.approx(mean - reach), pytest.approx(mean + reach))
    # Welch: variances 2 and 4 give (1 + 4/3)^2 / (1 + 8/9) = 2.88235 degrees of freedom, for which t is 3.25721
    reach = 3.25721 * math.sqrt(2 / 2 + 4 / 3)
    assert welch_interval([1, 3], [2, 4, 6]) == (pytest.approx(2 - reach, abs=1e-4), pytest.approx(2 + reach, abs=1e-4))
    assert welch_interval([10, 10], [12, 12]) is None
    assert welch_interval([10], [12, 13]) is None
    with pytest.raises(ValueError, match="zip"):
        statistics.compute_paired_interval(BASE, OTHER[:3])
