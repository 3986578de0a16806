"""Perplexity and related figures: nats are summed in float64, tokens are counted, and one division comes last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullrank.core.errors import InputError


@dataclass(frozen=True)
class Evaluation:
    """nll: nats summed over `tokens` targets.

    last_position: of the last target of each segment alone, where the others are among what the model reads.
    """

    nll: float
    tokens: int
    last_position: Evaluation | None = None


class Tally:
    """Nats summed in float64 on the device; nothing is read back before `total`."""

    def __init__(self, device: torch.device | str) -> None:
        self._nats = torch.zeros((), dtype=torch.float64, device=device)
        self._padding = torch.zeros((), dtype=torch.float64, device=device)
        self._fractions = torch.zeros((), dtype=torch.bool, device=device)
        self._targets = 0

    def add(self, nll: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """nll, targets and weights (B, N); where a weight is 0, nothing is added, whatever the model says there.

        Raises ValueError if nll has another shape than targets.
        """
        if nll.shape != targets.shape:
            raise ValueError(f"nll has shape {tuple(nll.shape)} for targets {tuple(targets.shape)}")
        nll = nll.double()
        self._targets += targets.numel()
        if weights is not None:
            nll = torch.where(weights == 0, 0.0, nll)  # not a product: what stands in padding may be infinite
            self._padding += (weights == 0).sum()
            self._fractions |= ((weights != 0) & (weights != 1)).any()
        self._nats += nll.sum()

    def total(self) -> Evaluation:
        """The sums. InputError if there was no target at all, ValueError if weights were fractions."""
        if self._fractions:
            raise ValueError("weights must be 1 where a target counts and 0 where it is padding")
        tokens = self._targets - int(self._padding)
        if tokens == 0:
            raise InputError("nothing to evaluate: the text has no tokens")
        return Evaluation(self._nats.item(), tokens)


def figures(
    evaluation: Evaluation,
    words: int | None = None,
    characters: int | None = None,
    bytes: int | None = None,
    line_starts: int | None = None,
) -> dict[str, Any]:
    """Figures of an evaluation; one per word, character or byte for each count of the text that is given.

        nll = S / tokens        perplexity = exp(nll)        perplexity_per_word = exp(S / words)
        bits_per_character = S / (ln 2 * characters)         bits_per_byte = S / (ln 2 * bytes)

        tokens_without_sos = tokens - line_starts            perplexity_without_sos = exp(S / tokens_without_sos)

    S is the sum of nats; `nll` is in nats per token. Figures per word, character and byte do not depend on how the text was
    cut into tokens, and compare models with different vocabularies. The counts must be those of the text evaluated.
    `line_starts`: so many of the tokens are `<sos>`. Papers that have none count the others only, for the same text and the
    same S; after `<eos>` a `<sos>` is certain and costs almost nothing.
    `last_position` has nll, perplexity and tokens of the last targets alone, where they were counted.
    On enwik8, what papers call bits per character (bpc) is `bits_per_byte`: they count bytes.
    A figure that is not finite (a perplexity beyond every float, a diverged model) is left out.
    Raises InputError for a count that is not positive.
    """
    for name, count in (("tokens", evaluation.tokens), ("words", words), ("characters", characters), ("bytes", bytes)):
        if count is not None and count < 1:
            raise InputError(f"{name}: a positive count of what was evaluated, given {count}")
    if line_starts is not None and not 0 <= line_starts < evaluation.tokens:
        raise InputError(f"line_starts: fewer than the {evaluation.tokens} tokens evaluated, given {line_starts}")
    result: dict[str, Any] = {
        "nll": evaluation.nll / evaluation.tokens,
        "perplexity": _exp(evaluation.nll / evaluation.tokens),
        "tokens": evaluation.tokens,
    }
    if line_starts is not None:
        result["tokens_without_sos"] = evaluation.tokens - line_starts
        result["perplexity_without_sos"] = _exp(evaluation.nll / (evaluation.tokens - line_starts))
    if words is not None:
        result["perplexity_per_word"] = _exp(evaluation.nll / words)
    if characters is not None:
        result["bits_per_character"] = evaluation.nll / (math.log(2) * characters)
    if bytes is not None:
        result["bits_per_byte"] = evaluation.nll / (math.log(2) * bytes)
    result = {key: value for key, value in result.items() if math.isfinite(value)}
    if evaluation.last_position is not None:
        result["last_position"] = figures(evaluation.last_position)
    return result


# -- masked tokens ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedEvaluation:
    """nll: nats summed over the `tokens` that were masked; correct: tokens whose likeliest word is the right one."""

    nll: float
    tokens: int
    correct: int

    @property
    def scores(self) -> dict[str, float]:
        """Figures that metrics.jsonl gets besides."""
        return {"accuracy_percent": 100 * self.correct / self.tokens}


def masked_figures(evaluation: MaskedEvaluation) -> dict[str, Any]:
    """Figures of masked tokens: nats per token, their exponential, hits in per cent, and the number of masked tokens.

        nll = S / tokens        perplexity = exp(nll)        accuracy_percent = 100 correct / tokens

    There is no figure per word, character or byte: most of the text was given. A figure that is not finite is left out.
    """
    if evaluation.tokens < 1:
        raise InputError("nothing to evaluate: no token of the text was asked for; raise train.mlm_probability")
    nll = evaluation.nll / evaluation.tokens
    figures = {"nll": nll, "perplexity": _exp(nll), **evaluation.scores, "tokens": evaluation.tokens}
    return {key: value for key, value in figures.items() if math.isfinite(value)}


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
