"""Statistics of comparisons: means and deviations over seeds.

a is always the baseline, b the other arm, and differences are b - a. A result that too few scores cannot give is None.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STILL_FALLING = 0.01  # the share of perplexity that a training loses in its last tenth, if it is not at its end
_EQUAL = 1e-12  # differences of this share of the scores are rounding


class Interval(NamedTuple):
    """Ends of a 95 % confidence interval."""

    low: float
    high: float


def welch_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Welch's 95 % interval of mean(b) - mean(a) for independent samples.

    With two seeds an arm its t is up to 12.7: so little do two seeds say.
    None unless both have at least two, and where nothing scatters.
    """
    fewest = min(len(a), len(b))
    if fewest < 2:
        return None
    a_scatters = max(a) != min(a)
    b_scatters = max(b) != min(b)
    if not (a_scatters or b_scatters):
        return None
    from scipy import stats

    with warnings.catch_warnings():  # of an arm whose scores are all equal
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(b, a, equal_var=False)
        ends = test.confidence_interval(0.95)
    return Interval(float(ends.low), float(ends.high))


def compute_paired_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Student's 95 % interval of the mean of b_i - a_i, where i is one seed of both arms.

    None for fewer than two seeds, and where all differences are equal. ValueError unless a and b are of one length.
    """
    differences = [y - x for x, y in zip(a, b, strict=True)]
    if len(differences) < 2:
        return None
    largest = max(map(abs, (*a, *b)))
    if statistics.stdev(differences) <= _EQUAL * largest:
        return None
    from scipy import stats

    test = stats.ttest_1samp(differences, 0.0)
    ends = test.confidence_interval(0.95)
    return Interval(float(ends.low), float(ends.high))


def deviation_change(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Change of the sample standard deviation (n - 1) from a to b, in percent (Skip Cross-head, Table 4).

        100 (s_b / s_a - 1)

    None unless both have two scores and a's are not all equal.
    """
    fewest = min(len(a), len(b))
    if fewest < 2:
        return None
    before = statistics.stdev(a)
    if before > 0:
        after = statistics.stdev(b)
        return 100 * (after / before - 1)
    return None


def deviation_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Interval of `deviation_change` from the F distribution; exact for independent normal scores.

        from 100 (sqrt(r / F(0.975)) - 1) to 100 (sqrt(r / F(0.025)) - 1)    with r = s_b^2 / s_a^2

    F has n_b - 1 and n_a - 1 degrees of freedom. None where the change is not known, and where b's scores are all equal.
    """
    change = deviation_change(a, b)
    if change is None or change <= -100:
        return None
    from scipy import stats

    ratio = (1 + change / 100) ** 2
    freedom_a = len(a) - 1
    freedom_b = len(b) - 1
    distribution = stats.f(freedom_b, freedom_a)
    quantiles = distribution.ppf([0.975, 0.025])
    deviations = np.sqrt(ratio / quantiles)
    low, high = 100 * (deviations - 1)
    return Interval(float(low), float(high))


def brown_forsythe(a: Sequence[float], b: Sequence[float]) -> float | None:
    """p-value of the hypothesis that both arms have one deviation: Levene's test with distances to the median.

    It holds up where scores are not normal. None with fewer than three scores in an arm, and where all distances in
    each arm are equal.
    """
    fewest = min(len(a), len(b))
    if fewest < 3:
        return None
    distances = []
    for arm in (a, b):
        median = statistics.median(arm)
        distances.append(np.abs(np.subtract(arm, median)))
    if all(np.ptp(arm) <= _EQUAL * arm.max() for arm in distances):
        return None
    from scipy import stats

    test = stats.levene(a, b, center="median")
    return float(test.pvalue)


def measure_late_gain(curve: Sequence[Sequence[float]]) -> float | None:
    """The share by which validation perplexity falls in the last tenth of a curve. None with fewer than two evaluations."""
    if len(curve) < 2:
        return None
    end = interpolate(curve, 1)
    before = interpolate(curve, 0.9)
    return 1 - math.exp(end - before)


def interpolate(curve: Sequence[Sequence[float]], share: float) -> float:
    """The logarithm of perplexity after a share of the steps of a curve (step, perplexity); a line between evaluations."""
    steps, perplexities = np.array(curve, dtype=float).T
    place = share * steps[-1]
    logarithms = np.log(perplexities)
    return float(np.interp(place, steps, logarithms))
