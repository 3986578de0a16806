"""How far numbers are apart, and how far rounding may bring them: a check in fp64 first, then in fp32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.calls import CannotRun
from fullrank.checking.report import Finding, judge
from fullrank.checking.subject import Subject

Pair = tuple[str, Tensor, Tensor]  # a description, what was computed, what is expected
DOUBLE_ONLY = "in float64 alone some kernel errs, as attention of torch does with a mask in float32"
_SHOWS = 1e-4  # a leak in fp64 that is larger has to show in fp32, too

# for sums of some hundred terms, in proportion to the largest number compared. What a leak moves is far larger, and what
# rounding moves far smaller.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def tolerance(dtype: torch.dtype) -> float:
    """Largest error that rounding may cause in a number of size 1."""
    return _TOLERANCES[dtype]


def rounding(dtype: torch.dtype) -> str:
    """The reason of `tolerance`."""
    return f"rounding in {str(dtype).removeprefix('torch.')}, in proportion to the largest figure"


def divide_by_size(logits: Tensor) -> Callable[[Tensor], Tensor]:
    """Function that divides logits such as these (R, .., V) by their size, so that differences are shares of it.

    The size is the largest figure, without those a thousand times as large as what moves between rows: -inf, -1e9 or the least
    number, the logits of words that are never given. Of such figures differences in proportion to themselves count.
    """
    sizes = logits[logits.isfinite()].abs().float()
    moved = (logits - logits.roll(1, 0 if len(logits) > 1 else 1)).abs().float()
    moved = moved[moved.isfinite() & (moved > 0)]
    far = 1000 * float(moved[:: 1 + len(moved) // 100_000].median()) if len(moved) else math.inf
    near = sizes[sizes <= far]
    size = (float(near.max()) if len(near) else min(far, 1.0)) or 1.0
    is_plain = len(near) == logits.numel()

    def divide(values: Tensor) -> Tensor:
        values = (values.float() if values.dtype.itemsize == 2 else values) / size
        return values if is_plain else values.nan_to_num(math.nan).asinh()

    return divide


def largest(values: Tensor, expected: Tensor) -> float:
    """max |values - expected|; NaN if one of them is not finite where the other is."""
    if values.numel() == 0:
        return 0.0
    off = (values - expected).abs()
    worst = float(off.max())
    if math.isnan(worst):
        both = (values == expected) | (values.isnan() & expected.isnan())  # infinities that agree, too
        worst = float(off.masked_fill(both, 0.0).max())
    return worst


def is_same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def compare_pairs(subject: Subject, looked_at: str, pairs: list[Pair], remark: str = "") -> Finding:
    """Passes where every tensor equals the expected one, up to rounding; the worst is named."""
    worst, name = 0.0, ""
    for description, values, expected in pairs:
        if values.shape != expected.shape:
            shapes = f"{tuple(values.shape)} instead of {tuple(expected.shape)}"
            return judge(looked_at, math.nan, 0.0, "", remark=f"{description}: {shapes}")
        divide = divide_by_size(expected)
        share = largest(divide(values), divide(expected))
        if not share <= worst:
            worst, name = share, description
        if math.isnan(worst):
            break
    limit, reason = tolerance(subject.rounds), rounding(subject.rounds)
    if subject.rounds != subject.dtype:
        reason += "; a model that is not ours may compute parts so in float64, too"
    return judge(looked_at, worst, limit, reason, remark=remark if worst <= limit else f"worst: {name}")


def compare_in_both_precisions(check: Callable[..., Finding]) -> Callable[..., Finding]:
    """The check in fp64, and in fp32 what cannot be computed in fp64 or shows a leak there, which has to show twice."""

    @functools.wraps(check)
    def run(subject: Subject, **options: Any) -> Finding:
        try:
            finding = check(subject, **options)
        except CannotRun:
            raise
        except Exception as error:
            if subject.single is None:
                raise
            try:
                return check(subject.single, **options)
            except Exception:
                raise error from None
        difference = 0.0 if finding.difference is None else finding.difference
        if (math.isfinite(difference) and difference <= _SHOWS) or subject.single is None:
            return finding
        try:
            other = check(subject.single, **options)
        except Exception:
            return finding
        if math.isfinite(difference):
            return replace(other, remark=DOUBLE_ONLY) if other.verdict == "passes" else finding
        return other

    return run
