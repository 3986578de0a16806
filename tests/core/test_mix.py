"""The mixings of Mixhead: parameters, matrices and how they start. Their equations: test_mixers.py."""

import math

import pytest
import torch

from fullrank.core.mixers import RandomMixing
from fullrank.core.registry import register, unregister
from fullrank.core.stages import HeadSize, Mixing, PositionIndependentMixing, PositionWiseMixing, build_stage

H, D = 3, 6
SIZE, LARGE = HeadSize(H, D, 7, 32), HeadSize(100, 4, 8, 8)


def test_random_is_fixed_normal_and_without_parameters():
    mix = RandomMixing(None, SIZE)
    torch.manual_seed(77)
    other = RandomMixing(None, SIZE)
    assert not [*mix.parameters()]
    assert set(mix.state_dict()) == {"mixing"}
    assert not mix.mixing.requires_grad
    assert not torch.equal(other.mixing, mix.mixing)
    other.load_state_dict(mix.state_dict())
    assert torch.equal(other.mixing, mix.mixing)
    check_normal(RandomMixing(None, LARGE).mixing)


def check_normal(mixing):
    """N(0, 1/H): 10,000 numbers within five standard errors."""
    numbers = mixing.detach() * 10
    assert abs(float(numbers.mean())) < 5 / 100
    assert abs(float(numbers.square().mean()) - 1) < 5 * math.sqrt(2) / 100
    inside = float((numbers.abs() < 1).float().mean())
    assert abs(inside - math.erf(1 / math.sqrt(2))) < 5 * math.sqrt(0.2166) / 100


@pytest.mark.parametrize("kind", [PositionIndependentMixing, PositionWiseMixing])
def test_other_starts_of_learned_mixing(kind):
    """§3.2: M is N(0, 1/H) or 1/H everywhere; W is zero in every case, so that both forms start as one model."""
    uniform, drawn = (kind(kind.Config(start=start), LARGE) for start in ("uniform", "random"))
    assert torch.equal(uniform.mixing, torch.full((100, 100), 1 / 100))
    check_normal(drawn.mixing)
    for mix in (uniform, drawn):
        assert mix.mixing.requires_grad
        assert all(torch.equal(p, torch.zeros_like(p)) for name, p in mix.named_parameters() if name != "mixing")


def test_a_stage_that_hands_on_no_size_gets_its_own():
    class Bare(Mixing):
        def __init__(self, config, size):
            super().__init__()

    register("mix", "bare")(Bare)
    try:
        assert build_stage("mix", "bare", SIZE).multiply_adds(10) == SIZE.num_heads**2 * 10
    finally:
        unregister("mix", "bare")
