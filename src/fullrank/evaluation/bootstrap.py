"""Is a difference in BLEU more than the choice of test sentences? Resampled test sets, paired (Koehn 2004)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fullrank.errors import InputError
from fullrank.evaluation.distributions import student_quantile
from fullrank.evaluation.ngrams import Metric, check_pairs, metric_named

_AT_ONCE = 2_000_000  # drawn sentences held at a time
_FEWEST = 40  # samples: of fewer, 2.5 % at each end are none


def bootstrap_interval(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    samples: int = 1000,
    seed: int = 12345,
    metric: str = "bleu",
    lowercase: bool = False,
) -> dict[str, Any]:
    """The score of one system and its 95 % interval over test sets drawn with replacement from the given one.

    `low` and `high` are the ends without the 2.5 % of the samples at each side, `mean` is that of the samples.
    metric: `bleu`, `chrf` or `tokenised_bleu`. Seed and order of drawing are sacreBLEU's, so its samples are these.
    Raises InputError for different numbers of hypotheses and references, for fewer than two sentences, and for too few samples.
    """
    measure = metric_named(metric, lowercase=lowercase)
    (scores,), (drawn,) = _resampled([_counted([hypotheses], references, measure)], measure, samples, seed)
    low, high = _interval(drawn[0])
    return {
        "metric": metric, "score": scores[0], "mean": float(drawn[0].mean()), "low": low, "high": high,
        "samples": samples, "seed": seed, "sentences": len(references),
    }  # fmt: skip


def paired_bootstrap(
    hypotheses_a: Sequence[str],
    hypotheses_b: Sequence[str],
    references: Sequence[str],
    *,
    samples: int = 1000,
    seed: int = 12345,
    metric: str = "bleu",
    lowercase: bool = False,
) -> dict[str, Any]:
    """Two systems on the same test set and its resamples, d = score of b - score of a (Koehn 2004, section 4).

        p_value = (1 + #{i : |d_i - mean d| >= |d|}) / (samples + 1)

    `difference` is d on the test set itself, `low` and `high` its 95 % interval over samples d_i, `wins` in how many samples
    which system was ahead. `p_value` is two-sided. `p_value_sacrebleu` is what `sacrebleu --paired-bs` prints: it centres
    |d_i| instead of d_i, which makes it about half as large for clear differences (nearer to a one-sided test).
    All of it is about the choice of sentences. How a model trained from another seed would score is not in it: see
    `paired_bootstrap_over_seeds`.
    Raises InputError for different numbers of hypotheses and references, for fewer than two sentences, and for too few samples.
    """
    measure = metric_named(metric, lowercase=lowercase)
    arms = [_counted([hypotheses], references, measure) for hypotheses in (hypotheses_a, hypotheses_b)]
    (found,) = against_first(arms, measure, samples=samples, seed=seed)
    return {key: value for key, value in found.items() if key != "seeds"}


def paired_bootstrap_over_seeds(
    hypotheses_a: Sequence[Sequence[str]],
    hypotheses_b: Sequence[Sequence[str]],
    references: Sequence[str],
    *,
    samples: int = 1000,
    seed: int = 12345,
    metric: str = "bleu",
    lowercase: bool = False,
) -> dict[str, Any]:
    """As `paired_bootstrap`, where each arm is several runs of one row: d = mean score of b's runs - mean score of a's.

    Every run is scored on the same resampled sentences, so the interval is about sentences, for these very models. `seeds`
    is about training: the scores of the runs, their means and standard deviations, and `low` and `high`, Welch's 95 %
    interval of the difference of means (None if an arm has one run). A difference that is to hold for other sentences
    and other seeds should leave 0 outside both.
    Raises InputError as `paired_bootstrap`, and for an arm without runs.
    """
    measure = metric_named(metric, lowercase=lowercase)
    if not hypotheses_a or not hypotheses_b:
        raise InputError(
            f"hypotheses of {len(hypotheses_a)} and {len(hypotheses_b)} runs: give at least one run of each"
        )
    arms = [_counted(runs, references, measure) for runs in (hypotheses_a, hypotheses_b)]
    (found,) = against_first(arms, measure, samples=samples, seed=seed)
    return found


def against_first(
    arms: Sequence[Sequence[np.ndarray]], metric: Metric, *, samples: int = 1000, seed: int = 12345
) -> list[dict[str, Any]]:
    """`paired_bootstrap_over_seeds` of every arm (b) with the first (a), by their runs' counts (S, F) from `metric`.

    All arms see the same samples. Raises InputError for fewer than two sentences and for too few samples.
    """
    scores, drawn = _resampled(arms, metric, samples, seed)
    a, drawn_a, found = scores[0], drawn[0].mean(axis=0), []
    for b, drawn_b in zip(scores[1:], drawn[1:], strict=True):
        means = statistics.fmean(a), statistics.fmean(b)
        low, high = welch_interval(a, b)
        found.append({
            "metric": metric.name, "a": means[0], "b": means[1],
            **_difference(means[1] - means[0], drawn_b.mean(axis=0) - drawn_a),
            "samples": samples, "seed": seed, "sentences": len(arms[0][0]),
            "seeds": {"a": _spread(a), "b": _spread(b), "low": low, "high": high},
        })  # fmt: skip
    return found


def welch_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float | None, float | None]:
    """Welch's 95 % interval of mean(b) - mean(a) for independent samples; (None, None) unless both have at least two.

        mean(b) - mean(a) +- t(0.975, v) * sqrt(s_a^2 / n_a + s_b^2 / n_b)

    v are Welch's degrees of freedom. With two seeds an arm t is up to 12.7: so little do two seeds say.
    """
    if min(len(a), len(b)) < 2:
        return None, None
    parts = [statistics.variance(scores) / len(scores) for scores in (a, b)]
    difference, variance = statistics.fmean(b) - statistics.fmean(a), sum(parts)
    if variance == 0:
        return difference, difference
    shares = sum((part / variance) ** 2 / (len(scores) - 1) for part, scores in zip(parts, (a, b), strict=True))
    reach = student_quantile(1 / shares) * variance**0.5
    return difference - reach, difference + reach


def _counted(runs: Sequence[Sequence[str]], references: Sequence[str], metric: Metric) -> list[np.ndarray]:
    for run in runs:
        check_pairs(run, references)
    return [metric.statistics(run, references) for run in runs]


def _resampled(
    arms: Sequence[Sequence[np.ndarray]], metric: Metric, samples: int, seed: int
) -> tuple[list[list[float]], list[np.ndarray]]:
    """For each arm the scores of its runs, and those on the resampled test sets (runs, samples); the draws are shared."""
    runs = [counts for arm in arms for counts in arm]  # each (S, F)
    sentences = len(runs[0])
    if samples < _FEWEST:
        raise InputError(f"samples: at least {_FEWEST} for an interval of 95 %, given {samples}")
    if sentences < 2:
        raise InputError("one sentence: every sample of it is the same, so nothing can be said of chance; give more")
    sums = np.concatenate([times @ np.concatenate(runs, axis=1) for times in _drawn(sentences, samples, seed)])
    drawn = metric.score(sums.reshape(samples, len(runs), -1)).T  # (runs, samples)
    places, start = [], 0
    for arm in arms:
        places.append(slice(start, start + len(arm)))
        start += len(arm)
    scores = [float(metric.score(counts.sum(axis=0))) for counts in runs]
    return [scores[place] for place in places], [drawn[place] for place in places]


def _drawn(sentences: int, samples: int, seed: int) -> Iterator[np.ndarray]:
    """How often each sentence is in each sample, (some samples, S) at a time: sums over samples are products with it."""
    generator = np.random.default_rng(seed)
    at_once = max(1, _AT_ONCE // sentences)
    for start in range(0, samples, at_once):
        rows = min(at_once, samples - start)
        places = generator.integers(sentences, size=(rows, sentences)) + sentences * np.arange(rows)[:, None]
        times = np.bincount(places.ravel(), minlength=rows * sentences)
        yield times.reshape(rows, sentences).astype(np.float64)


def _interval(drawn: np.ndarray) -> tuple[float, float]:
    """The ends of what is left without the 2.5 % of the samples at each side, as Koehn and sacreBLEU take them."""
    ordered, left_out = np.sort(drawn), len(drawn) // 40
    return float(ordered[left_out]), float(ordered[len(drawn) - left_out - 1])


def _difference(observed: float, drawn: np.ndarray) -> dict[str, Any]:
    """Interval, p-values and wins of a difference from its samples."""
    low, high = _interval(drawn)
    size = np.abs(drawn)
    extreme = int((np.abs(drawn - drawn.mean()) >= abs(observed)).sum())
    as_sacrebleu = int((size - size.mean() > abs(observed)).sum())
    return {
        "difference": observed,
        "low": low,
        "high": high,
        "p_value": (1 + extreme) / (1 + len(drawn)),
        "p_value_sacrebleu": (1 + as_sacrebleu) / (1 + len(drawn)),
        "wins": {"a": int((drawn < 0).sum()), "b": int((drawn > 0).sum()), "ties": int((drawn == 0).sum())},
    }


def _spread(scores: Sequence[float]) -> dict[str, Any]:
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    return {"scores": list(scores), "mean": statistics.fmean(scores), "deviation": deviation}
