"""How a cost grows with length: the exponent p of cost = c n^p, where it has settled."""

from __future__ import annotations

import math
from collections.abc import Sequence

FEWEST = 3  # lengths that say something about growth


def exponent(lengths: Sequence[int], costs: Sequence[float | None]) -> float | None:
    """Slope of log cost over log length, by least squares, over the upper half of the lengths: there overheads are small.

    Of an odd number of lengths the middle one counts among the upper half. None for fewer than three lengths, and where a
    cost of the upper half is missing or not positive.
    """
    if len(lengths) < FEWEST:
        return None
    points = sorted(zip(lengths, costs, strict=True), key=lambda point: point[0])[len(lengths) // 2 :]
    logs = [(math.log(length), math.log(cost)) for length, cost in points if cost is not None and cost > 0]
    if len(logs) < len(points) or len(logs) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
