"""Reach of each layer's memory under Skip-Retain (Skip Cross-head §2.1.2; docs/derivations/skip_retain.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fullrank.core.errors import InputError
from fullrank.records import Column, Lines, Record, Table

TAIL = 1e-9  # what a distribution leaves out has less than this probability
LARGEST = 2**20  # values of a distribution


@dataclass(frozen=True, eq=False)
class Distribution:
    """tokens (K,), ascending, and their probabilities (K,), which sum to 1 but for less than 1e-9 beyond the last value."""

    tokens: np.ndarray
    probabilities: np.ndarray

    def quantile(self, share: float) -> int:
        """The smallest value that is not exceeded with probability `share`, in tokens; `share` is above 0 and at most 0.999."""
        if not 0 < share <= 0.999:
            raise InputError(f"share: above 0 and at most 0.999, given {share}")
        below = np.cumsum(self.probabilities)
        # a share that is met exactly, as 0.8 at p = 0.2, is not missed for the last bit of a sum
        return int(self.tokens[np.searchsorted(below, share - 1e-12)])


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
    def segments(self) -> int:
        """j, from how many segments the remembered tokens come."""
        return -(-self.memory_length // self.segment_length)

    @property
    def mean(self) -> float:
        """The expected reach, M + N j p / (1 - p), in tokens."""
        return self.memory_length + self.segment_length * self.segments * self._odds

    @property
    def deviation(self) -> float:
        """The standard deviation of the reach, N sqrt(j p) / (1 - p), in tokens."""
        return self.segment_length * math.sqrt(self.segments * self.probability) / (1 - self.probability)

    @property
    def nearest_mean(self) -> float:
        """The expected distance of the nearest remembered token from the first query, 1 + N p / (1 - p), in tokens."""
        return 1 + self.segment_length * self._odds

    @cached_property
    def reach(self) -> Distribution:
        """The distribution of the reach."""
        skips = skips_before(self.segments, self.probability)
        return Distribution(self.memory_length + self.segment_length * np.arange(skips.size), skips)

    @cached_property
    def nearest(self) -> Distribution:
        """The distribution of the distance of the nearest remembered token from the first query: 1 + N G, G geometric."""
        skips = skips_before(1, self.probability)
        return Distribution(1 + self.segment_length * np.arange(skips.size), skips)

    @property
    def _odds(self) -> float:
        return self.probability / (1 - self.probability)


@dataclass(frozen=True)
class Reach:
    """The reach of every layer, the first layer first, and what the paper says instead."""

    layers: tuple[LayerReach, ...]
    memory_length: int
    segment_length: int

    @property
    def farthest(self) -> tuple[LayerReach, ...]:
        """The layers with the greatest expected reach; several if they are equal."""
        most = max(layer.mean for layer in self.layers)
        return tuple(layer for layer in self.layers if math.isclose(layer.mean, most, rel_tol=1e-12))

    @property
    def resting(self) -> float:
        """The mean number of skipped layers at a step: the sum of the probabilities."""
        return math.fsum(layer.probability for layer in self.layers)

    @property
    def published(self) -> float:
        """The paper's Eq. 6, E = sum_i p_i 2 M, for M = N. It sums over layers and is the expected context of no layer."""
        return 2 * self.memory_length * self.resting

    @property
    def published_short(self) -> float:
        """The paper's short form of Eq. 6 for the schedule of Eq. 1, M (L - 3) / 2 for L layers."""
        return self.memory_length * (len(self.layers) - 3) / 2


