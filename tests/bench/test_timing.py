"""Interleaved timing under a clock that the test winds: order, rounds, repeats, medians and quartiles of ratios."""

import pytest

from timing import Ratio, exponent, measure_times


class Clock:
    """Time that passes only while a candidate runs, and the names of the calls in order."""

    def __init__(self):
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self, run):
        before = self.now
        run()
        return self.now - before

    def candidate(self, name, seconds):
        """Takes these seconds, one call after the other, and from the last on always those."""
        left = list(seconds)

        def run():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_every_candidate_runs_once_a_round_and_another_begins_each_time():
    clock = Clock()
    candidates = {name: clock.candidate(name, [1.0]) for name in "abc"}
    measure_times(candidates, rounds=4, clock=clock, warm_up=1)
    assert "".join(clock.calls) == "abc" + "abc" + "bca" + "cab" + "abc"  # the first three are the warm-up


def test_times_are_those_of_the_rounds_and_not_of_the_warm_up():
    clock = Clock()
    candidates = {"a": clock.candidate("a", [100, 50, 1, 2, 3]), "b": clock.candidate("b", [70, 60, 4, 5, 6])}
    assert measure_times(candidates, rounds=3, clock=clock, warm_up=2) == {"a": [1, 2, 3], "b": [4, 5, 6]}


def test_short_candidates_run_several_times_and_their_time_is_that_of_one():
    clock = Clock()
    candidates = {"short": clock.candidate("short", [0.25]), "long": clock.candidate("long", [2.0])}
    times = measure_times(candidates, rounds=2, clock=clock, warm_up=1, at_least=1.0)
    assert times == {"short": [0.25, 0.25], "long": [2.0, 2.0]}
    # warm-up, one run to see how long it takes, and four times in each of two rounds
    assert (clock.calls.count("short"), clock.calls.count("long")) == (1 + 1 + 4 * 2, 1 + 1 + 2)


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians():
    times, peer_times = [1.0, 8.0, 3.0, 40.0, 5.0], [2.0, 2.0, 3.0, 8.0, 5.0]
    # by hand: 0.5, 4, 1, 5, 1; sorted 0.5, 1, 1, 4, 5, whose quartiles are its second, third and fourth
    assert Ratio.of(times, peer_times) == Ratio(middle=1.0, low=1.0, high=4.0)
    # between two values, a quarter of the way
    assert Ratio.of([1.0, 3.0], [1.0, 1.0]) == Ratio(middle=2.0, low=1.5, high=2.5)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 2.7])
def test_the_exponent_of_a_power_law_is_its_power(power):
    lengths = [256, 512, 1024, 2048, 4096]
    assert exponent(lengths, [3e-9 * n**power for n in lengths]) == pytest.approx(power)
