"""The use that a causal model makes of context: the nll of the same tokens after fewer and more tokens before them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.evaluation.statistics import Interval, compute_paired_interval
from fullrank.models import LoadedModel, open_model
from fullrank.records import Lines, Record

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

    @property
    def last_gain(self) -> float:
        """Nats per token by which the last step to more context lowers the nll; 0 where there is one length only."""
        *_, before, after = [*self.nll.values()] * 2 if len(self.nll) == 1 else self.nll.values()
        return float((before - after).mean())

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of `last_gain` over the choice of texts; None where there are too few, or all are equal."""
        if len(self.nll) == 1:
            return None
        *_, before, after = self.nll.values()
        return compute_paired_interval(after.tolist(), before.tolist())

    def to_records(self) -> Iterator[Record]:
        for length, perplexity in self.perplexity.items():
            yield Record({"tokens of context": length}, "perplexity", perplexity)


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
    powers = [length for i in range(30) if (length := _SHORTEST << i) <= most / 1.5]
    return ContextUse(
        {length: _nll(loaded, _cut(rows, length + scored, opening), scored) for length in (*powers, most)}
    )


def _cut(rows: Tensor, length: int, opening: bool) -> Tensor:
    """The last `length` tokens of each row, the first of them replaced by the row's own first token if it opens texts."""
    kept = rows[:, -length:]
    return torch.cat((rows[:, :1], kept[:, 1:]), dim=1) if opening else kept


def _nll(model: LoadedModel, rows: Tensor, scored: int) -> np.ndarray:
    """Nats per token of the last `scored` tokens of each row (S,)."""
    means = []
    for ids in rows.split(max(1, _LOGITS // (rows.shape[1] * (model.vocab_size or _LARGE)))):
        nll = model.nll(ids[:, :-1], ids[:, 1:])
        means.append(nll[:, -scored:].double().mean(1).cpu())
    return torch.cat(means).numpy()
