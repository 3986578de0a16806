"""The use that a causal model makes of context: the nll of the same tokens after fewer and more tokens before them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.evaluation.statistics import Interval, compute_paired_interval
from fullrank.models import LoadedModel, open_model
from fullrank.records import Lines

_SHORTEST, _LOGITS = 8, 1 << 24  # tokens of context; numbers in a block of logits
_LARGE = 1 << 16  # a vocabulary, where its size is not known
CONTEXT_PLOT = Lines("tokens of context", series=(), title="Perplexity by context")


@dataclass(frozen=True, eq=False)
class ContextUse:
    """nll: by tokens of context, the shortest first, nats per token of each of S texts (S,)."""

    nll: dict[int, np.ndarray]

    @property
    def perplexity(self) -> dict[int, float]:
        """exp(mean nll), by tokens of context."""
        return {length: math.exp(values.mean()) for length, values in self.nll.items()}

    def reach(self, tolerance: float) -> int:
        """The fewest tokens of context whose mean nll is within `tolerance` of the lowest."""
        lowest = min(values.mean() for values in self.nll.values())
        return min(length for length, values in self.nll.items() if values.mean() <= lowest + tolerance)

    def find_last_gain(self) -> tuple[float, Interval | None]:
        """Nats per token by which the last step to more context lowers the nll, and their 95 % interval over the texts.

        0 where there is one length only; the interval is None there, for one text, and where all gains are equal.
        """
        if len(self.nll) == 1:
            return 0.0, None
        *_, before, after = self.nll.values()
        return float((before - after).mean()), compute_paired_interval(after.tolist(), before.tolist())


def context_use(
    model: nn.Module | LoadedModel, texts: Sequence[Tensor], *, scored: int, opening: bool = False
) -> ContextUse:
    """The nll of the last `scored` tokens of each text after 8, 16, 32 ... tokens of context, and after all there are.

    model: any model that predicts next tokens; a model with memory reads each text at once.
    texts: token ids (1, N), of one length. opening: their first token opens every text, and is kept in place of another one.
    """
    loaded, rows = open_model(model), torch.cat(list(texts))
    loaded.require({"logits"}, "use of context")
    most = rows.shape[1] - scored
    lengths = [*takewhile(lambda length: length <= most / 1.5, (_SHORTEST << i for i in count())), most]
    return ContextUse({length: _nll(loaded, rows, length, scored, opening) for length in lengths})


def _nll(model: LoadedModel, rows: Tensor, length: int, scored: int, opening: bool) -> np.ndarray:
    """Nats per token of the last `scored` tokens of each row (S,), after `length` tokens."""
    kept = rows[:, -length - scored :]
    if opening:
        kept = torch.cat((rows[:, :1], kept[:, 1:]), dim=1)
    means = []
    for ids in kept.split(max(1, _LOGITS // (kept.shape[1] * (model.vocab_size or _LARGE)))):
        nll = model.nll(ids[:, :-1], ids[:, 1:])
        means.append(nll[:, -scored:].double().mean(1).cpu())
    return torch.cat(means).numpy()
