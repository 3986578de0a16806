"""Quantiles of Student's t and of F, to about twelve digits, without scipy."""

from __future__ import annotations

import math
from collections.abc import Callable

_TINY = 1e-300
_TERMS = 100_000


def beta_share(a: float, b: float, x: float, rest: float | None = None) -> float:
    """The regularised incomplete beta function: the share of Beta(a, b) below x.

        I_x(a, b) = x^a (1 - x)^b / (a B(a, b)) * 1 / (1 + d_1 / (1 + d_2 / (1 + ...)))

    d_2m = m (b - m) x / ((a + 2m - 1) (a + 2m)),  d_2m+1 = -(a + m) (a + b + m) x / ((a + 2m) (a + 2m + 1)).
    `rest` is 1 - x where that is known to more digits. ValueError unless a and b are positive and x is from 0 to 1.
    """
    y = 1 - x if rest is None else rest
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"a and b are positive and x is from 0 to 1, given {a}, {b} and {x}")
    if x == 0 or y == 0:
        return float(y == 0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - beta_share(b, a, y, x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    return math.exp(logarithm) / (a * _fraction(a, b, x))


def _fraction(a: float, b: float, x: float) -> float:
    """1 + d_1 / (1 + d_2 / (1 + ...)), from the front (Lentz): products of ratios of neighbouring convergents."""
    value, above, below = 1.0, 1.0, 0.0
    for term in range(1, _TERMS):
        m = term // 2
        if term % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        below = 1 / (1 + d * below or _TINY)
        above = 1 + d / above or _TINY
        value *= above * below
        if abs(above * below - 1) < 1e-15:
            return value
    raise ValueError(f"I_x(a, b) does not converge at a = {a}, b = {b}, x = {x}")


def f_share(value: float, above: float, below: float) -> float:
    """P(F <= value) of the ratio of two mean squares with `above` and `below` degrees of freedom."""
    if value <= 0:
        return 0.0
    scaled = above * value
    return beta_share(above / 2, below / 2, scaled / (scaled + below), below / (scaled + below))


def f_quantile(share: float, above: float, below: float) -> float:
    """The value with P(F <= value) = share, by bisection. ValueError unless share is between 0 and 1."""
    if not 0 < share < 1:
        raise ValueError(f"a share between 0 and 1, given {share}")
    return math.exp(_root(lambda logarithm: f_share(math.exp(logarithm), above, below) - share))


def student_quantile(degrees: float, share: float = 0.975) -> float:
    """The quantile of Student's t. Its square is F with 1 and `degrees` degrees of freedom."""
    if share == 0.5:
        return 0.0
    reach = math.sqrt(f_quantile(abs(2 * share - 1), 1, degrees))
    return reach if share > 0.5 else -reach


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function is 0: steps that double until it is enclosed, then halves."""
    low, high = -1.0, 1.0
    while rising(low) > 0:
        low *= 2
    while rising(high) < 0:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
