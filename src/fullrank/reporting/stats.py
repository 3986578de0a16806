"""Figures over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stat:
    """Mean over `count` runs and the sample standard deviation (n - 1); one run has no deviation.

    Of perplexities it is the mean of the runs' perplexities, not the exponential of a mean loss; of bits it is theirs.
    """

    mean: float
    deviation: float | None
    count: int


def over_runs(values: Iterable[float | None]) -> Stat | None:
    """The statistic of the values that exist; None if there is none."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Stat(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def apart(first: Stat, second: Stat) -> bool | None:
    """Whether the intervals mean ± standard deviation do not meet; None if a single seed leaves the spread unknown."""
    if first.deviation is None or second.deviation is None:
        return None
    return abs(first.mean - second.mean) > first.deviation + second.deviation
