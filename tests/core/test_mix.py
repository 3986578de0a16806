"""Each mixing against its equation, written out as sums over single numbers."""

import math

import pytest
import torch

from fullrank.core.stages import (
    AverageHeads,
    HeadSize,
    PositionIndependentMixing,
    PositionWiseMixing,
    RandomMixing,
    mix_heads,
)

B, H, N, M, D = 2, 3, 4, 5, 6
SIZE = HeadSize(H, D, 7, 32)


@pytest.fixture
def weights():
    return torch.softmax(torch.randn(B, H, N, M, dtype=torch.float64), -1)


@pytest.fixture
def query():
    return torch.randn(B, H, N, D, dtype=torch.float64)


def by_hand(weights, m):
    """P'_i = sum_j m_ji P_j, with m(b, n, j, i)."""
    out = torch.zeros_like(weights)
    for b in range(B):
        for n in range(N):
            for i in range(H):
                for j in range(H):
                    out[b, i, n] += m(b, n, j, i) * weights[b, j, n]
    return out


def test_position_independent_is_equation_12(weights, query):
    mix = PositionIndependentMixing(None, SIZE).double()
    assert torch.equal(mix.mixing, torch.eye(H, dtype=torch.float64))
    assert torch.equal(mix_heads(weights, mix.matrix(query)), weights)
    with torch.no_grad():
        mix.mixing.normal_()  # not symmetric: taking rows for columns would show
    expected = by_hand(weights, lambda b, n, j, i: mix.mixing[j, i])
    assert torch.allclose(mix_heads(weights, mix.matrix(query)), expected, atol=1e-14)
    assert not torch.allclose(by_hand(weights, lambda b, n, j, i: mix.mixing[i, j]), expected, atol=1e-2)
    assert torch.equal(mix.matrix(query), mix.mixing)


def test_position_wise_is_section_3_1(weights, query):
    mix = PositionWiseMixing(None, SIZE).double()
    assert {name: tuple(p.shape) for name, p in mix.named_parameters()} == {"from_query": (D, H), "mixing": (H, H)}
    assert torch.equal(mix.from_query, torch.zeros_like(mix.from_query))
    assert torch.equal(mix_heads(weights, mix.matrix(query)), weights)
    with torch.no_grad():
        mix.from_query.normal_()
        mix.mixing.normal_()

    def m(b, n, j, i):
        """Row j reads the query of head j, the source; W is shared by all heads."""
        return sum(query[b, j, n, d] * mix.from_query[d, i] for d in range(D)) + mix.mixing[j, i]

    assert torch.allclose(mix_heads(weights, mix.matrix(query)), by_hand(weights, m), atol=1e-13)
    matrix = mix.matrix(query)
    assert matrix.shape == (B, N, H, H)
    for b, n, j, i in ((0, 0, 0, 1), (1, 3, 2, 0), (1, 2, 1, 1)):
        assert torch.allclose(matrix[b, n, j, i], m(b, n, j, i), atol=1e-13)
    assert torch.equal(mix.matrix(None), mix.mixing)


def test_random_is_fixed_and_without_parameters(weights, query):
    mix = RandomMixing(None, SIZE).double()
    assert not list(mix.parameters())
    assert set(mix.state_dict()) == {"mixing"}
    assert not mix.mixing.requires_grad
    assert torch.allclose(
        mix_heads(weights, mix.matrix(query)), by_hand(weights, lambda b, n, j, i: mix.mixing[j, i]), atol=1e-14
    )
    mixed = mix_heads(weights.requires_grad_(), mix.matrix(query))
    mixed.sum().backward()
    assert mix.mixing.grad is None
    assert weights.grad is not None
    torch.manual_seed(77)
    other = RandomMixing(None, SIZE).double()
    assert not torch.equal(other.mixing, mix.mixing)
    other.load_state_dict(mix.state_dict())
    assert torch.equal(other.mixing, mix.mixing)


def test_random_entries_are_normal():
    numbers = RandomMixing(None, HeadSize(100, 4, 8, 8)).mixing * 10  # variance 1 / H
    count = numbers.numel()  # 10,000: bounds of five standard errors
    assert abs(float(numbers.mean())) < 5 / math.sqrt(count)
    assert abs(float(numbers.std()) - 1) < 5 / math.sqrt(2 * count)
    inside = float((numbers.abs() < 1).float().mean())
    assert abs(inside - math.erf(1 / math.sqrt(2))) < 5 * math.sqrt(0.2166 / count)


def test_average_gives_every_head_the_mean(weights, query):
    mix = AverageHeads(None, SIZE)
    assert not mix.state_dict()
    assert torch.allclose(mix_heads(weights, mix.matrix(query)), by_hand(weights, lambda b, n, j, i: 1 / H), atol=1e-15)
    assert torch.allclose(mix.matrix(query), torch.full((H, H), 1 / H, dtype=torch.float64))


@pytest.mark.parametrize("kind", [PositionIndependentMixing, PositionWiseMixing])
def test_other_starts_of_learned_mixing(kind):
    """§3.2: M is N(0, 1/H) or 1/H everywhere; W is zero in every case, so that both forms start as one model."""
    size = HeadSize(100, 4, 8, 8)
    uniform = kind(kind.Config(start="uniform"), size)
    assert torch.equal(uniform.mixing, torch.full((100, 100), 1 / 100))
    drawn = kind(kind.Config(start="random"), size)
    numbers = drawn.mixing.detach() * 10
    assert abs(float(numbers.mean())) < 5 / 100  # 10,000 numbers: bounds of five standard errors
    assert abs(float(numbers.square().mean()) - 1) < 5 * math.sqrt(2) / 100
    assert float(numbers.abs().max()) > 3
    for mix in (uniform, drawn):
        assert mix.mixing.requires_grad
        assert all(torch.equal(p, torch.zeros_like(p)) for name, p in mix.named_parameters() if name != "mixing")
