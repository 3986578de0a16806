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
from typing import Any

import torch

Run = Callable[[], Any]
Clock = Callable[[Run], float]  # seconds of a run

_PEAK_SIZE = 1024  # rows and columns of square matrices; the speed of their product is called the machine's peak
_PEAK_FLOPS = 2 * _PEAK_SIZE**3
_MAX_REPEATS = 1000
MIN_LENGTHS = 3  # fewer lengths say nothing about growth

INTERLEAVED = (
    "all candidates once a round in one process, in rotating order; CPU time with one thread, wall-clock time with more; "
    "ratio = median over rounds of the ratio of two times of the same round, low and high its quartiles"
)
PROTOCOL = f"{INTERLEAVED}; peak = products of {_PEAK_SIZE} x {_PEAK_SIZE} matrices, timed in the same rounds"


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of the ratio of two times of the same round, and its quartiles."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], other: Sequence[float]) -> Ratio:
        """own / other, round by round; at least two rounds."""
        ratios = [one / two for one, two in zip(own, other, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(frozen=True)
class Timing:
    """Median seconds of a candidate, its median ratio to the reference, and the ratio's quartiles."""

    name: str
    seconds: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Peak:
    """Speed of large matrix products in GFLOP/s, measured in the same rounds: an upper bound for everything built on them."""

    fp32: float
    bf16: float


def cpu_seconds(run: Run) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def wall_seconds(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def cuda_seconds(run: Run) -> float:
    """Between two events on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def clock_for(device: torch.device) -> Clock:
    """CUDA events on a GPU; on a CPU, CPU time with one thread and wall-clock time with more."""
    if device.type == "cuda":
        return cuda_seconds
    return cpu_seconds if torch.get_num_threads() == 1 else wall_seconds


def times_of(
    candidates: Mapping[str, Run], *, rounds: int, clock: Clock, warm_up: int = 2, at_least: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of every candidate in every round. A candidate shorter than `at_least` seconds runs several times in a row."""
    names = list(candidates)
    repeats = dict.fromkeys(names, 1)
    for name, run in candidates.items():
        for _ in range(warm_up):
            run()
        if at_least > 0:
            repeats[name] = min(_MAX_REPEATS, max(1, math.ceil(at_least / max(clock(run), 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(clock(_several(candidates[name], repeats[name])) / repeats[name])
    return times


def _several(run: Run, count: int) -> Run:
    if count == 1:
        return run

    def repeated() -> None:
        for _ in range(count):
            run()

    return repeated


def interleave(
    candidates: Mapping[str, Run], reference: str, *, rounds: int, warm_up: int = 2
) -> tuple[list[Timing], Peak]:
    """Time every candidate `rounds` (at least 2) times, interleaved; ratios are candidate / reference.

    Square matrices are multiplied in the same rounds.
    """
    runs = {**candidates, "peak fp32": _product(torch.float32), "peak bf16": _product(torch.bfloat16)}
    times = times_of(runs, rounds=rounds, clock=clock_for(torch.device("cpu")), warm_up=warm_up)
    timings = []
    for name in candidates:
        ratio = Ratio.of(times[name], times[reference])
        timings.append(Timing(name, statistics.median(times[name]), ratio.middle, ratio.low, ratio.high))
    fp32, bf16 = (4 * _PEAK_FLOPS / statistics.median(times[name]) / 1e9 for name in ("peak fp32", "peak bf16"))
    return timings, Peak(fp32, bf16)


def _product(dtype: torch.dtype) -> Run:
    a, b = torch.randn(2, _PEAK_SIZE, _PEAK_SIZE).to(dtype)

    def run() -> None:
        for _ in range(4):
            torch.mm(a, b)

    return run


def rounded(value: Any) -> Any:
    """Nested JSON with floats of four figures: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def exponent(lengths: Sequence[int], costs: Sequence[float | None]) -> float | None:
    """Exponent p of cost = c n^p: the least-squares slope of log cost over log length, over the upper half of the lengths.

    Overheads are small there. The middle one of an odd number of lengths counts among the upper half.
    None for fewer than three lengths, and where a cost of the upper half is missing or not positive.
    """
    if len(lengths) < MIN_LENGTHS:
        return None
    points = sorted(zip(lengths, costs, strict=True), key=lambda point: point[0])[len(lengths) // 2 :]
    logs = [(math.log(length), math.log(cost)) for length, cost in points if cost is not None and cost > 0]
    if len(logs) < len(points) or len(logs) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
