"""What the paper's Corollary 1 sums to, and that it is not softmax attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fullrank.core.multilinear_reference import causal, sum_over_keys, sum_over_keys_closed, tensor


def given(tokens: int, rank: int, cores: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    made = [torch.randn(2, tokens, rank, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [*made, torch.rand(cores, rank, generator=generator, dtype=torch.float64)]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("cores", [1, 3])
def test_closed_form(masked: bool, cores: int) -> None:
    query, keys, values, g = given(7, 4, cores)
    visible = causal(7, 7) if masked else None
    expected = torch.zeros(2, 7, 7, dtype=torch.float64)
    for i in range(7):
        for m in range(i + 1 if masked else 7):
            for j in range(i + 1 if masked else 7):
                expected[:, i, m] += (g.mean(0) * query[:, i] * keys[:, j] * values[:, m]).sum(-1)
    torch.testing.assert_close(sum_over_keys(query, keys, values, g, visible), expected)
    torch.testing.assert_close(sum_over_keys_closed(query, keys, values, g, visible), expected)
    torch.testing.assert_close(tensor(query, keys, values, g, visible).sum(2), expected)


def softmax_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(query @ keys.transpose(1, 2) / math.sqrt(query.shape[-1]), -1) @ values


def best_residual(tokens: int) -> float:
    """The relative distance of sum_j T from softmax attention, N = d = R, with the core that comes nearest on this input."""
    query, keys, values, _ = given(tokens, tokens)
    each = [sum_over_keys_closed(query, keys, values, torch.eye(tokens).double()[r : r + 1]) for r in range(tokens)]
    columns, wanted = torch.stack(each, -1).flatten(0, 2), softmax_attention(query, keys, values).flatten()
    core = torch.linalg.lstsq(columns, wanted[:, None]).solution
    return ((columns @ core)[:, 0] - wanted).norm().item() / wanted.norm().item()


def test_it_is_not_softmax_attention() -> None:
    """No core makes it so (docs/derivations/multilinear.md gives the figures)."""
    for tokens in (8, 16, 32):
        assert best_residual(tokens) > 0.9


def test_why_not() -> None:
    """One is cubic in its input and sees a shift of all keys; the other is bounded by the values and does not."""
    query, keys, values, g = given(6, 6)
    once, thrice = (sum_over_keys_closed(t * query, t * keys, t * values, g) for t in (1.0, 3.0))
    torch.testing.assert_close(thrice, 27 * once)
    assert softmax_attention(3 * query, 3 * keys, 3 * values).abs().max() <= 3 * values.abs().max()
    shift = torch.randn(6).double()
    torch.testing.assert_close(softmax_attention(query, keys + shift, values), softmax_attention(query, keys, values))
    moved = sum_over_keys_closed(query, keys + shift, values, g) - once
    torch.testing.assert_close(moved, (query * g.mean(0) * 6 * shift) @ values.transpose(1, 2))
    assert moved.abs().max() > 0.1
