"""What a check found: its verdict, the figure it rests on, and the tolerance with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Verdict = Literal["passes", "fails", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """looked_at: what was compared. difference: the largest one found; passes up to `tolerance`. check: its name.

    reason: why this tolerance, or why the check does not apply. remark: what else was found. layers: where a leak enters,
    names as in `named_modules`, in the order in which they run.
    """

    verdict: Verdict
    looked_at: str = ""
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""
    remark: str = ""
    layers: tuple[str, ...] = ()
    check: str = ""


# a check by name, not yet run
Check = tuple[str, Callable[[], Finding]]


@dataclass(frozen=True)
class Report:
    """All findings of one model. description: what the model is; shrunk: what was made smaller for the check."""

    findings: tuple[Finding, ...]
    description: Mapping[str, Any]
    shrunk: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """Whether no check fails."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "fails")

    @property
    def layers(self) -> tuple[str, ...]:
        """Every layer that leaks, by name."""
        return tuple(dict.fromkeys(layer for finding in self.findings for layer in finding.layers))

    def of(self, check: str) -> Finding:
        """The finding of that name; KeyError if there is none."""
        found = [finding for finding in self.findings if finding.check == check]
        if not found:
            raise KeyError(check)
        return found[0]

    def as_dict(self) -> dict[str, Any]:
        """What `fullrank check --json` prints."""
        return {
            **self.description,
            "passes": self.passes,
            "leaking_layers": list(self.layers),
            "shrunk": list(self.shrunk),
            "checks": [asdict(finding) for finding in self.findings],
        }


def judged(
    looked_at: str,
    difference: float,
    tolerance: float,
    reason: str,
    *,
    remark: str = "",
    layers: tuple[str, ...] = (),
) -> Finding:
    """Passes where the difference is at most the tolerance; one that is no number fails."""
    fails = math.isnan(difference) or difference > tolerance
    return Finding("fails" if fails else "passes", looked_at, difference, tolerance, reason, remark, layers)


def inapplicable(reason: str) -> Finding:
    return Finding("not applicable", reason=reason)


# Of sums of some hundred terms, in proportion to the largest number compared. What a leak moves is far larger, and what
# rounding moves far smaller.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def tolerance(dtype: torch.dtype) -> float:
    """How far rounding may move a number of size 1."""
    return _TOLERANCES[dtype]


def rounding(dtype: torch.dtype) -> str:
    """The reason of `tolerance`."""
    return f"rounding in {str(dtype).removeprefix('torch.')}, in proportion to the largest figure"


def largest(given: torch.Tensor, expected: torch.Tensor) -> float:
    """max |given - expected|; NaN if one of them is not finite where the other is."""
    if given.numel() == 0:
        return 0.0
    off = (given - expected).abs()
    same = (given == expected) | (given.isnan() & expected.isnan())  # infinities that agree, too
    return float(torch.where(same, torch.zeros_like(off), off).max())
