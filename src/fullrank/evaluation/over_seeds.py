"""Two ways of training, several seeds each: do means differ, do deviations differ?

a are the scores of the baseline, b those of the other arm. What cannot be known from so few seeds is None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fullrank.evaluation.distributions import f_quantile, f_share, student_quantile

SAMPLES, SEED = 10_000, 12345
_EQUAL = 1e-12  # differences of this share of the scores are those of rounding
_AT_ONCE = 4_000_000  # drawn scores held at a time


class Interval(NamedTuple):
    """The ends of a 95 % confidence interval."""

    low: float
    high: float


def paired_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Student's interval of the mean of b_i - a_i, where i is one seed of both arms.

        mean(d) +- t(0.975, n - 1) s_d / sqrt(n)

    None for fewer than two seeds, and where all differences are equal. ValueError unless a and b are of one length.
    """
    differences = [y - x for x, y in zip(a, b, strict=True)]
    if len(differences) < 2:
        return None
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation <= _EQUAL * max(map(abs, (*a, *b))):
        return None
    reach = student_quantile(len(differences) - 1) * deviation / math.sqrt(len(differences))
    return Interval(mean - reach, mean + reach)


def deviation_change(a: Sequence[float], b: Sequence[float]) -> float | None:
    """By how many percent b's sample standard deviation (n - 1) is above a's (Skip Cross-head, Table 4).

        100 (s_b / s_a - 1)

    None unless both have two scores and a's are not all equal.
    """
    if min(len(a), len(b)) < 2 or not statistics.stdev(a) > 0:
        return None
    return 100 * (statistics.stdev(b) / statistics.stdev(a) - 1)


def deviation_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """The interval of `deviation_change` from the F distribution; exact for independent normal scores.

        from 100 (sqrt(r / F(0.975)) - 1) to 100 (sqrt(r / F(0.025)) - 1)    with r = s_b^2 / s_a^2

    F has n_b - 1 and n_a - 1 degrees of freedom. None where the change is not known, and where b's scores are all equal.
    """
    change = deviation_change(a, b)
    if change is None or change <= -100:
        return None
    ratio = (1 + change / 100) ** 2
    ends = (math.sqrt(ratio / f_quantile(share, len(b) - 1, len(a) - 1)) for share in (0.975, 0.025))
    return Interval(*(100 * (end - 1) for end in ends))


def deviation_bootstrap(
    a: Sequence[float], b: Sequence[float], *, paired: bool = False, samples: int = SAMPLES, seed: int = SEED
) -> Interval | None:
    """The interval of `deviation_change` over seeds drawn with replacement: 2.5 % and 97.5 % of the samples are beyond it.

    It assumes no distribution, but of few seeds it is too narrow. `paired`: one draw of seeds counts for both arms.
    A sample in which a's scores are all equal has no finite change and counts as beyond either end; None where an end
    would be such a sample (fewer than four seeds), where the change is not known, and where either arm has no spread.
    """
    change = deviation_change(a, b)
    if change is None or change <= -100:
        return None
    if paired and len(a) != len(b):
        raise ValueError(f"paired arms have as many seeds, given {len(a)} and {len(b)}")
    generator = np.random.default_rng(seed)
    low: list[np.ndarray] = []
    high: list[np.ndarray] = []
    at_once = max(1, _AT_ONCE // max(len(a), len(b)))
    for start in range(0, samples, at_once):
        rows = min(at_once, samples - start)
        of_a = generator.integers(len(a), size=(rows, len(a)))
        of_b = of_a if paired else generator.integers(len(b), size=(rows, len(b)))
        below, above = (_deviations(scores, places) for scores, places in ((a, of_a), (b, of_b)))
        known = below > 0
        ratio = above / np.where(known, below, 1.0)
        low.append(np.where(known, ratio, 0.0))
        high.append(np.where(known, ratio, np.inf))
    beyond = samples // 40
    ends = np.sort(np.concatenate(low))[beyond], np.sort(np.concatenate(high))[samples - beyond - 1]
    if ends[0] <= 0 or not np.isfinite(ends[1]):
        return None
    return Interval(*(100 * (float(end) - 1) for end in ends))


def _deviations(scores: Sequence[float], places: np.ndarray) -> np.ndarray:
    """Sample standard deviation of each row of drawn scores; exactly 0 where all of them are one score."""
    drawn = np.asarray(scores, dtype=np.float64)[places]
    equal = drawn.min(axis=1) == drawn.max(axis=1)
    return np.where(equal, 0.0, drawn.std(axis=1, ddof=1))


def brown_forsythe(a: Sequence[float], b: Sequence[float]) -> float | None:
    """p of the hypothesis that both arms have one deviation, from the distances z to each arm's median.

        F = (N - 2) sum_g n_g (mean z_g - mean z)^2 / sum_g sum_i (z_gi - mean z_g)^2,   p = P(F(1, N - 2) > F)

    It holds up where scores are not normal. None with fewer than three scores in an arm, and where all distances in each
    arm are equal.
    """
    if min(len(a), len(b)) < 3:
        return None
    distances = [[abs(score - statistics.median(arm)) for score in arm] for arm in (a, b)]
    means = [statistics.fmean(arm) for arm in distances]
    total = len(a) + len(b)
    middle = statistics.fmean([*distances[0], *distances[1]])
    between = sum(len(arm) * (mean - middle) ** 2 for arm, mean in zip(distances, means, strict=True))
    within = sum((z - mean) ** 2 for arm, mean in zip(distances, means, strict=True) for z in arm)
    if within <= _EQUAL**2 * sum(z * z for arm in distances for z in arm):
        return None
    return 1 - f_share((total - 2) * between / within, 1, total - 2)
