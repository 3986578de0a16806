"""Resampled test sets: the same samples as sacreBLEU's, and p-values and intervals that keep what they promise."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np
import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from fullrank.errors import InputError
from fullrank.evaluation import bootstrap
from fullrank.evaluation.bootstrap import (
    bootstrap_interval,
    paired_bootstrap,
    paired_bootstrap_over_seeds,
    welch_interval,
)
from fullrank.evaluation.distributions import student_quantile

WORDS = [f"w{index}" for index in range(40)]


def texts(count: int, seed: int) -> list[list[str]]:
    drawn = random.Random(seed)
    return [[drawn.choice(WORDS) for _ in range(drawn.randint(4, 16))] for _ in range(count)]


def system(references: list[list[str]], seed: int, wrong: float) -> list[str]:
    """Translations in which a share of the words is wrong."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choice(WORDS) if drawn.random() < wrong else word for word in line) for line in references]


def joined(references: list[list[str]]) -> list[str]:
    return [" ".join(line) for line in references]


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_the_same_as_sacrebleus_paired_test(metric: str) -> None:
    words = texts(80, 1)
    a, b, references = system(words, 2, 0.25), system(words, 3, 0.22), joined(words)
    scorer = sacrebleu.BLEU(references=[references]) if metric == "bleu" else sacrebleu.CHRF(references=[references])
    _, scores = PairedTest([("a", a), ("b", b)], {metric: scorer}, None, test_type="bs", n_samples=300)()
    found = paired_bootstrap(a, b, references, samples=300, metric=metric)
    key = next(name for name in scores if name != "System")
    theirs: Any = scores[key]
    assert (found["a"], found["b"]) == pytest.approx((theirs[0].score, theirs[1].score), abs=1e-9)
    assert found["difference"] == pytest.approx(theirs[1].score - theirs[0].score, abs=1e-9)
    assert found["p_value_sacrebleu"] == pytest.approx(theirs[1].p_value, abs=1e-12)
    alone = bootstrap_interval(b, references, samples=300, metric=metric)
    assert alone["mean"] == pytest.approx(theirs[1].mean, rel=1e-5)  # theirs adds up in single precision
    assert (alone["high"] - alone["low"]) / 2 == pytest.approx(theirs[1].ci, rel=1e-5)


def test_samples_written_out() -> None:
    """Interval, wins and p-value from differences computed one sample at a time, by indices into the sentences."""
    words = texts(25, 4)
    a, b, references = system(words, 5, 0.3), system(words, 6, 0.25), joined(words)
    generator, scorer = np.random.default_rng(9), sacrebleu.BLEU()
    differences = []
    for places in generator.integers(25, size=(120, 25)):
        scores = [
            scorer.corpus_score([lines[i] for i in places], [[references[i] for i in places]]).score for lines in (a, b)
        ]
        differences.append(scores[1] - scores[0])
    found = paired_bootstrap(a, b, references, samples=120, seed=9)
    ordered, mean = sorted(differences), statistics.fmean(differences)
    assert (found["low"], found["high"]) == pytest.approx((ordered[3], ordered[-4]), abs=1e-9)
    assert found["wins"] == {"a": sum(d < 0 for d in differences), "b": sum(d > 0 for d in differences), "ties": 0}
    extreme = sum(abs(d - mean) >= abs(found["difference"]) for d in differences)
    assert found["p_value"] == pytest.approx((1 + extreme) / 121)


def test_a_run_against_itself() -> None:
    words = texts(30, 1)
    lines = system(words, 2, 0.2)
    found = paired_bootstrap(lines, lines, joined(words), samples=100)
    assert (found["difference"], found["low"], found["high"], found["p_value"]) == (0, 0, 0, 1)
    assert found["wins"] == {"a": 0, "b": 0, "ties": 100}


def test_a_clear_difference() -> None:
    words = texts(60, 1)
    found = paired_bootstrap(system(words, 2, 0.6), system(words, 3, 0.1), joined(words), samples=200)
    assert found["low"] > 0
    assert found["p_value"] == 1 / 201
    assert found["wins"]["b"] == 200


def test_p_values_under_the_null_are_level() -> None:
    """Systems of equal quality: a p-value below 10 % is found about one time in ten, and intervals hold 0 as often."""
    words = texts(40, 11)
    references = joined(words)
    p_values, held, theirs = [], 0, []
    for trial in range(240):
        a, b = system(words, 2 * trial + 100, 0.3), system(words, 2 * trial + 101, 0.3)
        found = paired_bootstrap(a, b, references, samples=200, seed=trial)
        p_values.append(found["p_value"])
        theirs.append(found["p_value_sacrebleu"])
        held += found["low"] <= 0 <= found["high"]
    rejected = {level: sum(p <= level for p in p_values) for level in (0.1, 0.5)}
    assert 24 - 3.3 * 4.65 < rejected[0.1] < 24 + 3.3 * 4.65, "binomial(240, 0.1) has a deviation of 4.65"
    assert 120 - 3.3 * 7.75 < rejected[0.5] < 120 + 3.3 * 7.75
    assert held >= 228 - 3.3 * 3.38, "of 240, 95 % are 228 with a deviation of 3.38"
    assert sum(p <= 0.1 for p in theirs) > 1.5 * rejected[0.1], "the other convention is nearer to a one-sided test"


