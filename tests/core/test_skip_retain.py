"""Skip-Retain: the schedules against the equations of the paper, the draw against its distribution."""

import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.config.run import PhaseConfig
from fullrank.core import registry
from fullrank.core.skip_retain import draw

EQUATIONS = {
    "linear": lambda i, n, p: Fraction(1, 2) * Fraction(i - 1, n) if i != n else Fraction(0),
    "uniform": lambda i, n, p: p,
    "not_first": lambda i, n, p: Fraction(0) if i == 1 else p,
    "not_last": lambda i, n, p: Fraction(0) if i == n else p,
    "not_first_or_last": lambda i, n, p: Fraction(0) if i in (1, n) else p,
}


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 12, 15, 16, 31])
def test_schedules_are_the_equations(name, num_layers):
    p = Fraction(3, 16)
    requested = None if name == "linear" else float(p)
    probabilities = fr.SkipRetain(name, requested, num_layers=num_layers).probabilities
    assert len(probabilities) == num_layers
    for i, probability in enumerate(probabilities, start=1):
        assert probability == pytest.approx(float(EQUATIONS[name](i, num_layers, p)), abs=1e-15)


def test_the_draw_depends_on_nothing_else():
    """Neither on the generators of Python, numpy and torch, nor on what was asked before, nor on the other layers."""
    policy = fr.SkipRetain("uniform", 0.5, num_layers=6)
    expected = [policy.skipped(7, step) for step in range(40)]
    np.random.seed(5)
    torch.manual_seed(5)
    random.seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    backwards = [policy.skipped(7, step) for step in reversed(range(40))]
    assert backwards[::-1] == expected
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    deeper = fr.SkipRetain("not_first", 0.5, num_layers=7)
    for step, before in enumerate(expected):
        assert policy.skipped(7, step) == before
        assert deeper.skipped(7, step) & {*range(1, 6)} == before & {*range(1, 6)}


def _draws(policy, seed, steps):
    """(steps, layers), 1 where a layer rests."""
    layers = len(policy.probabilities)
    resting = np.zeros((len(steps), layers))
    for row, step in zip(resting, steps, strict=True):
        row[list(policy.skipped(seed, step))] = 1
    return resting


def test_layers_rest_as_often_as_they_should():
    """Counts of a layer over n steps are binomial: within 4 standard deviations n p (1 - p), and as spread as they should."""
    policy = fr.SkipRetain("linear", num_layers=15)
    p = np.array(policy.probabilities)
    steps = 2000
    scores = []
    for seed in (1, 2):
        counts = _draws(policy, seed, range(1, steps + 1)).sum(0)
        assert counts[0] == counts[-1] == 0
        inner = slice(1, -1)
        z = (counts[inner] - steps * p[inner]) / np.sqrt(steps * p[inner] * (1 - p[inner]))
        assert np.abs(z).max() < 4  # 26 standard normals: P = 0.0016
        scores.append(z)
    # sum of 26 squares: chi-squared, mean 26, standard deviation sqrt(52); also not suspiciously even
    assert abs((np.concatenate(scores) ** 2).sum() - 26) < 4 * math.sqrt(52)


def test_the_draw_follows_its_rule():
    for numbers in ((0, 1, 0), (7, 3, 11), (2**70, 2**40, 5)):
        assert draw(*numbers) == random.Random(" ".join(map(str, numbers))).random()


@pytest.fixture
def odd():
    @fr.register("skip", "odd")
    def odd(p: float | None = None) -> Callable[[int, int], float]:
        return lambda layer, layers: (p or 0.5) * (layer % 2) + (layers == 7)

    yield odd
    registry.unregister("skip", "odd")


@pytest.mark.usefixtures("odd")
def test_a_schedule_of_ones_own():
    assert fr.SkipRetain("odd", num_layers=4).probabilities == (0, 0.5, 0, 0.5)
    assert fr.SkipRetain("odd", 0.25, num_layers=3).probabilities == (0, 0.25, 0)
    assert PhaseConfig(name="first", skip="odd", p=0.25).skip == "odd"
    with pytest.raises(ValueError, match=r"'odd' gives layer 1 the probability 1\.5; a probability is from 0 to 1"):
        fr.SkipRetain("odd", num_layers=7)
