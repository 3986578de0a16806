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
    """Compute Welch's 95 % interval of mean(b) - mean(a) for independent samples.

    With two seeds an arm its t is up to 12.7, so two seeds say little. None unless both have at least two, and where
    nothing scatters.
    """
    if min(len(a), len(b)) < 2:
        return None
    if max(a) == min(a) and max(b) == min(b):
        return None
    from scipy import stats

    with warnings.catch_warnings():  # of an arm whose scores are all equal
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(b, a, equal_var=False)
        return Interval(*map(float, test.confidence_interval(0.95)))


def compute_paired_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Compute Student's 95 % interval of the mean of b_i - a_i, where i is one seed of both arms.

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
    return Interval(*map(float, test.confidence_interval(0.95)))


def measure_late_gain(curve: Sequence[Sequence[float]]) -> float | None:
    """Measure the share by which validation perplexity falls in the last tenth of a curve.

    None with fewer than two evaluations.
    """
    if len(curve) < 2:
        return None
    end = interpolate(curve, 1)
    before = interpolate(curve, 0.9)
    return 1 - math.exp(end - before)


def interpolate(curve: Sequence[Sequence[float]], share: float) -> float:
    """Interpolate the logarithm of perplexity after a share of the steps of a curve (step, perplexity).

    Between evaluations it lies on a line.
    """
    steps, perplexities = np.array(curve, dtype=float).T
    place = share * steps[-1]
    logarithms = np.log(perplexities)
    return float(np.interp(place, steps, logarithms))