def context(probabilities: Sequence[float], *, memory_length: int, segment_length: int) -> Reach:
    """The reach of the memory of each layer, given how likely each layer is skipped at a step (`SkipRetain.probabilities`).

    memory_length M and segment_length N in tokens, any one longer than the other. Steps are forward passes, and a layer
    is skipped independently at each; the beginning, when memory is not yet full, is left out.
    What is described is how far a layer's own attention sees. Its keys are hidden states, which depend on older tokens
    still, as with every memory.
    Raises InputError for lengths below 1 and for a probability that is not from 0 on and below 1: a layer that always rests
    has a memory that never changes.
    """
    for name, length in (("memory_length", memory_length), ("segment_length", segment_length)):
        if length < 1:
            raise InputError(f"{name}: one or more tokens, given {length}")
    if not probabilities:
        raise InputError("probabilities: one for each layer, given none")
    for layer, p in enumerate(probabilities):
        if not 0 <= p < 1:
            why = " (a layer that always rests never renews its memory)" if p == 1 else ""
            raise InputError(f"probabilities: from 0 on and below 1, given {p} for layer {layer}{why}")
    layers = (LayerReach(i, float(p), memory_length, segment_length) for i, p in enumerate(probabilities))
    return Reach(tuple(layers), memory_length, segment_length)


def skips_before(runs: int, p: float) -> np.ndarray:
    """P(K = 0), P(K = 1), ..: how often a layer was skipped since the `runs`-th last step in which it ran; (values,).

        P(K = k) = C(k + j - 1, k) p^k (1 - p)^j,    j = runs

    Ends where what is left out has a probability below 1e-9. Raises InputError if there would be more than a million values.
    """
    from scipy import stats  # a long import, for this analysis alone

    law = stats.nbinom(runs, 1 - p)
    size = law.isf(TAIL) + 1
    if not size <= LARGEST:
        raise InputError(
            f"a layer that rests with probability {p} and remembers {runs} segments: its reach has more than {LARGEST:,} "
            "values; take a smaller probability, a shorter memory_length or a longer segment_length"
        )
    probabilities: np.ndarray = law.pmf(np.arange(size))
    return probabilities


# -- records -----------------------------------------------------------------------------------------------------------

QUANTILES = (0.5, 0.9, 0.99)
REACH_TABLE = Table(
    rows="layer",
    columns=(
        Column("skipped", "skipped, % of steps", format=".1f"),
        Column("mean reach", format=",.1f"),
        Column("deviation", format=",.1f"),
        *(Column(f"reach, {share:.0%} quantile", format=",d") for share in QUANTILES),
        Column("mean nearest", "nearest token, mean", format=",.1f"),
    ),
)
REACH_PLOT = Lines(
    x="tokens",
    y="reaches at least",
    series=("layer",),
    title="How far back the memory of each layer reaches",
    subtitle="Share of the steps at which the oldest token that a layer remembers is at least so far away",
    x_title="tokens before the first query of the segment",
    from_zero=True,
    marks=(("x", "memory length"), ("x", "Eq. 6")),
)


def reach_records(reach: Reach) -> Iterator[Record]:
    """The reach of every layer; its distribution up to its 99.9 % quantile."""
    yield Record({}, "memory length", reach.memory_length, "tokens")
    yield Record({}, "segment length", reach.segment_length, "tokens")
    yield Record({}, "skipped layers", reach.resting, note="Mean number of layers that are skipped at a step.")
    if reach.resting:
        yield Record(
            {}, "Eq. 6", reach.published, "tokens", note="Eq. 6 is a sum over layers, and the context of none."
        )
    for layer in reach.layers:
        labels = {"layer": layer.layer}
        yield Record(labels, "skipped", 100 * layer.probability, "%")
        yield Record(labels, "mean reach", layer.mean, "tokens")
        yield Record(labels, "deviation", layer.deviation, "tokens")
        for share in QUANTILES:
            yield Record(labels, f"reach, {share:.0%} quantile", layer.reach.quantile(share), "tokens")
        yield Record(labels, "mean nearest", layer.nearest_mean, "tokens")
        farthest, reached = layer.reach.quantile(0.999), 1.0
        for tokens, probability in zip(layer.reach.tokens, layer.reach.probabilities, strict=True):
            if tokens <= farthest:
                yield Record({**labels, "tokens": tokens}, "reaches at least", reached)
            reached -= probability
