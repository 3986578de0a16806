"""Context: the reach of memory under Skip-Retain (Skip Cross-head §2.1.2), and the use that a causal model makes of context.

docs/derivations/skip_retain.md
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class LayerReach:
    """The reach of one layer's memory at a step in which the layer runs, long after the start.

        reach = M + N K,    P(K = k) = C(k + j - 1, k) p^k (1 - p)^j,    j = ceil(M / N)

    reach: how many tokens before the first query of its segment the oldest remembered token stands; K: the steps in which
    the layer was skipped since the j-th last one in which it ran, to which that token belongs.
    layer: counted from 0. probability p: that the layer is skipped at a step. memory_length M, segment_length N: in tokens.
    """

    layer: int
    probability: float
    memory_length: int
    segment_length: int

    @property
    def skips(self) -> Any:
        """The distribution of K (`scipy.stats.nbinom`)."""
        from scipy import stats  # a long import, for this analysis alone

        segments = math.ceil(self.memory_length / self.segment_length)
        return stats.nbinom(segments, 1 - self.probability)

    @property
    def mean(self) -> float:
        """The expected reach, M + N j p / (1 - p), in tokens."""
        return self.memory_length + self.segment_length * float(self.skips.mean())

    @property
    def deviation(self) -> float:
        """The standard deviation of the reach, N sqrt(j p) / (1 - p), in tokens."""
        return self.segment_length * float(self.skips.std())


def context(probabilities: Sequence[float], *, memory_length: int, segment_length: int) -> tuple[LayerReach, ...]:
    """The reach of the memory of each layer, given how likely each layer is skipped at a step (`SkipRetain.probabilities`).

    memory_length M and segment_length N in tokens, any one longer than the other. Steps are forward passes, and a layer
    is skipped independently at each; the beginning, when memory is not yet full, is left out.
    What is described is how far a layer's own attention sees. Its keys are hidden states, which depend on older tokens
    still, as with every memory.
    Raises InputError for lengths below 1 and for a probability that is not from 0 on and below 1: a layer that always rests
    has a memory that never changes.
    """
    if min(memory_length, segment_length) < 1:
        raise InputError(f"memory_length, segment_length: one or more tokens, given {memory_length}, {segment_length}")
    reach = []
    for layer, p in enumerate(probabilities):
        if not 0 <= p < 1:
            raise InputError(f"probabilities: from 0 on and below 1, given {p} for layer {layer}")
        reach.append(LayerReach(layer, float(p), memory_length, segment_length))
    return tuple(reach)


# -- the use of context -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ContextUse:
    """nll: by tokens of context, the shortest first, nats per token of each of S texts (S,). scored: tokens of each text."""

    nll: dict[int, np.ndarray]
    scored: int

    @property
    def perplexity(self) -> dict[int, float]:
        return {length: math.exp(values.mean()) for length, values in self.nll.items()}

    def reach(self, tolerance: float) -> int:
        """The fewest tokens of context whose mean nll is within `tolerance` of the lowest."""
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
            gain = float((before - after).mean())
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
    """The nll after 8, 16, 32 ... tokens of context, and after all there are.

    Read are the first 64 texts as long as a segment and the memory of the model, an eighth of each is scored.
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
    """Nats per token of the last `scored` tokens of each row (S,), after `length` tokens.

    opening: the first token of a row opens every text, and is kept in place of another one.
    """
    read = rows[:, -length - scored :]
    if opening:
        first = rows[:, :1]
        read = torch.cat((first, read[:, 1:]), dim=1)
    numbers = read.shape[1] * (model.vocab_size or _LARGE)  # logits of a row
    means = []
    for ids in read.split(max(1, _LOGITS // numbers)):
        inputs = ids[:, :-1]
        targets = ids[:, 1:]
        nll = model.nll(inputs, targets)
        means.append(nll[:, -scored:].double().mean(1).cpu())
    return torch.cat(means).numpy()


def find_longest(model: LoadedModel, text: Text) -> int:
    """Tokens of the longest text that the use of context is measured on: a segment and its memory."""
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
    """Use of context: perplexity by tokens of context, and what each step to more of them gains (`read_context`)."""
    yield from read_context(model, text).to_records()
