"""Skip-Retain: which layers rest at a step, and how likely that is (Skip Cross-head §2.1).

A layer that rests does nothing: its input is its output, and it keeps its memory, which grows older. The draw is a pure
function of (seed, step, layer), so that every rank and every resumed run draws the same without asking anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fullrank.config import register
from fullrank.core.registry import lookup

# (index of a layer from 0, number of layers) -> probability
Probability = Callable[[int, int], float]
Given = float | Sequence[float] | None


def _one(p: Given, name: str) -> float:
    """`p` as the single probability that a schedule needs."""
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p <= 1:
        raise ValueError(f"'{name}' skips with one probability from 0 to 1, given {p!r}")
    return float(p)


def _nothing(p: Given, name: str) -> None:
    if p is not None:
        raise ValueError(f"'{name}' takes no probability, given {p!r}; leave it out")


@register("skip", "none")
def none(p: Given = None) -> Probability:
    """No layer ever rests: ordinary training."""
    _nothing(p, "none")
    return lambda layer, layers: 0.0


@register("skip", "linear")
def linear(p: Given = None) -> Probability:
    """Eq. 1:  p(i) = 0.5 (i - 1) / N  for i < N,  p(N) = 0,  i = 1 .. N."""
    _nothing(p, "linear")
    return lambda layer, layers: 0.0 if layer == layers - 1 else 0.5 * layer / layers


@register("skip", "uniform")
def uniform(p: Given = None) -> Probability:
    """Eq. 2:  p(i) = p."""
    q = _one(p, "uniform")
    return lambda layer, layers: q


@register("skip", "not_first")
def not_first(p: Given = None) -> Probability:
    """Eq. 3:  p(1) = 0,  p(i) = p otherwise."""
    q = _one(p, "not_first")
    return lambda layer, layers: 0.0 if layer == 0 else q


@register("skip", "not_last")
def not_last(p: Given = None) -> Probability:
    """Eq. 4:  p(N) = 0,  p(i) = p otherwise."""
    q = _one(p, "not_last")
    return lambda layer, layers: 0.0 if layer == layers - 1 else q


@register("skip", "not_first_or_last")
def not_first_or_last(p: Given = None) -> Probability:
    """Eq. 5:  p(1) = p(N) = 0,  p(i) = p otherwise."""
    q = _one(p, "not_first_or_last")
    return lambda layer, layers: 0.0 if layer in (0, layers - 1) else q


@register("skip", "listed")
def listed(p: Given = None) -> Probability:
    """One's own schedule: a probability for each layer, the first layer first."""
    if isinstance(p, str | int | float) or p is None or not p:
        raise ValueError(f"'listed' skips with a list of probabilities, one for each layer, given {p!r}")
    for layer, q in enumerate(p):
        if not isinstance(q, int | float) or isinstance(q, bool) or not 0 <= q <= 1:
            raise ValueError(f"'listed' skips with probabilities from 0 to 1, given {q!r} for layer {layer}")
    each = [float(q) for q in p]

    def of(layer: int, layers: int) -> float:
        if len(each) != layers:
            raise ValueError(f"{len(each)} probabilities are listed, but the model has {layers} layers")
        return each[layer]

    return of


class SkipRetain:
    """A schedule of Eq. 1 to 5, or one's own, for a model of `num_layers` layers (Skip Cross-head §2.1).

    `SkipRetain("linear", num_layers=16)`; `SkipRetain("uniform", 0.1, num_layers=8)`; `SkipRetain("listed", [0, 0.2, 0],
    num_layers=3)`; a schedule of one's own is a function of p that gives a function of a layer (from 0) and of the number
    of layers::

        @fr.register("skip", "even")
        def even(p=None):
            return lambda layer, layers: 0.1 if layer % 2 else 0.0

    `probabilities`: that a layer rests at a step, the first layer first. Layers rest independently of each other and of
    other steps.
    Raises ValueError for probabilities that do not fit, ConfigError for an unknown name.
    """

    def __init__(self, schedule: str = "linear", p: Given = None, *, num_layers: int) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers: one or more, given {num_layers}")
        of: Probability = lookup("skip", schedule, "skip")(p)
        self.schedule, self.p = schedule, p
        self.probabilities = tuple(float(of(layer, num_layers)) for layer in range(num_layers))
        if wrong := [layer for layer, q in enumerate(self.probabilities) if not 0 <= q <= 1]:
            raise ValueError(
                f"'{schedule}' gives layer {wrong[0]} of {num_layers} the probability {self.probabilities[wrong[0]]}; "
                "a probability is from 0 to 1"
            )

    def skips(self, seed: int, step: int, layer: int) -> bool:
        """Whether `layer` (from 0) rests at `step`: true with its probability, and always the same for the same numbers.

        Raises ValueError for a layer that does not exist, and for a seed or step below 0.
        """
        if not 0 <= layer < len(self.probabilities) or min(seed, step) < 0:
            raise ValueError(
                f"seed and step from 0 on, a layer from 0 to {len(self.probabilities) - 1}; given seed {seed}, step {step}, "
                f"layer {layer}"
            )
        q = self.probabilities[layer]
        return q > 0 and bool(_uniform(seed, step, layer) < q)

    def skipped(self, seed: int, step: int) -> frozenset[int]:
        """The layers, counted from 0, that rest at `step`."""
        return frozenset(layer for layer in range(len(self.probabilities)) if self.skips(seed, step, layer))


def _uniform(seed: int, step: int, layer: int) -> float:
    """A number in [0, 1) that depends on the three alone, whatever was drawn before."""
    # as a key of its own and not [seed, step, layer]: numpy fills a short list up with zeros, so that layer 0 would share
    # its draw with whoever seeds a generator with [seed, epoch], as the order of the data does
    words = np.random.SeedSequence(seed, spawn_key=(step, layer)).generate_state(2, np.uint32)
    return ((int(words[0]) << 21) | (int(words[1]) >> 11)) / 2**53
