"""A user's scoring function, called, and what it returned in one form."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    each: Tensor | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)


class Scorer:
    """The user's function. skipped: how many tokens at the start it does not score (None: not known)."""

    def __init__(self, score: Callable[..., Any], form: Callable[[Any], Any], many: bool) -> None:
        names = set[str]()
        if callable(score) and not isinstance(score, type):
            names = set(inspect.signature(score).parameters)
        self.score, self.form, self.many, self.ranked = score, form, many, {"rank", "world_size"} <= names
        self.unit, self.noise, self.calls, self.seconds = tolerance(torch.float32), 0.0, 0, 0.0
        self.skipped: int | None = None

    def read(self, *texts: Any, **ranks: int) -> Reading:
        """Call it. ranks: rank and world_size, for a function that takes them."""
        if self.ranked:
            ranks = {"rank": 0, "world_size": 1} | ranks
        inputs = [self.form(text) for text in texts]
        start = time.perf_counter()
        doing, value = "failed", None
        try:
            value = self.score(inputs if self.many else inputs[0], **ranks)
            doing = f"returned {type(value).__name__} {str(value)[:80]!r}"
            reading = self.convert(value)
        except Exception as error:
            what = f"a {type(inputs[0]).__name__} of {len(texts[0])} tokens"
            raise InputError(
                f"score: {doing} on {what} ({type(error).__name__}: {one_line(error)}); it has to return {_RETURNS}; "
                "texts= changes the kind of text, many=True gives lists of texts, length= shorter ones"
            ) from error
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return reading

    def convert(self, value: Any) -> Reading:
        """Convert what the scorer returned to one form; ValueError for nan."""
        counts, means = dict[str, float](), dict[str, float]()
        if isinstance(value, Mapping):
            counts = {key: float(value[key]) for key in ("tokens", "words", "bytes") if key in value}
            means = {key: float(value[key]) for key in ("loss", "perplexity") if key in value}
            if "nll" not in value:
                if not means or not counts:
                    raise ValueError(f"a mapping with {', '.join(map(str, value)) or 'nothing'}")
                mean, count = means.get("loss", math.log(means.get("perplexity", 1.0))), next(iter(counts.values()))
                return Reading(mean * count if count else 0.0, None, counts, means)
            value = value["nll"]
        is_list = isinstance(value, list | tuple) and any(torch.as_tensor(row).dim() for row in value)
        rows = [self.read_numbers(row) for row in (value if is_list else [value])]
        if rows[0].dim() == 2:
            rows = list(rows[0])
        total = float(sum(float(row.sum()) for row in rows))
        if math.isnan(total):
            raise ValueError("nan; a text that it cannot score has a total of 0 and 0 tokens")
        has_each = len(rows) == 1 and rows[0].dim() == 1 and (is_list or not self.many)
        return Reading(total, rows[0] if has_each else None, counts, means)

    def read_numbers(self, value: Any) -> Tensor:
        if isinstance(value, Tensor) and value.is_floating_point():
            self.unit = max(self.unit, tolerance(value.dtype))
            return value.detach().cpu().double()
        if isinstance(value, bool | str | bytes):
            raise TypeError("no numbers")
        return torch.as_tensor(value, dtype=torch.float64)

    def total(self, text: Any) -> float:
        """0 of no text, and of one token where that cannot be scored: the first token has no score then."""
        if len(text) > 1:
            return self.read(text).total
        try:
            return self.read(text).total if len(text) else 0.0
        except InputError:
            return 0.0

    def totals(self, texts: Sequence[Any]) -> Tensor:
        return torch.tensor([self.total(text) for text in texts], dtype=torch.float64)

    def each(self, text: Any) -> Tensor:
        each = self.read(text).each
        if each is None:
            raise InputError(f"score: returned a total of a text of {len(text)} tokens, and nll per token of others")
        return each

    def allowed(self, *figures: Tensor) -> float:
        """The error that rounding may cause in sums of these."""
        sizes = [float(one[one.isfinite()].abs().max()) for one in figures if one.isfinite().any()]
        return self.unit * (1 + max(sizes, default=0.0)) + 8 * self.noise


def count_faults(faults: list[str], looked_at: str, remark: str = "") -> Finding:
    return judge(looked_at, float(len(faults)), 0.0, "a count", remark="; ".join(faults) or remark)
