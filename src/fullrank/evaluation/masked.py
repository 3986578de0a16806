"""How well masked tokens are named: nats and hits are summed, and one division comes last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fullrank.config.run import MASKED_TOKEN, RunConfig
from fullrank.core.errors import InputError
from fullrank.evaluation.protocol import Flags


@dataclass(frozen=True)
class MaskedEvaluation:
    """nll: nats summed over the `tokens` that were asked for.  correct: of how many the likeliest word is the right one."""

    nll: float
    tokens: int
    correct: int

    @property
    def scores(self) -> dict[str, float]:
        """What metrics.jsonl gets besides."""
        return {"accuracy_percent": 100 * self.correct / self.tokens}


@dataclass(frozen=True, kw_only=True)
class MaskedProtocol:
    """Which tokens are asked for, and what the model reads: blocks of `segment_length` tokens, each by itself.

    Masks are a function of `mask_seed` and the place in the text: the same for every run, size of blocks and batches.
    """

    segment_length: int
    mlm_probability: float
    mask_replace_prob: float
    random_replace_prob: float
    mask_seed: int
    kind: str = "masked"
    next_token: bool = False

    def in_words(self) -> str:
        """The protocol as a sentence, for people: printed and saved with every figure."""
        stay = max(0.0, 1 - self.mask_replace_prob - self.random_replace_prob)
        return (
            f"{_percent(self.mlm_probability)} of the tokens asked for, chosen by seed {self.mask_seed} and the same in every "
            f"run ({_percent(self.mask_replace_prob)} of them read as <mask>, {_percent(self.random_replace_prob)} as a random "
            f"token, {_percent(stay)} as they are), given all of their block of {self.segment_length} tokens; {MASKED_TOKEN}"
        )


def masked_protocol(config: RunConfig, flags: Flags | None = None) -> MaskedProtocol:
    """How masked tokens of a run are measured, while training and in the end; `flags` come before the configuration.

    Raises InputError for flags that are about next tokens.
    """
    flags = flags or Flags()
    for key in ("context", "stride", "memory_length", "same_length", "clamp_length"):
        if getattr(flags, key):
            raise InputError(
                f"--{key.replace('_', '-')}: says how next tokens are read, and this run predicts masked ones "
                "(train.objective: masked); leave it out"
            )
    train = config.train
    return MaskedProtocol(
        segment_length=flags.segment_length or config.eval.segment_length or train.segment_length,
        mlm_probability=train.mlm_probability,
        mask_replace_prob=train.mask_replace_prob,
        random_replace_prob=train.random_replace_prob,
        mask_seed=config.eval.mask_seed,
    )


def masked_figures(found: MaskedEvaluation) -> dict[str, Any]:
    """What is reported: nats per masked token, their exponential, hits in per cent, and how many tokens were asked for.

        nll = S / tokens        perplexity = exp(nll)        accuracy_percent = 100 correct / tokens

    There is no figure per word, character or byte: most of the text was given. What is not finite is left out.
    """
    if found.tokens < 1:
        raise InputError("nothing to evaluate: no token of the text was asked for; raise train.mlm_probability")
    nll = found.nll / found.tokens
    try:
        perplexity = math.exp(nll)
    except OverflowError:
        perplexity = math.inf
    figures = {
        "nll": nll,
        "perplexity": perplexity,
        **found.scores,
        "tokens": found.tokens,
    }
    return {key: value for key, value in figures.items() if math.isfinite(value)}


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
