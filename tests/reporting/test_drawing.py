"""Figures: curves with the right x and light smoothing; positions of dots, names and ticks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullrank.reporting.drawing import (
    POINTS,
    Curve,
    Series,
    log_ticks,
    merged,
    speed,
    spread_apart,
    swarm,
    ticks,
    training,
    validation,
    window,
)
from fullrank.reporting.figures import PERPLEXITY
from fullrank.reporting.runs import RunRecord


def record(metrics: list[dict[str, Any]] | None = None, timing: list[dict[str, Any]] | None = None) -> RunRecord:
    return RunRecord(Path("x"), "x", metrics=metrics or [], timing=timing or [])


def test_validation_lines_are_placed_by_training_tokens() -> None:
    train = [{"split": "train", "step": step, "nll": 5.0, "tokens": 100 * step} for step in (10, 20)]
    valid = [{"split": "valid", "step": step, "ppl": float(step), "tokens": 7777} for step in (5, 20, 30)]
    found = validation(record(train + valid), PERPLEXITY.logged_figure)
    assert found is not None
    assert found.x.tolist() == [500, 2000, 3000]
    assert found.y.tolist() == [5, 20, 30]


def test_smoothing_keeps_a_straight_line_and_thinning_its_ends() -> None:
    lines = [{"split": "train", "step": step, "nll": 10 - step / 1000, "tokens": step} for step in range(1, 5001)]
    found = training(record(lines), "nll", smooth=True)
    assert found is not None
    assert len(found.x) == POINTS
    assert (found.x[0], found.x[-1]) == (1, 5000)
    inside = slice(0, -5)  # the window is one-sided only at the end
    assert found.y[inside] == pytest.approx(10 - found.x[inside] / 1000)


def test_smoothing_takes_noise_away() -> None:
    noise = np.random.default_rng(0).normal(size=2000)
    lines = [
        {"split": "train", "step": step, "nll": float(value), "tokens": step}
        for step, value in enumerate(noise, start=1)
    ]
    found = training(record(lines), "nll", smooth=True)
    assert found is not None
    assert np.std(found.y) < 0.4
    assert window(99) == 1
    assert window(5000) == 51


def test_a_clock_that_starts_anew_after_a_resume_is_carried_on() -> None:
    timing = [{"step": n, "seconds": s, "tokens_per_second": 1.0} for n, s in enumerate((60, 120, 60, 180))]
    found = speed(record(timing=timing))
    assert found is not None
    assert found.x.tolist() == [1, 2, 3, 5]


def test_the_mean_of_seeds_uses_the_points_they_share() -> None:
    first = Curve(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0]))
    second = Curve(np.array([2.0, 3.0, 4.0]), np.array([40.0, 50.0, 60.0]))
    mean = Series("row", 0, (first, second)).mean
    assert mean is not None
    assert (mean.x.tolist(), mean.y.tolist()) == ([2, 3], [30, 40])


def test_equal_curves_are_drawn_once() -> None:
    curve, other = Curve(np.array([1.0, 2.0]), np.array([1.0, 2.0])), Curve(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    assert [one.name for one in merged([Series("a", 0, (curve,)), Series("b", 1, (curve,))])] == ["all rows"]
    assert [one.name for one in merged([Series("a", 0, (curve,)), Series("b", 1, (other,))])] == ["a", "b"]


def test_labels_are_pushed_apart_and_keep_their_order() -> None:
    placed = spread_apart([0.5, 0.52, 0.1, 0.5], 0.1, 1.0)
    assert placed[2] == pytest.approx(0.1)
    assert sorted(range(4), key=lambda i: placed[i]) == [2, 0, 3, 1]
    gaps = np.diff(sorted(placed))
    assert min(gaps) > 0.1 - 1e-9


def test_dots_of_a_lane_do_not_meet() -> None:
    places = [float(x) for x in (0, 1, 2, 3, 30, 31, 100, 0, 0, 50)]
    lanes = swarm(places, 8)
    assert lanes[6] == lanes[9] == 0  # alone: in the middle
    for i in range(len(places)):
        for j in range(i):
            assert lanes[i] != lanes[j] or abs(places[i] - places[j]) >= 8
    assert set(lanes) == {0, 1, -1, 2, -2, 3}  # six dots between 0 and 3


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (97.3, 103.1, [98.0, 99.0, 100.0, 101.0, 102.0, 103.0]),
        (-0.004, 0.013, [-0.0025 * 1, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.0125]),
        (5.0, 5.0, [5.0]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 7) == pytest.approx(expected)


def test_ticks_of_a_logarithmic_axis() -> None:
    assert log_ticks(80, 2300) == [100, 200, 500, 1000, 2000]
    assert log_ticks(0.5, 2e4) == [1, 10, 100, 1000, 10000]
