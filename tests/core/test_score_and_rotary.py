"""The dot product against Eq. 9, and what rotary positions promise."""

from __future__ import annotations

import math

import pytest
import torch

import fullrank as fr
from fullrank.core.positions import Rotary
from fullrank.core.score import DotProduct
from fullrank.core.stage import HeadSize


def test_dot_product_is_equation_9() -> None:
    query, keys = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)
    scores = DotProduct(None, HeadSize(3, 5, 99, 8))(query, keys, fr.Layout.of(4, 6))
    for b, h, n, m in ((0, 0, 0, 0), (1, 2, 3, 5), (0, 1, 2, 4)):
        expected = sum(float(query[b, h, n, d] * keys[b, h, m, d]) for d in range(5)) / math.sqrt(
            5
        )  # D, not E or E / H
        assert abs(float(scores[b, h, n, m]) - expected) < 1e-13


def test_rotary_turns_each_pair_by_its_angle() -> None:
    heads, places = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.tensor([0, 3, 4, 100])
    turned = Rotary(6, 10000.0)(heads, places)
    for n, place in enumerate(places.tolist()):
        for i in range(3):
            number = complex(float(heads[1, 2, n, i]), float(heads[1, 2, n, i + 3]))
            angle = place * 10000.0 ** (-2 * i / 6)
            number *= complex(math.cos(angle), math.sin(angle))
            assert abs(number - complex(float(turned[1, 2, n, i]), float(turned[1, 2, n, i + 3]))) < 1e-12
    assert torch.equal(turned[:, :, 0], heads[:, :, 0])


@pytest.mark.parametrize("theta", [10.0, 10000.0])
def test_rotary_scores_depend_on_distance_only(theta: float) -> None:
    rotary = Rotary(8, theta)
    query, key = torch.randn(1, 2, 1, 8, dtype=torch.float64), torch.randn(1, 2, 1, 8, dtype=torch.float64)

    def score(a: int, b: int) -> torch.Tensor:
        return (rotary(query, torch.tensor([a])) * rotary(key, torch.tensor([b]))).sum(-1)

    for distance in (0, 1, 7, 500):
        assert torch.allclose(score(distance, 0), score(1000 + distance, 1000), atol=1e-10)
        assert torch.allclose(score(distance, 0), score(123 + distance, 123), atol=1e-10)
    assert not torch.allclose(score(1, 0), score(2, 0), atol=1e-3)
    assert not torch.allclose(score(1, 0), score(0, 1), atol=1e-3)


def test_rotary_keeps_norms_and_takes_positions_by_row() -> None:
    heads = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 3], [0, 0, 5, 6]])
    turned = Rotary(6, 10000.0)(heads, places)
    assert torch.allclose(turned.norm(dim=-1), heads.norm(dim=-1), atol=1e-13)
    for row in range(2):
        assert torch.equal(turned[row], Rotary(6, 10000.0)(heads[row : row + 1], places[row])[0])


def test_rotary_is_precise_in_low_precision() -> None:
    """Angles are formed in fp32: in bf16 position 1001 would be position 1000."""
    heads = torch.randn(1, 1, 2, 8)
    places = torch.tensor([1000, 1001])
    turned, exact = Rotary(8, 10000.0)(heads.bfloat16(), places), Rotary(8, 10000.0)(heads.double(), places)
    assert turned.dtype == torch.bfloat16
    assert (turned.double() - exact).abs().max() < 0.03


def test_rotary_needs_an_even_head() -> None:
    with pytest.raises(ValueError, match=r"model.head_dim: rotary positions need an even head size, given 5"):
        fr.ModelConfig(position="rotary", head_dim=5)
