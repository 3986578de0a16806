"""Dropout in the C++ kernel: the mask is drawn by a hash, again in the backward pass, and is as random as it must be."""

from dataclasses import replace

import pytest
import torch
from calls import call, check, needs_compiler, weights

import fullrank as fr
from fullrank.core.engine import Problem
from fullrank.kernels.native import attend


@pytest.fixture(autouse=True)
def _compiled():
    needs_compiler()


def masks(p, seed, *, batch=2, heads=3, queries=24, keys=150):
    """(B, H, N, M), 1 / (1 - p) where a weight is kept: scores are all 0, and the values of each key are one-hot."""
    zeros = torch.zeros(batch, heads, queries, keys)
    values = torch.eye(keys).expand(batch, heads, keys, keys)
    layout = fr.Layout.of(queries, keys, causal=False)
    torch.manual_seed(seed)
    return attend(Problem(zeros, torch.zeros_like(values), values, None, None, layout, 1.0, "softmax", p)) * keys


@pytest.mark.parametrize(
    ("queries", "keys", "relative", "normalize", "mixing"),
    [
        (20, 70, False, "softmax", "none"),
        (20, 70, True, "sigsoftmax", "A"),
        (20, 70, False, "softmax", "B"),
        (70, 81, True, "sigsoftmax", "none"),
        (70, 81, False, "softmax", "A"),
        (70, 81, True, "sigsoftmax", "B"),
        (70, 81, False, "softmax", "B, B scores, keys"),
        (70, 70, False, "sigsoftmax", "A, convolution"),
    ],
)
def test_forward_and_backward_have_one_mask(queries, keys, relative, normalize, mixing):
    """The mask comes from the output with one-hot values; gradients are those of the equation with that mask."""
    layout = fr.Layout.of(queries, keys)
    drawn = call(layout, mixing, relative=relative, normalize=normalize, size=keys, p=0.4)
    onehot = torch.eye(keys, dtype=torch.float64).expand(2, 3, keys, keys).clone().requires_grad_()
    problem = replace(drawn, values=onehot)
    torch.manual_seed(3)
    mask = (attend(problem) / weights(problem)).detach().nan_to_num(0.0)
    seen = layout.visible().expand_as(mask)
    kept_weights = seen & (mask != 0)
    assert torch.allclose(mask[kept_weights], torch.tensor(1 / 0.6, dtype=torch.float64), rtol=1e-6)
    assert 0.55 < kept_weights.sum() / seen.sum() < 0.65
    torch.manual_seed(3)
    check(problem, attend(problem), 1e-11, kept_weights.double())


def test_a_seed_decides_and_nothing_repeats():
    """Between seeds, texts, heads, rows and keys, next to each other: correlations as small as chance makes them."""
    first, second = masks(0.5, 4), masks(0.5, 5)
    assert torch.equal(masks(0.5, 4), first)
    pairs = {
        "seeds": (first, second),
        "texts": (first[0], first[1]),
        "heads": (first[:, 0], first[:, 1]),
        "rows": (first[:, :, 1:], first[:, :, :-1]),
        "keys": (first[..., 1:], first[..., :-1]),
        "rows, shifted": (first[:, :, 1:, 1:], first[:, :, :-1, :-1]),
        "heads, shifted": (first[:, 1:, :, 1:], first[:, :-1, :, :-1]),
        "rows and seeds": (first[:, :, 1:], second[:, :, :-1]),
    }
    for name, (mask, neighbour) in pairs.items():
        both = torch.stack((mask.flatten(), neighbour.flatten()))
        assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / mask.numel() ** 0.5, name
