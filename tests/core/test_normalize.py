"""Softmax and sigsoftmax against Eq. 9 and Eq. 21."""

import math

import pytest
import torch

from fullrank.core.stages import HeadSize, SigSoftmax

SIZE = HeadSize(2, 3, 6, 8)


def sigsoftmax_by_hand(row):
    """exp(a) sigmoid(a) / sum exp(a) sigmoid(a), as it stands in Eq. 21."""
    terms = [math.exp(a) / (1 + math.exp(-a)) for a in row]
    return [term / sum(terms) for term in terms]


ROWS = [[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [30.0, 29.0, 31.5], [-30.0, -29.0, -31.5], [-3.0, 5.0, 0.1], [7.0]]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_sigsoftmax_is_equation_21(row):
    weights = SigSoftmax(None, SIZE)(torch.tensor([[[row]]], dtype=torch.float64))
    assert torch.allclose(weights[0, 0, 0], torch.tensor(sigsoftmax_by_hand(row), dtype=torch.float64), atol=1e-14)


def test_values_and_gradients_at_ten_thousand():
    """Around -1e4 sigsoftmax is softmax(2a): the gap of 1 becomes 2; around 1e4 it stays 1."""
    for centre, gap in ((-1e4, 2.0), (1e4, 1.0)):
        scores = torch.tensor([centre, centre + 1], requires_grad=True)
        weights = SigSoftmax(None, SIZE)(scores)
        low = 1 / (1 + math.exp(gap))
        assert torch.allclose(weights, torch.tensor([low, 1 - low]), atol=1e-3)
        weights[1].backward()
        assert torch.allclose(scores.grad, torch.tensor([-1.0, 1.0]) * gap * low * (1 - low), atol=1e-3)
