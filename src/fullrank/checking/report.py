"""Result of a check: its verdict, the figure it rests on, and the tolerance with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """looked_at: what was compared. difference: the largest one; the check passes up to `tolerance`. check: its name.

    reason: why this tolerance, or why the check does not apply. remark: other observations. layers: where a leak enters,
    names as in `named_modules`, in the order in which they run.
    """

    verdict: Literal["passes", "fails", "not applicable"]
    looked_at: str = ""
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""
    remark: str = ""
    layers: tuple[str, ...] = ()
    check: str = ""


@dataclass(frozen=True)
class Report:
    """All findings of one model. description: what the model is; shrunk: what was made smaller for the check."""

    findings: tuple[Finding, ...]
    description: Mapping[str, Any]
    shrunk: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """No check fails."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "fails")

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers that leak."""
        return tuple(dict.fromkeys(layer for finding in self.findings for layer in finding.layers))

    def of(self, check: str) -> Finding:
        """The finding of that name; KeyError if there is none."""
        return {finding.check: finding for finding in self.findings}[check]

    def as_dict(self) -> dict[str, Any]:
        """The document of `fullrank check --json`."""
        return {
            **self.description,
            "passes": self.passes,
            "leaking_layers": list(self.layers),
            "shrunk": list(self.shrunk),
            "checks": [asdict(finding) for finding in self.findings],
        }


def bounded(looked_at: str, difference: float, tolerance: float, reason: str, *, remark: str = "",
            layers: tuple[str, ...] = ()) -> Finding:  # fmt: skip
    """Finding that passes where the difference is at most the tolerance; NaN fails."""
    fails = math.isnan(difference) or difference > tolerance
    return Finding("fails" if fails else "passes", looked_at, difference, tolerance, reason, remark, layers)


def inapplicable(reason: str) -> Finding:
    return Finding("not applicable", reason=reason)


# for sums of some hundred terms, in proportion to the largest number compared. What a leak moves is far larger, and what
# rounding moves far smaller.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def tolerance(dtype: torch.dtype) -> float:
    """Largest error that rounding may cause in a number of size 1."""
    return _TOLERANCES[dtype]


def rounding(dtype: torch.dtype) -> str:
    """The reason of `tolerance`."""
    return f"rounding in {str(dtype).removeprefix('torch.')}, in proportion to the largest figure"


def largest(values: Tensor, expected: Tensor) -> float:
    """max |values - expected|; NaN if one of them is not finite where the other is."""
    if values.numel() == 0:
        return 0.0
    off = (values - expected).abs()
    same = (values == expected) | (values.isnan() & expected.isnan())  # infinities that agree, too
    return float(torch.where(same, torch.zeros_like(off), off).max())


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
