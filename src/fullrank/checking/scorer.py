"""A user's scoring function, called, and what it returned in one form."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.compare import tolerance
from fullrank.checking.report import Finding, judge
from fullrank.core.errors import InputError, one_line

ROUNDING = "rounding in the precision of the scores, and what a second call changes"
_RETURNS = (
    'nll per token or its total, or a mapping with "nll", or with "loss" or "perplexity" and what is counted: "tokens"'
)


@dataclass(frozen=True)
class Reading:
    """Result of a call. each: nll of each score of a single text, where they are told apart."""

    total: float
    each: Tensor | None
    counts: dict[str, float]
    means: dict[str, float]


class Scorer:
    """The user's function. skipped: how many tokens at the start it does not score (None: not known)."""

    def __init__(self, score: Callable[..., Any], form: Callable[[Any], Any], many: bool) -> None:
        try:
            names = set(inspect.signature(score).parameters)
        except (TypeError, ValueError):
            names = set()
        self.score, self.form, self.many, self.ranked = score, form, many, {"rank", "world_size"} <= names
        self.unit, self.noise, self.calls, self.seconds = tolerance(torch.float32), 0.0, 0, 0.0
        self.skipped: int | None = None

    def read(self, *texts: Any, rank: int = 0, world_size: int = 1) -> Reading:
        inputs: list[Any] = [self.form(text) for text in texts]
        self.calls += 1
        start = time.perf_counter()
        what = (
            f"a {type(inputs[0]).__name__} of {len(texts[0])} {'characters' if isinstance(texts[0], str) else 'tokens'}"
        )
        try:
            parts = {"rank": rank, "world_size": world_size} if self.ranked else {}
            value = self.score(inputs if self.many else inputs[0], **parts)
        except Exception as error:
            raise InputError(
                f"score: failed on {'a list with ' if self.many else ''}{what} ({type(error).__name__}: {one_line(error)}); "
                "texts= changes the kind of text, many=True gives lists of texts, length= shorter ones"
            ) from error
        self.seconds += time.perf_counter() - start
        try:
            reading = self._reading(value, len(texts) == 1)
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"score: returned {type(value).__name__} {str(value)[:80]!r}; it has to return {_RETURNS}"
            ) from error
        if math.isnan(reading.total) or (reading.each is not None and bool(reading.each.isnan().any())):
            raise InputError(
                f"score: returned nan for {what}; a text that it cannot score has a total of 0 and 0 tokens"
            )
        return reading

    def _reading(self, value: Any, single: bool) -> Reading:
        counts: dict[str, float] = {}
        means: dict[str, float] = {}
        if isinstance(value, Mapping):
            counts = {key: float(value[key]) for key in ("tokens", "words", "bytes") if key in value}
            means = {key: float(value[key]) for key in ("loss", "perplexity") if key in value}
            if "nll" not in value:
                if not means or not counts:
                    keys = ", ".join(map(str, value)) or "nothing"
                    raise InputError(f"score: returned a mapping with {keys}; it has to return {_RETURNS}")
                mean, count = means.get("loss", math.log(means.get("perplexity", 1.0))), next(iter(counts.values()))
                return Reading(0.0 if count == 0 else mean * count, None, counts, means)
            value = value["nll"]
        if isinstance(value, list | tuple) and any(
            isinstance(row, list | tuple) or getattr(row, "ndim", 0) for row in value
        ):
            rows = [self._numbers(row) for row in value]
        elif (numbers := self._numbers(value)).dim() == 2:
            rows = list(numbers)
        else:
            total = float(numbers.sum())
            return Reading(total, None if numbers.dim() == 0 or self.many else numbers, counts, means)
        total = float(sum(float(row.sum()) for row in rows))
        return Reading(total, rows[0] if len(rows) == 1 and single else None, counts, means)

    def _numbers(self, value: Any) -> Tensor:
        if isinstance(value, bool | str | bytes | None):
            raise TypeError("no numbers")
        if not isinstance(value, Tensor):
            return torch.as_tensor(value, dtype=torch.float64)
        if value.is_floating_point():
            self.unit = max(self.unit, tolerance(value.dtype))
        return value.detach().cpu().double()

    def total(self, text: Any) -> float:
        """0 of no text, and of one token where that cannot be scored: the first token has no score then."""
        if len(text) > 1:
            return self.read(text).total
        try:
            return self.read(text).total if len(text) else 0.0
        except InputError:
            return 0.0

    def each(self, text: Any) -> Tensor:
        each = self.read(text).each
        if each is None:
            raise InputError(
                f"score: returned nll per token, and a total of a text of {len(text)} tokens; return the same for each"
            )
        return each

    def allowed(self, *figures: Tensor) -> float:
        """The error that rounding may cause in sums of these."""
        sizes = [float(one[one.isfinite()].abs().max()) for one in figures if one.isfinite().any()]
        return self.unit * (1 + max(sizes, default=0.0)) + 8 * self.noise


def sum_texts(scorer: Scorer, texts: Sequence[Any]) -> Tensor:
    return torch.tensor([scorer.total(text) for text in texts], dtype=torch.float64)


def count_faults(faults: list[str], looked_at: str, remark: str = "") -> Finding:
    return judge(looked_at, float(len(faults)), 0.0, "a count", remark="; ".join(faults) or remark)
