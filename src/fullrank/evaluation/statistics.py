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
    if min(len(a), len(b)) < 2 or (max(a) == min(a) and max(b) == min(b)):
        return None
    from scipy import stats

    with warnings.catch_warnings():  # of an arm whose scores are all equal
        warnings.simplefilter("ignore", RuntimeWarning)
        ends = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    return Interval(float(ends.low), float(ends.high))


def compute_paired_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Student's 95 % interval of the mean of b_i - a_i, where i is one seed of both arms.

    None for fewer than two seeds, and where all differences are equal. ValueError unless a and b are of one length.
    """
    differences = [y - x for x, y in zip(a, b, strict=True)]
    if len(differences) < 2:
        return None
    if statistics.stdev(differences) <= _EQUAL * max(map(abs, (*a, *b))):
        return None
    from scipy import stats

    ends = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return Interval(float(ends.low), float(ends.high))


def measure_late_gain(curve: Sequence[Sequence[float]]) -> float | None:
    """The share by which validation perplexity falls in the last tenth of a curve. None with fewer than two evaluations."""
    if len(curve) < 2:
        return None
    return 1 - math.exp(interpolate(curve, 1) - interpolate(curve, 0.9))


def interpolate(curve: Sequence[Sequence[float]], share: float) -> float:
    """The logarithm of perplexity after a share of the steps of a curve (step, perplexity); a line between evaluations."""
    steps, perplexities = np.array(curve, dtype=float).T
    return float(np.interp(share * steps[-1], steps, np.log(perplexities)))
