"""Interleaved timing: ratios, not seconds; and the growth of a cost with length.

All candidates run once a round, in one process, in an order that rotates. A ratio is the median over rounds of the ratio of
two times of the same round. On a CPU with one thread the clock is CPU time, which a busy machine disturbs little.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fullrank.kernels.vocabulary import multiply

Run = Callable[[], Any]
Clock = Callable[[Run], float]  # seconds of a run

_PEAK_SIZE = 1024  # rows and columns of square matrices; the speed of their product is called the machine's peak
PEAK_GFLOP = 4 * 2 * _PEAK_SIZE**3 / 1e9  # of a run
_MAX_REPEATS = 1000
MIN_LENGTHS = 3  # fewer lengths say nothing about growth

PROTOCOL = (
    "all candidates once a round in one process, in rotating order; CPU time with one thread, wall-clock time with more; "
    "ratio = median over rounds of the ratio of two times of the same round, low and high its quartiles; "
    f"peak = products of {_PEAK_SIZE} x {_PEAK_SIZE} matrices, timed in the same rounds"
)


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of the ratio of two times of the same round, and its quartiles."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], other: Sequence[float]) -> Ratio:
        """Divide own times by those of another, round by round; at least two rounds."""
        ratios = [seconds / others for seconds, others in zip(own, other, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(middle, low, high)


def measure_time(clock: Callable[[], float], run: Run) -> float:
    """Measure the seconds of a run by a clock of the processor or of the wall."""
    begin = clock()
    run()
    return clock() - begin


def measure_cuda_time(run: Run) -> float:
    """Measure the seconds of a run between two events on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def choose_clock(device: torch.device) -> Clock:
    """Choose CUDA events on a GPU; on a CPU, CPU time with one thread and wall-clock time with more."""
    if device.type == "cuda":
        return measure_cuda_time
    return partial(measure_time, time.process_time if torch.get_num_threads() == 1 else time.perf_counter)


def measure_times(
    candidates: Mapping[str, Run], *, rounds: int, clock: Clock, warm_up: int = 2, at_least: float = 0.0
) -> dict[str, list[float]]:
    """Measure the seconds of every candidate in every round.

    Args:
        candidates: calls by name.
        rounds: how often each is timed.
        clock: measures the seconds of a call.
        warm_up: calls of each before the first round.
        at_least: seconds; a shorter candidate runs several times in a row, and the mean counts.

    Returns:
        Seconds of a call by name, one for each round.
    """
    names = list(candidates)
    repeats = dict.fromkeys(names, 1)
    for name, run in candidates.items():
        for _ in range(warm_up):
            run()
        if at_least > 0:
            needed = math.ceil(at_least / max(clock(run), 1e-9))
            repeats[name] = min(_MAX_REPEATS, max(1, needed))
    times = {name: [] for name in names}
    for round_ in range(rounds):
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = clock(_repeat(candidates[name], repeats[name]))
            times[name].append(seconds / repeats[name])
    return times


def _repeat(run: Run, count: int) -> Run:
    def run_often() -> None:
        for _ in range(count):
            run()

    return run_often


def make_product(dtype: torch.dtype) -> Run:
    """Make a run of products of large square matrices, by the faster library: an upper bound of everything built on them."""
    a, b = torch.randn(2, _PEAK_SIZE, _PEAK_SIZE).to(dtype)
    return _repeat(lambda: multiply(a, b), 4)


def exponent(lengths: Sequence[int], costs: Sequence[float | None]) -> float | None:
    """Fit the exponent p of cost = c n^p over the upper half of the lengths.

    It is the least-squares slope of log cost over log length. Overheads are small in the upper half. The middle one of an odd
    number of lengths counts among it.
    None where a cost of the upper half is missing or not positive.
    """
    points = sorted(zip(lengths, costs, strict=True), key=lambda point: point[0])[len(lengths) // 2 :]
    logarithms = [(math.log(length), math.log(cost)) for length, cost in points if cost is not None and cost > 0]
    if len(logarithms) < len(points):
        return None
    return statistics.linear_regression(*zip(*logarithms, strict=True)).slope
