"""Result of a check: its verdict, the figure it rests on, and the tolerance with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fullrank.core.errors import count_things

# for sums of some hundred terms, in proportion to the largest number compared. What a leak moves is far larger, and what
# rounding moves far smaller.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        verdict: passes, fails or not applicable.
        looked_at: what was compared.
        difference: the largest difference; the check passes up to `tolerance`.
        tolerance: the largest difference that passes.
        reason: why this tolerance, or why the check does not apply.
        remark: other observations.
        layers: where a leak enters: names as in `named_modules`, in the order in which they run.
        check: the name of the check.
        path: how the model was run.
        leaks: which positions see which tokens.
    """

    verdict: Literal["passes", "fails", "not applicable"]
    looked_at: str = ""
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""
    remark: str = ""
    layers: tuple[str, ...] = ()
    check: str = ""
    path: str = ""
    leaks: str = ""

    @property
    def words(self) -> str:
        """Everything but the name, the verdict and the figures, in one line."""
        if self.verdict == "not applicable":
            return self.reason
        parts = [self.looked_at, f"tolerance: {self.reason}" if self.reason else "", self.remark]
        if self.layers:
            parts.append(f"the layer that leaks: {', '.join(self.layers)}")
        return "; ".join(filter(None, parts))


@dataclass(frozen=True, repr=False)
class Report:
    """All findings of one model; `print(report)` shows a line for each.

    Attributes:
        findings: one for each check, in the order in which they ran.
        description: what the model is.
        shrunk: what was made smaller for the check.
        needed: beginning of the names of those findings of which one has to pass; where none does, nothing was checked.
    """

    findings: tuple[Finding, ...]
    description: Mapping[str, Any]
    shrunk: tuple[str, ...] = ()
    needed: str = "future"

    def __repr__(self) -> str:
        wide = max((len(finding.check) for finding in self.findings), default=0)
        lines = [f"{self.description.get('model', 'a model')}: {self.counts}"]
        for finding in self.findings:
            why = [] if finding.difference is None else [f"{finding.difference:.2g}, allowed {finding.tolerance:.2g}"]
            if finding.verdict == "fails" or not why:
                why.append(finding.words)
            lines.append(f"  {finding.check:<{wide}}  {finding.verdict:<14}  {': '.join(why)}")
        return "\n".join(lines)

    @property
    def counts(self) -> str:
        """Numbers of checks that pass, are not applicable and fail."""
        verdicts = [finding.verdict for finding in self.findings]
        passed = count_things(verdicts.count("passes"), "check")
        failed = "; ".join(finding.check for finding in self.failures)
        failed = f", {len(self.failures)} failed: {failed}" if failed else ""
        return f"{passed} passed, {verdicts.count('not applicable')} not applicable{failed}"

    @property
    def verdict(self) -> Literal["passes", "fails", "not checked"]:
        """The verdict on the model: fails where a check fails, passes where one that is needed passes, else not checked.

        Where no finding is one of the needed ones, all are needed alike.
        """
        if self.failures:
            return "fails"
        return "passes" if any(finding.verdict == "passes" for finding in self._needed) else "not checked"

    @property
    def _needed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.check.startswith(self.needed)) or self.findings

    @property
    def passes(self) -> bool:
        """True where no check fails, and something was checked."""
        return self.verdict == "passes"

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "fails")

    @property
    def paths(self) -> tuple[str, ...]:
        """The code paths on which it leaks, in words."""
        return tuple(dict.fromkeys(finding.path for finding in self.failures if finding.leaks))

    @property
    def headline(self) -> str:
        """The verdict in a sentence or two."""
        looked = [finding for finding in self.findings if finding.check.startswith("future")]
        passed = [finding for finding in looked if finding.verdict == "passes"]
        leaks = next((finding.leaks for finding in self.failures if finding.leaks), "")
        if self.verdict == "not checked":
            why = self._needed[0] if self._needed else Finding("not applicable")
            return f"It could not be checked: {why.check}: {why.reason}; {self.counts}."
        if leaks:
            names = [finding.check for finding in passed if "by perturbation" in finding.check]
            # in half precision a leak may be smaller than rounding
            is_open = any("float16" not in name and "autocast" not in name for name in names)
            where = f"only on: {'; '.join(self.paths)}" if is_open else "on every code path"
            layer = f" It enters at {self.layers[0]}." if self.layers else ""
            return f"Sees later tokens {where}.{layer} {leaks[0].upper()}{leaks[1:]}."
        if self.failures:
            is_unseen = bool(looked) and not any(finding.verdict == "fails" for finding in looked)
            return f"{'No later token is seen. ' * is_unseen}{self.counts}."
        modes = "" if self.description.get("modes", True) else "modes were not tried, as a function has none; "
        where = f"on {len(passed)} code paths, in {self.description.get('texts')}; {modes}"
        return f"{f'No leak found {where}' if looked else ''}{self.counts}."

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers that leak."""
        return tuple(dict.fromkeys(layer for finding in self.findings for layer in finding.layers))

    def of(self, check: str) -> Finding:
        """Return the finding of that check; KeyError if there is none."""
        return {finding.check: finding for finding in self.findings}[check]

    def as_dict(self) -> dict[str, Any]:
        """Return the document of `fullrank check --json`."""
        return {
            **self.description,
            "passes": self.passes,
            "verdict": self.verdict,
            "headline": self.headline,
            "paths": list(self.paths),
            "leaking_layers": list(self.layers),
            "shrunk": list(self.shrunk),
            "checks": [asdict(finding) for finding in self.findings],
        }


def judge(looked_at: str, difference: float, tolerance: float, reason: str, fault: str = "", **more: Any) -> Finding:
    """Make a finding that passes where the difference is at most the tolerance; NaN fails.

    Args:
        looked_at: what was compared.
        difference: the largest difference.
        tolerance: the largest one that passes.
        reason: why this tolerance.
        fault: the remark on a difference that is larger.
        **more: other fields of the finding.
    """
    if difference <= tolerance:
        return Finding("passes", looked_at, difference, tolerance, reason, **more)
    more["remark"] = fault or more.get("remark", "")
    return Finding("fails", looked_at, difference, tolerance, reason, **more)


def inapplicable(reason: str) -> Finding:
    """Make a finding of a check that does not apply."""
    return Finding("not applicable", reason=reason)


def allow(dtype: torch.dtype) -> tuple[float, str]:
    """Return the largest error that rounding may cause in a number of size 1, and the reason in words."""
    return _TOLERANCES[dtype], f"rounding in {str(dtype).removeprefix('torch.')}, in proportion to the largest figure"


def allow_noise(limit: float, reason: str, noise: float) -> tuple[float, str]:
    """Raise a limit, a thousandfold at most, where the model's own rounding is larger; return it with its reason.

    Args:
        limit: the largest difference that passes.
        reason: why this limit.
        noise: what rounding alone was seen to change.
    """
    if 10 * noise <= limit:
        return limit, reason
    return min(10 * noise, 1000 * limit), f"ten times the model's own rounding, {noise:.1e}"


def divide_by_size(logits: Tensor) -> Callable[[Tensor], Tensor]:
    """Make a function that divides logits such as these (R, .., V) by their size, so that differences are shares of it.

    The size is the largest figure, without those a thousand times as large as what moves between rows: -inf, -1e9 or the least
    number, the logits of words that are never given. Differences of such figures count in proportion to the figures.
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
    """Return max |values - expected|; infinite if one of them is not finite where the other is."""
    equal = torch.isclose(values, expected, 0.0, 0.0, equal_nan=True)
    off = (values - expected).abs().masked_fill(equal, 0.0).nan_to_num(math.inf, math.inf)
    return float(off.max()) if off.numel() else 0.0
