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
    draw_curves,
    log_ticks,
    merged,
    second_half,
    spectrum,
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


def test_speeds_are_placed_by_training_tokens() -> None:
    train = [{"split": "train", "step": step, "nll": 5.0, "tokens": 100 * step} for step in (10, 20)]
    timing = [{"step": step, "seconds": 1.0, "tokens_per_second": 7.0 + step} for step in (10, 15, 20)]
    found = training(record(train, timing), "tokens_per_second")
    assert found is not None
    assert (found.x.tolist(), found.y.tolist()) == ([1000, 1500, 2000], [17, 22, 27])


def test_the_mean_of_seeds_uses_the_points_they_share() -> None:
    first = Curve(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0]))
    second = Curve(np.array([2.0, 3.0, 4.0]), np.array([40.0, 50.0, 60.0]))
    series = Series("row", 0, (first, second))
    assert series.mean is not None
    assert (series.mean.x.tolist(), series.mean.y.tolist()) == ([2, 3], [30, 40])
    assert series.band is not None
    low, high = series.band
    assert low.y == pytest.approx([30 - 200**0.5, 40 - 200**0.5])
    assert high.y == pytest.approx([30 + 200**0.5, 40 + 200**0.5])


def test_seeds_are_one_line_in_a_band_and_single_lines_where_they_share_no_points() -> None:
    first = Curve(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    same, other = Curve(first.x, first.y + 9), Curve(first.x + 9, first.y)
    for log in (False, True):  # the band reaches below zero, which has no place on a logarithmic axis
        (drawn,) = draw_curves("x", "", [Series("row", 0, (first, same))], "y", "x", log=log)
        assert len(drawn.bands) == 1
        assert len([stroke for stroke in drawn.strokes if stroke.width > 2]) == 1
        assert max(y for _, y in drawn.bands[0].points) <= drawn.bottom
    (drawn,) = draw_curves("x", "", [Series("row", 0, (first, other))], "y", "x")
    assert not drawn.bands
    assert len([stroke for stroke in drawn.strokes if stroke.width > 1]) == 2


def test_a_second_half_that_is_everything_is_not_drawn_again() -> None:
    late, early = Curve(np.array([6.0, 8.0, 10.0]), np.zeros(3)), Curve(np.array([1.0, 8.0, 10.0]), np.zeros(3))
    assert second_half([Series("late", 0, (late,))]) == []
    assert [one.curves[0].x.tolist() for one in second_half([Series("early", 0, (early,))])] == [[8, 10]]


def test_a_spectrum_is_read_as_it_was_measured(tmp_path: Path) -> None:
    layers = [{"after": {"curves": [[0.5, 1.0], [0.7, 1.0]]}}, {"after": {"curves": [[0.8, 1.0], [1.0, 1.0]]}}]
    found = spectrum(RunRecord(tmp_path, "x", spectrum={"layers": layers}))
    assert found is not None
    assert (found.x.tolist(), found.y.tolist()) == ([0.5, 1], [0.75, 1])
    assert spectrum(RunRecord(tmp_path, "x", spectrum={"layers": [{"after": {}}]})) is None
    assert spectrum(RunRecord(tmp_path, "x")) is None


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
