"""Curves: the right x, light smoothing that keeps straight lines, thinning that keeps the ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullrank.reporting import curves
from fullrank.reporting.curves import Curve, Series
from fullrank.reporting.measure import PERPLEXITY
from fullrank.reporting.runs import RunRecord


def record(metrics: list[dict[str, Any]] | None = None, timing: list[dict[str, Any]] | None = None) -> RunRecord:
    return RunRecord(Path("x"), "x", metrics=metrics or [], timing=timing or [])


def test_validation_lines_are_placed_by_training_tokens() -> None:
    train = [{"split": "train", "step": step, "nll": 5.0, "tokens": 100 * step} for step in (10, 20)]
    valid = [{"split": "valid", "step": step, "ppl": float(step), "tokens": 7777} for step in (5, 20, 30)]
    found = curves.validation(record(train + valid), PERPLEXITY.of_line)
    assert found is not None
    assert found.x.tolist() == [500, 2000, 3000]
    assert found.y.tolist() == [5, 20, 30]


def test_smoothing_keeps_a_straight_line_and_thinning_its_ends() -> None:
    lines = [{"split": "train", "step": step, "nll": 10 - step / 1000, "tokens": step} for step in range(1, 5001)]
    found = curves.training_loss(record(lines))
    assert found is not None
    assert len(found.x) == curves.POINTS
    assert (found.x[0], found.x[-1]) == (1, 5000)
    inside = slice(0, -5)  # the window is one-sided only at the end
    assert found.y[inside] == pytest.approx(10 - found.x[inside] / 1000)


def test_smoothing_takes_noise_away() -> None:
    noise = np.random.default_rng(0).normal(size=2000)
    lines = [
        {"split": "train", "step": step, "nll": float(value), "tokens": step}
        for step, value in enumerate(noise, start=1)
    ]
    found = curves.training_loss(record(lines))
    assert found is not None
    assert np.std(found.y) < 0.4
    assert curves.window(99) == 1
    assert curves.window(5000) == 51


def test_a_clock_that_starts_anew_after_a_resume_is_carried_on() -> None:
    timing = [{"step": n, "seconds": s, "tokens_per_second": 1.0} for n, s in enumerate((60, 120, 60, 180))]
    found = curves.speed(record(timing=timing))
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
    assert [one.name for one in curves.merged([Series("a", 0, (curve,)), Series("b", 1, (curve,))])] == ["all rows"]
    assert [one.name for one in curves.merged([Series("a", 0, (curve,)), Series("b", 1, (other,))])] == ["a", "b"]