def test_large_test_sets_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = texts(31, 1)
    a, b, references = system(words, 2, 0.3), system(words, 3, 0.2), joined(words)
    whole = paired_bootstrap(a, b, references, samples=101)
    monkeypatch.setattr(bootstrap, "_AT_ONCE", 100)  # three samples at a time
    assert paired_bootstrap(a, b, references, samples=101) == whole


def test_over_seeds() -> None:
    words = texts(50, 1)
    a = [system(words, seed, 0.3) for seed in (2, 3, 4)]
    b = [system(words, seed, 0.25) for seed in (5, 6)]
    references = joined(words)
    found = paired_bootstrap_over_seeds(a, b, references, samples=100, seed=3)
    scorer = sacrebleu.BLEU()
    ours = [[scorer.corpus_score(run, [references]).score for run in arm] for arm in (a, b)]
    assert found["a"] == pytest.approx(statistics.fmean(ours[0]), abs=1e-9)
    assert found["difference"] == pytest.approx(statistics.fmean(ours[1]) - statistics.fmean(ours[0]), abs=1e-9)
    assert found["seeds"]["a"]["scores"] == pytest.approx(ours[0], abs=1e-9)
    assert found["seeds"]["b"]["deviation"] == pytest.approx(statistics.stdev(ours[1]), abs=1e-9)
    samples = np.random.default_rng(3).integers(50, size=(100, 50))
    drawn = sorted(
        statistics.fmean(scorer.corpus_score([run[i] for i in s], [[references[i] for i in s]]).score for run in b)
        - statistics.fmean(scorer.corpus_score([run[i] for i in s], [[references[i] for i in s]]).score for run in a)
        for s in samples
    )
    assert (found["low"], found["high"]) == pytest.approx((drawn[2], drawn[-3]), abs=1e-9)


def test_one_run_an_arm_is_the_paired_bootstrap() -> None:
    words = texts(30, 1)
    a, b, references = system(words, 2, 0.3), system(words, 3, 0.2), joined(words)
    single, arms = (
        paired_bootstrap(a, b, references, samples=80),
        paired_bootstrap_over_seeds([a], [b], references, samples=80),
    )
    seeds = arms.pop("seeds")
    assert arms == single
    assert (seeds["low"], seeds["high"], seeds["a"]["deviation"]) == (None, None, None)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.30265), (3.5, 2.9400886), (10, 2.22814), (1e4, 1.96020)]
)
def test_quantiles_of_student(degrees: float, expected: float) -> None:
    """Published tables; for 3.5 the regularised incomplete beta function, inverted with mpmath."""
    assert student_quantile(degrees) == pytest.approx(expected, rel=2e-5)


def test_welch_by_hand() -> None:
    """Means 11 and 14, variances of the means 2 / 2 and 8 / 2 ... so v = 25 / 17 and the standard error is sqrt(5)."""
    low, high = welch_interval([10, 12], [12, 16])
    reach = student_quantile(25 / 17) * 5**0.5
    assert low is not None
    assert high is not None
    assert (low, high) == (pytest.approx(3 - reach), pytest.approx(3 + reach))
    assert welch_interval([10, 10], [12, 12]) == (2, 2)
    assert welch_interval([10], [12, 13]) == (None, None)


def test_welch_intervals_hold_the_truth() -> None:
    drawn = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        low, high = welch_interval(drawn.normal(0, 1, 3).tolist(), drawn.normal(1, 1, 3).tolist())
        assert low is not None
        assert high is not None
        held += low <= 1 <= high
    assert 366 <= held <= 396, "95 % of 400 is 380 with a deviation of 4.4; Welch is a little wide for samples of three"


def test_a_thousand_samples_of_a_thousand_sentences_are_quick() -> None:
    words = texts(1000, 1)
    references = joined(words)
    a, b = system(words, 2, 0.3), system(words, 3, 0.3)
    measure = bootstrap.metric_named("bleu")
    counts = [measure.statistics(run, references) for run in (a, b)]
    started = time.process_time()
    for times in bootstrap._drawn(1000, 1000, 1):
        measure.score((times @ np.concatenate(counts, axis=1)).reshape(-1, 2, 10))
    assert time.process_time() - started < 1


def test_what_cannot_be_resampled() -> None:
    with pytest.raises(InputError, match="3 hypotheses and 2 references"):
        paired_bootstrap(["a", "b"], ["a", "b", "c"], ["a", "b"])
    with pytest.raises(InputError, match="one sentence"):
        paired_bootstrap(["a"], ["b"], ["a"])
    with pytest.raises(InputError, match="no sentences"):
        bootstrap_interval([], [])
    with pytest.raises(InputError, match="samples: at least 40"):
        bootstrap_interval(["a"], ["a"], samples=10)
    with pytest.raises(InputError, match="0 and 1 runs"):
        paired_bootstrap_over_seeds([], [["a", "b"]], ["a", "b"])
    with pytest.raises(InputError, match="metric: 'ter'"):
        bootstrap_interval(["a", "b"], ["a", "b"], metric="ter")


def test_empty_lines_are_sentences() -> None:
    found = paired_bootstrap(["", "", ""], ["a b c d", "", "e f g h"], ["a b c d", "x y z z", "e f g h"], samples=50)
    assert found["a"] == 0
    assert found["difference"] > 0
    assert found["sentences"] == 3
