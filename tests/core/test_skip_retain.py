"""Skip-Retain: the schedules against the equations of the paper, the draw against its distribution."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest

import fullrank as fr
from fullrank.config.training import PhaseConfig
from fullrank.core import registry
from fullrank.core.skip_retain import draw

# The paper's equations: of i = 1 .. N, as fractions
Equation = Callable[[int, int, Fraction], Fraction]
EQUATIONS: dict[str, Equation] = {
    "linear": lambda i, n, p: Fraction(1, 2) * Fraction(i - 1, n) if i != n else Fraction(0),
    "uniform": lambda i, n, p: p,
    "not_first": lambda i, n, p: Fraction(0) if i == 1 else p,
    "not_last": lambda i, n, p: Fraction(0) if i == n else p,
    "not_first_or_last": lambda i, n, p: Fraction(0) if i in (1, n) else p,
}


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 12, 15, 16, 31])
def test_schedules_are_the_equations(name: str, num_layers: int) -> None:
    p = Fraction(3, 16)
    given = None if name == "linear" else float(p)
    found = fr.SkipRetain(name, given, num_layers=num_layers).probabilities
    assert len(found) == num_layers
    for i, probability in enumerate(found, start=1):
        assert probability == pytest.approx(float(EQUATIONS[name](i, num_layers, p)), abs=1e-15)


def test_none_never_rests_and_one_always() -> None:
    never = fr.SkipRetain("none", num_layers=3)
    always = fr.SkipRetain("not_last", 1, num_layers=3)
    assert never.probabilities == (0.0, 0.0, 0.0)
    assert always.probabilities == (1.0, 1.0, 0.0)
    for step in range(300):
        assert never.skipped(3, step) == frozenset()
        assert always.skipped(3, step) == {0, 1}


def test_the_draw_follows_its_rule() -> None:
    for numbers in ((0, 1, 0), (7, 3, 11), (2**70, 2**40, 5)):
        assert draw(*numbers) == random.Random(" ".join(map(str, numbers))).random()


@pytest.fixture
def mine() -> object:
    @fr.register("skip", "mine")
    def mine(p: float | None = None) -> Callable[[int, int], float]:
        return lambda layer, layers: (p or 0.5) * (layer % 2) + (layers == 7)

    yield mine
    registry.unregister("skip", "mine")


@pytest.mark.usefixtures("mine")
def test_a_schedule_of_ones_own() -> None:
    assert fr.SkipRetain("mine", num_layers=4).probabilities == (0, 0.5, 0, 0.5)
    assert fr.SkipRetain("mine", 0.25, num_layers=3).probabilities == (0, 0.25, 0)
    assert PhaseConfig(name="first", skip="mine", p=0.25).skip == "mine"
    with pytest.raises(ValueError, match=r"'mine' gives layer 1 the probability 1\.5; a probability is from 0 to 1"):
        fr.SkipRetain("mine", num_layers=7)
