"""The CPU kernel for dropout and bf16: it computes what the stages say, and its gradients are the true ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fullrank.core.attention import WeightedValues
from fullrank.core.config import AttentionConfig
from fullrank.core.dropout import dropout, keep_mask
from fullrank.core.layout import Layout
from fullrank.core.project import Heads
from fullrank.core.stage import HeadSize
from fullrank.kernels import kernel
from fullrank.kernels.rows import attend_rows

SHAPES = [(2, 3, 5, 5, 4), (1, 2, 130, 130, 8), (2, 2, 3, 9, 4), (2, 1, 1, 7, 2)]  # B, H, N, M, D


def operands(batch: int, heads: int, queries: int, keys: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """query, keys, values as a projection leaves them (transposed), and a random cotangent."""
    generator = torch.Generator().manual_seed(0)
    lengths = (queries, keys, keys, queries)
    drawn = (torch.randn(batch, length, heads, size, generator=generator, dtype=torch.float64) for length in lengths)
    query, key, value, cotangent = (x.to(dtype).transpose(1, 2) for x in drawn)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), cotangent


def by_definition(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    scores = query @ keys.transpose(-1, -2) * scale
    if visible is not None:
        scores = torch.where(visible, scores, -math.inf)
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_definition(shape: tuple[int, ...], padded: bool) -> None:
    batch, _, queries, keys, _ = shape
    *inputs, cotangent = operands(*shape, torch.float64)
    layout = Layout.of(queries, keys)
    if padded:
        mask = torch.ones(batch, keys, dtype=torch.bool)
        mask[0, : keys // 3] = False
        layout = Layout.of(queries, keys, key_mask=mask)
    visible = None if layout.unrestricted else layout.visible()
    ours = attend_rows(*inputs, visible, 0.3, 0.0, layout.plain_causal and not layout.unrestricted)
    theirs = by_definition(*inputs, visible, 0.3)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    found, expected = (torch.autograd.grad(out, inputs, cotangent) for out in (ours, theirs))
    for name, got, want in zip(("query", "keys", "values"), found, expected, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-12), name


def test_dropout_gradients_are_those_of_the_same_mask() -> None:
    *inputs, cotangent = operands(2, 3, 40, 40, 4, torch.float64)
    visible = Layout.of(40).visible()
    torch.manual_seed(1)
    ours = attend_rows(*inputs, visible, 0.5, 0.3, True)
    torch.manual_seed(1)
    kept = keep_mask(torch.Size((2, 3, 40, 40)), 0.3, inputs[0])  # up to 64 causal rows are one block, and one draw
    assert kept is not None
    scores = torch.where(visible, inputs[0] @ inputs[1].transpose(-1, -2) * 0.5, -math.inf)
    theirs = (scores.softmax(-1) * kept / 0.7) @ inputs[2]
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    found, expected = (torch.autograd.grad(out, inputs, cotangent) for out in (ours, theirs))
    for name, got, want in zip(("query", "keys", "values"), found, expected, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-12), name


def test_bf16_keeps_scores_and_softmax_wide() -> None:
    shape = (2, 2, 130, 130, 16)
    *exact, cotangent = operands(*shape, torch.float64)
    *low, _ = operands(*shape, torch.bfloat16)
    visible = Layout.of(130).visible()
    ours, theirs = attend_rows(*low, visible, 1.0, 0.0, True), by_definition(*exact, visible, 1.0)
    assert ours.dtype == torch.bfloat16
    found = (ours.detach(), *torch.autograd.grad(ours, low, cotangent.to(torch.bfloat16)))
    expected = (theirs.detach(), *torch.autograd.grad(theirs, exact, cotangent))
    limits = {"output": 0.007, "query": 0.02, "keys": 0.02, "values": 0.007}  # 0.008 with scores and softmax in bf16
    for (name, limit), got, want in zip(limits.items(), found, expected, strict=True):
        assert (got.double() - want).norm() / want.norm() < limit, name


def test_second_derivatives_are_refused() -> None:
    *inputs, _ = operands(1, 1, 4, 4, 2, torch.float64)
    out = attend_rows(*inputs, None, 1.0, 0.0, False)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_every_entry_is_dropped_with_probability_p(p: float) -> None:
    torch.manual_seed(0)
    count, masks = 100_001, 20
    dropped = sum(int((dropout(torch.ones(count), p) == 0).sum()) for _ in range(masks))
    tolerance = 5 * math.sqrt(p * (1 - p) * count * masks) + 2**-16 * count * math.sqrt(masks)
    assert abs(dropped - p * count * masks) < tolerance


def test_a_probability_below_the_resolution_of_a_draw_is_kept_on_average() -> None:
    torch.manual_seed(0)
    p, count, masks = 2.0**-18, 2**16, 400
    dropped = sum(int((dropout(torch.ones(count), p) == 0).sum()) for _ in range(masks))
    assert 40 < dropped < 180  # 100 are expected: a quarter of the masks drop about one entry each


def test_entries_of_a_mask_are_unrelated() -> None:
    torch.manual_seed(0)
    dropped = 1 - keep_mask(torch.Size((400_000,)), 0.25, torch.empty(0))
    for lag in (1, 2, 3, 4, 8, 624):
        together = (dropped[lag:] * dropped[:-lag]).mean().item()
        assert abs(together - dropped.mean().item() ** 2) < 5 * 0.25 / math.sqrt(400_000), lag


def test_a_mask_is_a_function_of_the_seed_and_advances_it() -> None:
    torch.manual_seed(3)
    first, second = dropout(torch.ones(99), 0.5), dropout(torch.ones(99), 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(torch.ones(99), 0.5), first)
    assert not torch.equal(first, second)


def test_certain_and_impossible_dropout() -> None:
    assert dropout(torch.ones(9), 1.0).tolist() == [0.0] * 9
    assert dropout(torch.ones(9), 0.0).tolist() == [1.0] * 9


@pytest.mark.parametrize(
    "layout",
    [Layout.of(9, 14, window=4), Layout.of_runs(9, ((0, 3), (20, 11))), Layout.of_runs(5, ((0, 6), (9, 9)), window=8)],
    ids=["window", "gap", "gap and window"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_dropout_with_memory_drops_what_the_reference_drops(layout: Layout, dtype: torch.dtype) -> None:
    """The kernel's one draw is the reference's, so that output and gradients are the same numbers."""
    attend = WeightedValues(AttentionConfig(), HeadSize(2, 4, 8, 16), 0.3).train()
    *inputs, cotangent = operands(2, 2, *layout.shape, 4, dtype)
    found = {}
    for name in ("sdpa", "reference"):
        torch.manual_seed(1)
        with kernel(name):
            out = attend(Heads(None, *inputs), layout)
        found[name] = [out.detach(), *torch.autograd.grad(out, inputs, cotangent)]
    assert float((found["reference"][0] == 0).double().mean()) < 0.5
    for got, want in zip(found["sdpa"], found["reference"], strict=True):
        tolerance = 1e-12 if dtype == torch.float64 else 0.04 * float(want.abs().max())
        assert float((got - want).abs().max()) <= tolerance
