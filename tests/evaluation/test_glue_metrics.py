"""The metrics of GLUE against scikit-learn and scipy, on random data with ties, constants and absent classes."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.config.glue import GLUE
from fullrank.core.errors import InputError
from fullrank.evaluation.glue import (
    METRICS,
    accuracy,
    f1,
    glue_scores,
    matthews_correlation,
    pearson,
    spearman,
)

sklearn_metrics = pytest.importorskip("sklearn.metrics")
scipy_stats = pytest.importorskip("scipy.stats")


@st.composite
def classes(draw, most=4):
    """Predictions and labels of up to `most` classes; often one class is absent, or one side is constant."""
    count, kinds = draw(st.integers(1, 40)), draw(st.integers(1, most))
    one = st.integers(0, kinds - 1)
    sides = [draw(st.lists(one, min_size=count, max_size=count)) for _ in range(2)]
    if draw(st.booleans()):
        sides[draw(st.integers(0, 1))] = [draw(one)] * count
    return np.array(sides[0]), np.array(sides[1])


@given(classes(most=2), st.integers(0, 1))
def test_f1_is_that_of_scikit_learn(sides, positive):
    guessed, labels = sides
    expected = sklearn_metrics.f1_score(labels, guessed, labels=[positive], average="macro",
                                        zero_division=0)  # fmt: skip
    assert f1(guessed, labels, positive) == pytest.approx(expected, abs=1e-15)


@given(classes())
def test_accuracy_and_matthews_are_those_of_scikit_learn(sides):
    guessed, labels = sides
    assert accuracy(guessed, labels) == pytest.approx(sklearn_metrics.accuracy_score(labels, guessed), abs=1e-15)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of a single label
        expected = sklearn_metrics.matthews_corrcoef(labels, guessed)
    assert matthews_correlation(guessed, labels) == pytest.approx(expected, abs=1e-12)


def test_matthews_by_its_equation():
    true_positive, true_negative, false_positive, false_negative = 7, 5, 2, 3
    guessed = [1] * 7 + [0] * 5 + [1] * 2 + [0] * 3
    labels = [1] * 7 + [0] * 5 + [0] * 2 + [1] * 3
    expected = (true_positive * true_negative - false_positive * false_negative) / math.sqrt(9 * 10 * 7 * 8)
    assert matthews_correlation(guessed, labels) == pytest.approx(expected, rel=1e-15)
    assert f1(guessed, labels) == 14 / (14 + 2 + 3)
    assert accuracy(guessed, labels) == 12 / 17


@pytest.mark.parametrize("guess", [0, 1])
def test_a_constant_prediction_has_no_matthews_correlation(guess):
    labels = [0, 1, 1, 0, 1]
    assert matthews_correlation([guess] * 5, labels) == 0.0
    assert matthews_correlation(labels, [guess] * 5) == 0.0
    assert f1([0] * 5, [0] * 5) == 0.0


@st.composite
def numbers(draw):
    """Two series that are not constant, with ties."""
    count = draw(st.integers(2, 40))
    few = st.sampled_from([0.0, 0.25, 1.0, 2.5, 3.8, 5.0, -1.5])
    one = st.one_of(few, st.floats(-10, 10).map(lambda x: round(x, 3)))
    series = st.lists(one, min_size=count, max_size=count).filter(lambda x: len(set(x)) > 1)
    return np.array(draw(series)), np.array(draw(series))


def exact_pearson(x, y) -> float:
    """r with the sums in fractions, rounded once."""
    x, y = [Fraction(float(a)) for a in x], [Fraction(float(a)) for a in y]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    both = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    square = sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y)
    return math.copysign(math.sqrt(both**2 / square), both)


@given(numbers())
@settings(deadline=None)
def test_correlations_are_those_of_scipy_and_of_exact_arithmetic(sides):
    guessed, labels = sides
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nearly constant input
        expected = scipy_stats.pearsonr(guessed, labels).statistic
    assert pearson(guessed, labels) == pytest.approx(expected, abs=1e-12)
    assert pearson(guessed, labels) == pytest.approx(exact_pearson(guessed, labels), abs=1e-14)
    assert spearman(guessed, labels) == pytest.approx(scipy_stats.spearmanr(guessed, labels).statistic, abs=1e-12)
    ranks = [scipy_stats.rankdata(side) for side in sides]
    assert spearman(guessed, labels) == pytest.approx(exact_pearson(*ranks), abs=1e-14)


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-12, 1.0, 1e12, 1e200, 3e307], ids=lambda scale: f"{scale:g}")
def test_correlations_do_not_depend_on_scale(scale):
    x, y = np.array([1.0, 2.0, 4.0, 5.0]), np.array([2.0, 1.0, 5.0, 3.0])
    exact = 6 / math.sqrt(10 * 8.75)
    assert pearson(x * scale, y) == pytest.approx(exact, rel=1e-3 if scale == 1e-320 else 1e-14)
    assert pearson(-x * scale, y * scale) == pytest.approx(-exact, rel=1e-3 if scale == 1e-320 else 1e-14)
    assert spearman(x * scale, y) == pytest.approx(0.6, rel=1e-15)


def test_a_great_offset_costs_no_precision():
    """The mean of these is not representable so far from 0: a plain difference from it is off by 0.075."""
    x, y = 1e15 + np.array([1.0, 2.0, 4.0, 6.0, 8.0]), np.array([2.0, 1.0, 5.0, 3.0, 4.0])
    assert pearson(x, y) == pytest.approx(exact_pearson(x, y), rel=1e-14)


def test_tied_ranks_by_hand():
    assert spearman([1.0, 5.0, 5.0, 9.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.5 / math.sqrt(4.5 * 5), rel=1e-15)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e300, -7.3])
def test_a_constant_series_has_no_correlation(value):
    y = np.linspace(0, 5, 7)
    for metric in (pearson, spearman):
        assert metric([value] * 7, y) == 0.0
        assert metric(y, [value] * 7) == 0.0


def test_single_precision_predictions_are_judged_in_double():
    rng = np.random.default_rng(0)
    guessed, labels = rng.normal(size=999).astype(np.float32), rng.normal(size=999).astype(np.float32)
    assert pearson(guessed, labels) == pytest.approx(exact_pearson(guessed, labels), abs=1e-14)


def test_scores_of_a_task_and_of_named_metrics():
    assert {name: task.metrics for name, task in GLUE.items()} == {
        "cola": ("matthews_correlation",), "sst2": ("accuracy",), "mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1"),
        "stsb": ("pearson", "spearman"), "mnli": ("accuracy",), "qnli": ("accuracy",), "rte": ("accuracy",),
        "wnli": ("accuracy",),
    }  # fmt: skip
    guessed, labels = [1, 0, 1, 1], [1, 1, 0, 1]
    assert glue_scores("mrpc", guessed, labels) == {"accuracy": 0.5, "f1": 4 / 6}
    assert list(glue_scores(GLUE["stsb"], [1.0, 2.0], [1.0, 3.0])) == ["pearson", "spearman"]
    assert glue_scores("CoLA", guessed, labels) == {"matthews_correlation": pytest.approx(-1 / 3)}
    assert list(glue_scores(tuple(METRICS), guessed, labels)) == list(METRICS)


FAULTS = {
    "unknown task": (("colla", [1], [1]), "unknown GLUE task 'colla'; did you mean 'cola'"),
    "unknown metric": ((("acuracy",), [1], [1]), "unknown metric 'acuracy' of GLUE; did you mean 'accuracy'"),
    "logits": (("cola", [[0.1, 0.9]], [1]), r"shape \(1, 2\): one number an example .*argmax"),
    "lengths": (("cola", [1, 0], [1]), r"predictions \(2,\) and labels \(1,\)"),
    "nothing": (("cola", np.array([], int), np.array([], int)), "at least one example"),
    "real classes": (("cola", [0.5, 1.0], [1, 0]), "predictions of type float64: class ids are integers"),
    "nan": (("stsb", [0.5, float("nan")], [1.0, 0.0]), "predictions: number 1 is nan"),
    "infinite label": (("stsb", [0.5, 1.0], [1.0, float("inf")]), "labels: number 1 is inf"),
    "words": (("stsb", ["a", "b"], [1.0, 0.0]), "numbers are wanted"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults(case):
    given_, message = FAULTS[case]
    with pytest.raises(InputError, match=message):
        glue_scores(*given_)
