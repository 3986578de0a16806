"""The use that a causal model makes of context: perplexity by tokens of context."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.evaluation.statistics import Interval, compute_paired_interval
from fullrank.models import LoadedModel
from fullrank.records import Column, Lines, Record, Table, measurement
from fullrank.text import Text

_SHORTEST = 8  # tokens of context
CONTEXT_TEXTS = 64  # segments over which the use of context is measured
_LOGITS = 1 << 24  # numbers in a block of logits
_LARGE = 1 << 16  # a vocabulary, where its size is not known


@dataclass(frozen=True, eq=False)
class ContextUse:
    """Perplexity by tokens of context.

    nll: by tokens of context, the shortest first, nats per token of each of S texts (S,). scored: tokens of each text.
    """

    nll: dict[int, np.ndarray]
    scored: int

    @property
    def perplexity(self) -> dict[int, float]:
        return {length: math.exp(values.mean()) for length, values in self.nll.items()}

    def reach(self, tolerance: float) -> int:
        """Find the fewest tokens of context whose mean nll is within `tolerance` of the lowest."""
        means = {length: values.mean() for length, values in self.nll.items()}
        highest = min(means.values()) + tolerance
        return min(length for length, mean in means.items() if mean <= highest)

    @property
    def gains(self) -> dict[int, tuple[float, Interval | None]]:
        """Nats per token by which each step to more context lowers the nll, and their 95 % interval over the texts.

        Nothing for the fewest tokens. The interval is None for one text, and where all gains are equal.
        """
        gains = {}
        for (_, before), (length, after) in itertools.pairwise(self.nll.items()):
            gain = (before - after).mean()
            gains[length] = gain, compute_paired_interval(after.tolist(), before.tolist())
        return gains

    def to_records(self) -> Iterator[Record]:
        texts = len(next(iter(self.nll.values())))
        protocol = f"the last {self.scored} tokens of each of {texts} texts"
        gains = self.gains
        for length, perplexity in self.perplexity.items():
            labels = {"tokens of context": length}
            yield Record(labels, "perplexity", perplexity, protocol=protocol)
            if length in gains:
                gain, interval = gains[length]
                yield Record(labels, "gain", gain, "nats per token", interval, protocol)


def read_context(model: LoadedModel, text: Text) -> ContextUse:
    """Measure the nll after 8, 16, 32 ... tokens of context, and after as many as there are.

    It reads the first 64 texts (or `text.count`) as long as a segment and the memory of the model, and scores the last
    eighth of each.
    Raises InputError for a model that reads from both sides, and for a text with fewer than two such texts.
    """
    if model.is_masked:
        raise InputError(f"{model.name}: reads a text from both sides, so that no token has a context of its own")
    longest = find_longest(model, text)
    texts = text.with_length(longest).rows(text.count or CONTEXT_TEXTS)
    if len(texts) < 2:
        raise InputError(f"{text.name}: has fewer than two segments of {longest:,} tokens; give a longer --text")
    model.require({"logits"}, "use of context")
    rows = torch.cat(texts)
    scored = max(longest // 8, 1)
    most = longest - scored
    doubled = [_SHORTEST << k for k in range(most.bit_length())]
    lengths = [*(length for length in doubled if length <= most / 1.5), most]
    opening = text.bos_id is not None
    return ContextUse({length: _nll(model, rows, length, scored, opening) for length in lengths}, scored)


def _nll(model: LoadedModel, rows: Tensor, length: int, scored: int, opening: bool) -> np.ndarray:
    """Measure the nats per token of the last `scored` tokens of each row (S,), after `length` tokens.

    opening: the first token of a row opens every text, and is kept in place of another one.
    """
    read = rows[:, -length - scored :]
    if opening:
        first = rows[:, :1]
        read = torch.cat((first, read[:, 1:]), dim=1)
    row_logits = read.shape[1] * (model.vocab_size or _LARGE)
    means = []
    for ids in read.split(max(1, _LOGITS // row_logits)):
        inputs = ids[:, :-1]
        targets = ids[:, 1:]
        nll = model.nll(inputs, targets)
        means.append(nll[:, -scored:].double().mean(1).cpu())
    return torch.cat(means).numpy()


def find_longest(model: LoadedModel, text: Text) -> int:
    """Find the length of the texts that the use of context is measured on, in tokens: a segment and the memory.

    It is at most what the model can read.
    """
    length = text.segment_length + getattr(model.fullrank_model, "memory_length", 0)
    return min(length, model.max_length or length)


@measurement(
    "context",
    needs={"logits"},
    texts=CONTEXT_TEXTS,
    table=Table(
        "tokens of context",
        (Column("perplexity", format=",.2f"), Column("gain", "gain, nats per token", format="+.4f")),
    ),
    plot=Lines("tokens of context", "perplexity", title="Perplexity by context"),
)
def measure_context(model: LoadedModel, text: Text) -> Iterator[Record]:
    """Measure the use of context: perplexity by tokens of context, and what each step to more of them gains."""
    yield from read_context(model, text).to_records()
