"""Skip-Retain: the layers that are skipped at a step, and their probabilities (Skip Cross-head §2.1).

A skipped layer does nothing: its input is its output, and it keeps its memory, which grows older. The draw is a pure
function of (seed, step, layer), so that every rank and every resumed run draws the same without communication.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .registry import lookup, register

# (index of a layer from 0, number of layers) -> probability
Probability = Callable[[int, int], float]
Option = float | Sequence[float] | None  # `p` of a configuration


def _single(p: Option, name: str) -> float:
    """`p` as the single probability that a schedule needs."""
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p <= 1:
        raise ValueError(f"'{name}' skips with one probability from 0 to 1, given {p!r}")
    return float(p)


def _no_option(p: Option, name: str) -> None:
    if p is not None:
        raise ValueError(f"'{name}' takes no probability, given {p!r}; leave it out")


@register("skip", "none")
def none(p: Option = None) -> Probability:
    """Ordinary training: no layer is ever skipped."""
    _no_option(p, "none")
    return lambda layer, num_layers: 0.0


@register("skip", "linear")
def linear(p: Option = None) -> Probability:
    """Eq. 1:  p(i) = 0.5 (i - 1) / N  for i < N,  p(N) = 0,  i = 1 .. N."""
    _no_option(p, "linear")
    return lambda layer, num_layers: 0.0 if layer == num_layers - 1 else 0.5 * layer / num_layers


@register("skip", "uniform")
def uniform(p: Option = None) -> Probability:
    """Eq. 2:  p(i) = p."""
    q = _single(p, "uniform")
    return lambda layer, num_layers: q


@register("skip", "not_first")
def not_first(p: Option = None) -> Probability:
    """Eq. 3:  p(1) = 0,  p(i) = p otherwise."""
    q = _single(p, "not_first")
    return lambda layer, num_layers: 0.0 if layer == 0 else q


@register("skip", "not_last")
def not_last(p: Option = None) -> Probability:
    """Eq. 4:  p(N) = 0,  p(i) = p otherwise."""
    q = _single(p, "not_last")
    return lambda layer, num_layers: 0.0 if layer == num_layers - 1 else q


@register("skip", "not_first_or_last")
def not_first_or_last(p: Option = None) -> Probability:
    """Eq. 5:  p(1) = p(N) = 0,  p(i) = p otherwise."""
    q = _single(p, "not_first_or_last")
    return lambda layer, num_layers: 0.0 if layer in (0, num_layers - 1) else q


@register("skip", "listed")
def listed(p: Option = None) -> Probability:
    """A schedule of one's own: a probability for each layer, the first layer first."""
    if not isinstance(p, Sequence) or isinstance(p, str) or not p:
        raise ValueError(f"'listed' skips with a list of probabilities, one for each layer, given {p!r}")

    def of_layer(layer: int, num_layers: int) -> float:
        if len(p) != num_layers:
            raise ValueError(f"{len(p)} probabilities are listed, but the model has {num_layers} layers")
        return p[layer]

    return of_layer


class SkipRetain:
    """A schedule of Eq. 1 to 5, or one's own, for a model of `num_layers` layers (Skip Cross-head §2.1).

    `SkipRetain("linear", num_layers=16)`; `SkipRetain("uniform", 0.1, num_layers=8)`; `SkipRetain("listed", [0, 0.2, 0],
    num_layers=3)`; a schedule of one's own is a function of p that gives a function of a layer (from 0) and of the number
    of layers::

        @fr.register("skip", "even")
        def even(p=None):
            return lambda layer, num_layers: 0.1 if layer % 2 else 0.0

    `probabilities`: of each layer to be skipped at a step, the first layer first. Layers are skipped independently of each
    other and of other steps.
    Raises ValueError for probabilities that do not fit, ConfigError for an unknown name.
    """

    def __init__(self, schedule: str = "linear", p: Option = None, *, num_layers: int) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers: one or more, given {num_layers}")
        probability: Probability = lookup("skip", schedule, "skip")(p)
        self.schedule, self.p = schedule, p
        self.probabilities = tuple(probability(layer, num_layers) for layer in range(num_layers))
        for layer, q in enumerate(self.probabilities):
            if not isinstance(q, int | float) or isinstance(q, bool) or not 0 <= q <= 1:
                raise ValueError(
                    f"'{schedule}' gives layer {layer} the probability {q!r}; a probability is from 0 to 1"
                )

    def skips(self, seed: int, step: int, layer: int) -> bool:
        """True with the probability of `layer` (from 0): skip it at `step`. The same for the same numbers.

        Raises ValueError for a layer that does not exist, and for a seed or step below 0.
        """
        if not 0 <= layer < len(self.probabilities) or min(seed, step) < 0:
            raise ValueError(
                f"seed and step from 0 on, a layer from 0 to {len(self.probabilities) - 1}; given seed {seed}, step {step}, "
                f"layer {layer}"
            )
        q = self.probabilities[layer]
        return q > 0 and draw(seed, step, layer) < q

    def skipped(self, seed: int, step: int) -> frozenset[int]:
        """The layers, counted from 0, that are skipped at `step`."""
        return frozenset(layer for layer in range(len(self.probabilities)) if self.skips(seed, step, layer))


def draw(seed: int, step: int, layer: int) -> float:
    """A number in [0, 1) that depends on the three alone: the first of Python's generator, seeded with their text."""
    return random.Random(f"{seed} {step} {layer}").random()
