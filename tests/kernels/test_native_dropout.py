"""Dropout in the C++ kernel: the mask is drawn by a hash, again in the backward pass, and is as random as it must be."""

from __future__ import annotations

import pytest
import torch
from native_cases import Case, built, by_native, heads_of, needs_compiler
from torch import Tensor

import fullrank as fr
from fullrank.core.project import Heads

A, B = "position_independent", "position_wise"


@pytest.fixture(autouse=True)
def _compiled() -> None:
    needs_compiler()


def masks(p: float, seed: int, *, texts: int = 2, heads: int = 3, queries: int = 24, keys: int = 150) -> Tensor:
    """(B, H, N, M), 1 / (1 - p) where a weight is kept: scores are all 0, and the values of each key are one-hot."""
    attend = built(Case(queries, keys, heads, keys), dropout=p).train()
    zero = torch.zeros(texts, heads, queries, keys)
    values = torch.eye(keys).expand(texts, heads, keys, keys)
    torch.manual_seed(seed)
    out = by_native(
        attend, Heads(zero, zero, torch.zeros_like(values), values), fr.Layout.of(queries, keys, causal=False)
    )
    return out * keys


@pytest.mark.parametrize("mix", ["none", A, B])
@pytest.mark.parametrize(("score", "normalize"), [("dot_product", "softmax"), ("relative", "sigsoftmax")])
@pytest.mark.parametrize(("queries", "keys"), [(20, 70), (70, 81)])
def test_forward_and_backward_have_one_mask(score: str, normalize: str, mix: str, queries: int, keys: int) -> None:
    """The mask comes from the output with one-hot values; gradients are autograd's of the equation with that mask."""
    case = Case(queries, keys, 3, keys, score, normalize, mix)
    attend = built(case, dropout=0.4).double().train()
    layout, drawn = case.layout(), heads_of(case, attend, torch.float64)
    onehot = torch.eye(keys, dtype=torch.float64).expand(2, 3, keys, keys).clone().requires_grad_()
    heads = Heads(drawn.query, drawn.scored, drawn.keys, onehot, drawn.relative)
    out = by_native(attend, heads, layout)

    scores = attend.scores(heads, layout).masked_fill(~layout.visible(), -torch.inf)
    mixed = attend.mix(attend.normalize(scores), heads.query)
    mask = (out.detach() / mixed.detach()).nan_to_num(0.0)
    kept = layout.visible().expand_as(mask) & (mask != 0)
    assert torch.allclose(mask[kept], torch.tensor(1 / 0.6, dtype=torch.float64), rtol=1e-6)
    assert 0.55 < kept.sum() / layout.visible().expand_as(mask).sum() < 0.65

    inputs = [t for t in (drawn.query, drawn.keys, onehot, drawn.relative) if t is not None] + [*attend.parameters()]
    cotangent = torch.randn(out.shape, dtype=torch.float64)
    ours = torch.autograd.grad(out, inputs, cotangent)
    expected = torch.autograd.grad((mixed * kept / 0.6) @ onehot, inputs, cotangent)
    for number, (given, wanted) in enumerate(zip(ours, expected, strict=True)):
        off = float((given - wanted).abs().max())
        assert off <= 1e-11 * max(1.0, float(wanted.abs().max())), f"input {number} is off by {off:.1e}"


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_share_and_scale(p: float) -> None:
    mask = masks(p, 4)
    assert torch.allclose(mask[mask != 0], torch.tensor(1 / (1 - p)), rtol=1e-4)
    spread = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(float((mask == 0).double().mean()) - p) < 4 * spread


def test_everything_dropped() -> None:
    assert not masks(1 - 1e-12, 4).any()


def test_draws_nothing_without_dropout() -> None:
    case = Case(20, 20, 2, 5)
    attend = built(case).train()
    heads = heads_of(case, attend, torch.float32)
    state = torch.get_rng_state()
    by_native(attend, heads, case.layout())
    assert torch.equal(torch.get_rng_state(), state)
    dropping = built(case, dropout=0.5).eval()
    torch.set_rng_state(state)
    by_native(dropping, heads, case.layout())
    assert torch.equal(torch.get_rng_state(), state)


def test_comes_from_torchs_seed() -> None:
    assert torch.equal(masks(0.5, 4), masks(0.5, 4))
    assert not torch.equal(masks(0.5, 4), masks(0.5, 5))


def _correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])


def test_nothing_repeats() -> None:
    """Between calls, texts, heads, rows and keys, next to each other: correlations as small as chance makes them."""
    first, second = masks(0.5, 4), masks(0.5, 5)
    pairs = {
        "calls": (first, second),
        "texts": (first[0], first[1]),
        "heads": (first[:, 0], first[:, 1]),
        "rows": (first[:, :, 1:], first[:, :, :-1]),
        "keys": (first[..., 1:], first[..., :-1]),
        "rows, shifted": (first[:, :, 1:, 1:], first[:, :, :-1, :-1]),
        "heads, shifted": (first[:, 1:, :, 1:], first[:, :-1, :, :-1]),
        "rows and calls": (first[:, :, 1:], second[:, :, :-1]),
    }
    for name, (one, other) in pairs.items():
        assert abs(_correlation(one, other)) < 5 / one.numel() ** 0.5, name


def test_counts_are_binomial() -> None:
    """How many weights are dropped along each axis: the sum of squared deviations is a chi-square."""
    for seed in (1, 2, 3):
        dropped = (masks(0.25, seed, texts=3, heads=5, queries=40, keys=96) == 0).double()
        for axes in [(3,), (2,), (1,), (0,), (2, 3), (0, 1), (1, 2)]:
            counts = dropped.sum(axes)
            trials, cells = dropped.numel() / counts.numel(), counts.numel()
            statistic = float(((counts - 0.25 * trials) ** 2 / (trials * 0.25 * 0.75)).sum())
            assert abs(statistic - cells) < 5 * (2 * cells) ** 0.5, f"axes {axes}: {statistic:.0f} of {cells}"
