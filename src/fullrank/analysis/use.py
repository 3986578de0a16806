"""The use that a causal model makes of context: the nll of the same tokens after fewer and more tokens before them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.evaluation.statistics import Interval, compute_paired_interval
from fullrank.models import LoadedModel, open_model
from fullrank.records import Lines

_SHORTEST = 8  # tokens of context
_LOGITS = 1 << 24  # numbers in a block of logits
_LARGE = 1 << 16  # a vocabulary, where its size is not known
CONTEXT_PLOT = Lines("tokens of context", series=(), title="Perplexity by context")


@dataclass(frozen=True, eq=False)
class ContextUse:
    """nll: by tokens of context, the shortest first, nats per token of each of S texts (S,)."""

    nll: dict[int, np.ndarray]

    @property
    def perplexity(self) -> dict[int, float]:
        """exp(mean nll), by tokens of context."""
        perplexities = {}
        for length, values in self.nll.items():
            perplexities[length] = math.exp(values.mean())
        return perplexities

    def reach(self, tolerance: float) -> int:
        """The fewest tokens of context whose mean nll is within `tolerance` of the lowest."""
        means = {length: values.mean() for length, values in self.nll.items()}
        highest = min(means.values()) + tolerance
        return min(length for length, mean in means.items() if mean <= highest)

    def find_last_gain(self) -> tuple[float, Interval | None]:
        """Nats per token by which the last step to more context lowers the nll, and their 95 % interval over the texts.

        0 where there is one length only; the interval is None there, for one text, and where all gains are equal.
        """
        if len(self.nll) == 1:
            return 0.0, None
        *_, before, after = self.nll.values()
        gain = float((before - after).mean())
        interval = compute_paired_interval(after.tolist(), before.tolist())
        return gain, interval


def context_use(
    model: nn.Module | LoadedModel, texts: Sequence[Tensor], *, scored: int, opening: bool = False
) -> ContextUse:
    """The nll of the last `scored` tokens of each text after 8, 16, 32 ... tokens of context, and after all there are.

    model: any model that predicts next tokens; a model with memory reads each text at once.
    texts: token ids (1, N), of one length. opening: their first token opens every text, and is kept in place of another one.
    """
    loaded = open_model(model)
    rows = torch.cat(list(texts))
    loaded.require({"logits"}, "use of context")
    most = rows.shape[1] - scored
    lengths = []
    length = _SHORTEST
    while length <= most / 1.5:
        lengths.append(length)
        length *= 2
    lengths.append(most)
    nll = {}
    for length in lengths:
        nll[length] = _nll(loaded, rows, length, scored, opening)
    return ContextUse(nll)


def _nll(model: LoadedModel, rows: Tensor, length: int, scored: int, opening: bool) -> np.ndarray:
    """Nats per token of the last `scored` tokens of each row (S,), after `length` tokens."""
    kept = rows[:, -length - scored :]
    if opening:
        first = rows[:, :1]
        kept = torch.cat((first, kept[:, 1:]), dim=1)
    vocab_size = model.vocab_size or _LARGE
    numbers = kept.shape[1] * vocab_size  # logits of a row
    at_once = max(1, _LOGITS // numbers)
    means = []
    for ids in kept.split(at_once):
        inputs = ids[:, :-1]
        targets = ids[:, 1:]
        nll = model.nll(inputs, targets)
        mean = nll[:, -scored:].double().mean(1)
        means.append(mean.cpu())
    return torch.cat(means).numpy()
