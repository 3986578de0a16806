"""Skip-Retain: the layers that are skipped at a step, and their probabilities (Skip Cross-head §2.1).

A skipped layer passes its input on and keeps its memory, which grows older. The draw is a function of (seed, step, layer)
alone, so that every rank and every resumed run draws the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from .registry import lookup, register

# (index of a layer from 0, number of layers) -> probability
Probability = Callable[[int, int], float]


def _is_probability(p: object) -> bool:
    return isinstance(p, int | float) and not isinstance(p, bool) and 0 <= p <= 1


def _refuse_option(p: float | None, name: str) -> None:
    if p is not None:
        raise ValueError(f"'{name}' takes no probability, given {p!r}; leave it out")


@register("skip", "none")
def none(p: float | None = None) -> Probability:
    """Skip no layer: ordinary training."""
    _refuse_option(p, "none")
    return lambda layer, num_layers: 0.0


@register("skip", "linear")
def linear(p: float | None = None) -> Probability:
    """Skip layer i by Eq. 1:  p(i) = 0.5 (i - 1) / N  for i < N,  p(N) = 0,  i = 1 .. N."""
    _refuse_option(p, "linear")
    return lambda layer, num_layers: 0.0 if layer == num_layers - 1 else 0.5 * layer / num_layers


def _register_uniform(name: str, spares_first: bool = False, spares_last: bool = False) -> None:
    """Register a schedule of Eq. 2 to 5:  p(i) = p, but 0 for a first or last layer that is spared."""

    @register("skip", name)
    def make(p: float | None = None) -> Probability:
        if p is None or not _is_probability(p):
            raise ValueError(f"'{name}' skips with one probability from 0 to 1, given {p!r}")

        def find_probability(layer: int, num_layers: int) -> float:
            spared = (spares_first and layer == 0) or (spares_last and layer == num_layers - 1)
            return 0.0 if spared else float(p)

        return find_probability


_register_uniform("uniform")  # Eq. 2
_register_uniform("not_first", spares_first=True)  # Eq. 3
_register_uniform("not_last", spares_last=True)  # Eq. 4
_register_uniform("not_first_or_last", spares_first=True, spares_last=True)  # Eq. 5


class SkipRetain:
    """A schedule of the layers that training skips, by Eq. 1 to 5 or your own (Skip Cross-head §2.1).

    `SkipRetain("linear", num_layers=16)`; `SkipRetain("uniform", 0.1, num_layers=8)`; your own schedule is a function
    of p that gives a function of a layer (from 0) and of the number of layers::

        @fr.register("skip", "even")
        def even(p=None):
            return lambda layer, num_layers: 0.1 if layer % 2 else 0.0

    `probabilities`: that each layer is skipped at a step, independently of other layers and other steps.

    Args:
        schedule: the name of a schedule.
        p: the probability of a schedule that takes one; None for the others.
        num_layers: the number of layers of the model.

    Raises:
        ValueError: there is no layer, the schedule takes no p or another one, or gives a number that is no probability.
        ConfigError: no schedule has this name.
    """

    def __init__(self, schedule: str = "linear", p: float | None = None, *, num_layers: int) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers: one or more, given {num_layers}")
        probability: Probability = lookup("skip", schedule, "skip")(p)
        self.probabilities = tuple(probability(layer, num_layers) for layer in range(num_layers))
        for layer, q in enumerate(self.probabilities):
            if not _is_probability(q):
                raise ValueError(
                    f"'{schedule}' gives layer {layer} the probability {q!r}; a probability is from 0 to 1"
                )

    def skipped(self, seed: int, step: int) -> frozenset[int]:
        """Draw the layers, counted from 0, that are skipped at `step`, each with its probability.

        The same seed and step give the same layers. Raises ValueError for a seed or a step below 0.
        """
        if min(seed, step) < 0:
            raise ValueError(f"seed and step from 0 on, given seed {seed} and step {step}")
        drawn = enumerate(self.probabilities)
        return frozenset(layer for layer, q in drawn if q > 0 and draw(seed, step, layer) < q)


def draw(seed: int, step: int, layer: int) -> float:
    """Draw a number in [0, 1) that depends on the three alone: the first of Python's generator with their text as seed.

    Args:
        seed: the seed of the run.
        step: the number of the update.
        layer: the index of the layer, from 0.
    """
    return random.Random(f"{seed} {step} {layer}").random()
