"""Places of dots, names and ticks in figures."""

from __future__ import annotations

import numpy as np
import pytest

from fullrank.reporting.drawing import _spread_apart, log_ticks, swarm, ticks


def test_labels_are_pushed_apart_and_keep_their_order() -> None:
    placed = _spread_apart([0.5, 0.52, 0.1, 0.5], 0.1, 1.0)
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
