"""Statistics of comparisons: resampled test sets (Koehn 2004), means and deviations over seeds.

Two questions that are easily confused. A bootstrap over sentences asks if a difference would hold on other test
sentences, for these very models; an interval over seeds asks if it would hold for models trained again.
a is always the baseline, b the other arm, and differences are b - a. A result that too few scores cannot give is None.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fullrank.core.errors import InputError
from fullrank.evaluation.tasks import Metric

SAMPLES, SEED = 10_000, 12345  # of seeds, which are few; test sets have their own defaults
_MIN_SAMPLES = 40  # with fewer, 2.5 % at each end are none
_CHUNK = 2_000_000  # random numbers held at a time
_EQUAL = 1e-12  # differences of this share of the scores are rounding


class Interval(NamedTuple):
    """Ends of a 95 % confidence interval."""

    low: float
    high: float


# -- resampled test sets ----------------------------------------------------------------------------------------------


def bootstrap_interval(counts: np.ndarray, metric: Metric, *, samples: int = 1000, seed: int = SEED) -> dict[str, Any]:
    """Score of one system with its 95 % interval over test sets drawn with replacement from the given one.

    counts (S, F): from `metric.statistics`. `low` and `high` leave out 2.5 % of the samples at each side; `mean` is the mean
    of the samples. Seed and order of drawing are sacreBLEU's, so the samples are the same.
    Raises InputError for fewer than two sentences, and too few samples.
    """
    ((score,),), (sampled,) = _resample([[counts]], metric, samples, seed)
    low, high = _percentiles(sampled[0])
    return {
        "metric": metric.name, "score": score, "mean": float(sampled[0].mean()), "low": low, "high": high,
        "samples": samples, "seed": seed, "sentences": len(counts),
    }  # fmt: skip


def against_first(
    arms: Sequence[Sequence[np.ndarray]], metric: Metric, *, samples: int = 1000, seed: int = SEED
) -> list[dict[str, Any]]:
    """Paired bootstrap of every arm b with the first arm a (Koehn 2004, section 4); all arms see the same samples.

        d = mean score of b's runs - mean score of a's        p_value = (1 + #{i : |d_i - mean d| >= |d|}) / (samples + 1)

    arms: for each arm the counts (S, F) of its runs, from `metric.statistics`.
    `difference` is d on the test set itself, `low` and `high` its 95 % interval over the samples d_i, `wins` counts the
    samples in which each arm was ahead. `p_value` is two-sided. `p_value_sacrebleu` is what `sacrebleu --paired-bs`
    prints: it centres |d_i| instead of d_i, about half as large for clear differences (nearer to a one-sided test).
    All of this is about the choice of sentences. `seeds` is about training: scores of the runs, their means and
    deviations, and Welch's interval of the difference of means.
    Raises InputError for fewer than two sentences and for too few samples.
    """
    scores, sampled = _resample(arms, metric, samples, seed)
    a, sampled_a, comparisons = scores[0], sampled[0].mean(axis=0), []
    for b, sampled_b in zip(scores[1:], sampled[1:], strict=True):
        mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
        observed, differences = mean_b - mean_a, sampled_b.mean(axis=0) - sampled_a
        low, high = _percentiles(differences)
        size = np.abs(differences)
        extreme = int((np.abs(differences - differences.mean()) >= abs(observed)).sum())
        extreme_sacrebleu = int((size - size.mean() > abs(observed)).sum())
        wins = {"a": differences < 0, "b": differences > 0, "ties": differences == 0}
        welch = welch_interval(a, b) or (None, None)
        comparisons.append({
            "metric": metric.name, "a": mean_a, "b": mean_b, "difference": observed, "low": low, "high": high,
            "p_value": (1 + extreme) / (1 + samples), "p_value_sacrebleu": (1 + extreme_sacrebleu) / (1 + samples),
            "wins": {name: int(won.sum()) for name, won in wins.items()},
            "samples": samples, "seed": seed, "sentences": len(arms[0][0]),
            "seeds": {"a": _spread(a), "b": _spread(b), "low": welch[0], "high": welch[1]},
        })  # fmt: skip
    return comparisons


def _resample(
    arms: Sequence[Sequence[np.ndarray]], metric: Metric, samples: int, seed: int
) -> tuple[list[list[float]], list[np.ndarray]]:
    """Scores of the runs of each arm, and their scores on the resampled test sets (runs, samples)."""
    runs = [counts for arm in arms for counts in arm]  # each (S, F)
    sentences = len(runs[0])
    if samples < _MIN_SAMPLES:
        raise InputError(f"samples: at least {_MIN_SAMPLES} for an interval of 95 %, given {samples}")
    if sentences < 2:
        raise InputError("one sentence: every sample of it is the same, so nothing can be said of chance; give more")
    generator, counts, sums = np.random.default_rng(seed), np.concatenate(runs, axis=1), []
    rows = max(1, _CHUNK // sentences)
    for start in range(0, samples, rows):
        drawn = generator.integers(sentences, size=(min(rows, samples - start), sentences))
        # how often each sentence is in each sample (rows, S): sums over samples are products with it
        flat = (drawn + sentences * np.arange(len(drawn))[:, None]).ravel()
        times = np.bincount(flat, minlength=drawn.size).reshape(drawn.shape)
        sums.append(times.astype(np.float64) @ counts)
    sampled = metric.score(np.concatenate(sums).reshape(samples, len(runs), -1)).T  # (runs, samples)
    scores = [float(metric.score(run.sum(axis=0))) for run in runs]
    ends = np.cumsum([len(arm) for arm in arms]).tolist()
    parts = [slice(end - len(arm), end) for arm, end in zip(arms, ends, strict=True)]
    return [scores[part] for part in parts], [sampled[part] for part in parts]


def _percentiles(sampled: np.ndarray) -> Interval:
    """Ends without the 2.5 % of the samples at each side, as Koehn and sacreBLEU take them."""
    ordered, left_out = np.sort(sampled), len(sampled) // 40
    return Interval(float(ordered[left_out]), float(ordered[len(sampled) - left_out - 1]))


def _spread(scores: Sequence[float]) -> dict[str, Any]:
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    return {"scores": list(scores), "mean": statistics.fmean(scores), "deviation": deviation}


# -- means over seeds -------------------------------------------------------------------------------------------------


def welch_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Welch's 95 % interval of mean(b) - mean(a) for independent samples; None unless both have at least two.

    With two seeds an arm its t is up to 12.7: so little do two seeds say.
    """
    if min(len(a), len(b)) < 2:
        return None
    if max(a) == min(a) and max(b) == min(b):
        difference = statistics.fmean(b) - statistics.fmean(a)
        return Interval(difference, difference)
    from scipy import stats

    with warnings.catch_warnings():  # of an arm whose scores are all equal
        warnings.simplefilter("ignore", RuntimeWarning)
        ends = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    return Interval(float(ends.low), float(ends.high))


def paired_interval(a: Sequence[float], b: Sequence[float]) -> Interval | None:
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


# -- deviations over seeds --------------------------------------------------------------------------------------------


def deviation_change(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Change of the sample standard deviation (n - 1) from a to b, in percent (Skip Cross-head, Table 4).

        100 (s_b / s_a - 1)

    None unless both have two scores and a's are not all equal.
    """
    if min(len(a), len(b)) < 2 or not statistics.stdev(a) > 0:
        return None
    return 100 * (statistics.stdev(b) / statistics.stdev(a) - 1)


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
    low, high = np.sqrt(ratio / stats.f(len(b) - 1, len(a) - 1).ppf([0.975, 0.025]))
    return Interval(100 * (float(low) - 1), 100 * (float(high) - 1))


def deviation_bootstrap(
    a: Sequence[float], b: Sequence[float], *, paired: bool = False, samples: int = SAMPLES, seed: int = SEED
) -> Interval | None:
    """Interval of `deviation_change` over seeds drawn with replacement, without 2.5 % of the samples at each side.

    It assumes no distribution, but of few seeds it is too narrow. `paired`: one draw of seeds counts for both arms.
    A sample in which a's scores are all equal has an infinite change, or none at all if b's are too: that counts as
    beyond either end. None where an end would be a sample without spread (fewer than four seeds), where the change is
    not known, and where either arm has no spread. ValueError for paired arms of different lengths.
    """
    change = deviation_change(a, b)
    if change is None or change <= -100:
        return None
    if paired and len(a) != len(b):
        raise ValueError(f"paired arms have as many seeds, given {len(a)} and {len(b)}")
    generator = np.random.default_rng(seed)
    rows_a = generator.integers(len(a), size=(samples, len(a)))
    rows_b = rows_a if paired else generator.integers(len(b), size=(samples, len(b)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _sampled_deviations(b, rows_b) / _sampled_deviations(a, rows_a)
    left_out = samples // 40
    low = np.sort(np.where(np.isnan(ratios), 0.0, ratios))[left_out]
    high = np.sort(ratios)[samples - left_out - 1]  # nan comes last
    if low <= 0 or not np.isfinite(high):
        return None
    return Interval(100 * (float(low) - 1), 100 * (float(high) - 1))


def _sampled_deviations(scores: Sequence[float], rows: np.ndarray) -> np.ndarray:
    """Sample standard deviation of the scores of each row of indices; exactly 0 where all of them are one score."""
    sampled = np.asarray(scores, dtype=np.float64)[rows]
    return np.where(np.ptp(sampled, axis=1) == 0, 0.0, sampled.std(axis=1, ddof=1))


def brown_forsythe(a: Sequence[float], b: Sequence[float]) -> float | None:
    """p-value of the hypothesis that both arms have one deviation: Levene's test with distances to the median.

    It holds up where scores are not normal. None with fewer than three scores in an arm, and where all distances in
    each arm are equal.
    """
    if min(len(a), len(b)) < 3:
        return None
    distances = [np.abs(np.subtract(arm, statistics.median(arm))) for arm in (a, b)]
    if all(np.ptp(arm) <= _EQUAL * arm.max() for arm in distances):
        return None
    from scipy import stats

    return float(stats.levene(a, b, center="median").pvalue)
