"""Dropout of mixed weights in the Triton kernels: the same mask in every kernel, with the distribution it should have."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from mixed_formula import DEVICE, EXACT, check, drawn, problem
from torch import Tensor

import fullrank as fr
from fullrank.kernels.triton_mixed import attend as triton_mixed

if sys.platform != "linux":
    pytest.importorskip("triton", reason="Triton is for Linux")

L = fr.Layout.of


def shown_mask(batch: int, heads: int, layout: fr.Layout, size: int, mixing: str, p: float) -> Tensor:
    """What dropout multiplies mixed weights by, read off values that are one-hot; keys at most as many as a head is large."""
    query, keys, values, matrix = drawn(batch, heads, layout, size, mixing)
    one_hot = torch.eye(size, device=DEVICE)[: layout.shape[1]].expand_as(values)
    matrix = None if matrix is None else matrix.detach().abs() + 0.1
    given = (torch.zeros_like(query), keys, one_hot, matrix)
    whole, dropped = (triton_mixed(problem(given, layout, p=some)) for some in (0.0, p))
    seen = layout.visible().to(DEVICE).expand(batch, heads, -1, -1)
    ratio = (dropped / whole.where(whole != 0, 1))[..., : layout.shape[1]]
    return torch.where(seen, ratio, torch.ones_like(ratio))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU chooses its groups itself")
def test_groups_of_heads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of four, for which dropout draws once, and groups with a rest."""
    from fullrank.kernels import triton_blocks

    given = drawn(1, 8, L(5), 16, "B")

    def once() -> list[Tensor]:
        torch.manual_seed(5)
        out = triton_mixed(problem(given, L(5), p=0.4))
        return [out, *torch.autograd.grad(out.square().sum(), [x for x in given if x is not None])]

    expected = once()
    monkeypatch.setattr(triton_blocks, "INTERPRETED", {**triton_blocks.INTERPRETED, "G": 5, "GJ": 8})
    for own, right in zip(once(), expected, strict=True):
        assert (own - right).abs().max() < 1e-5


@pytest.mark.parametrize("mixing", ["none", "B"])
def test_backward_drops_what_forward_dropped(mixing: str) -> None:
    """Five heads: two draws of four, and several groups of heads."""
    layout, p = L(9, 17), 0.4
    torch.manual_seed(11)
    torch.rand(())
    state = torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state()
    kept = shown_mask(1, 5, layout, 20, mixing, p).double()
    assert (kept.isclose(torch.tensor(1 / (1 - p), dtype=kept.dtype)) | (kept == 0) | (kept == 1)).all()
    assert (kept == 0).any()
    torch.set_rng_state(state) if DEVICE == "cpu" else torch.cuda.set_rng_state(state)
    check(drawn(1, 5, layout, 20, mixing), layout, "softmax", EXACT, p, kept)


def test_dropout_has_its_distribution() -> None:
    """Share of dropped weights, and no connection between heads, texts, queries or keys."""
    p, layout = 0.3, L(32, 64, causal=False)
    kept = (shown_mask(2, 5, layout, 64, "A", p) > 0).double()
    deviation = math.sqrt(p * (1 - p))
    assert abs(float(kept.mean()) - (1 - p)) < 5 * deviation / math.sqrt(kept.numel())
    centred = (kept - (1 - p)) / deviation
    for head in range(1, 5):
        together = float((centred[:, 0] * centred[:, head]).mean())
        assert abs(together) < 5 / math.sqrt(2 * 32 * 64), head
    for dim in (0, 2, 3):
        together = float((centred * centred.roll(1, dim)).mean())
        assert abs(together) < 5 / math.sqrt(centred.numel() / 2), dim


def test_an_output_without_dropout_is_the_mean() -> None:
    """1 / (1 - p) makes up for what is dropped: with values of one and weights of one an output is 1 on average."""
    layout, p = L(16, 64, causal=False), 0.25
    query, keys, values, _ = (x if x is None else torch.zeros_like(x) for x in drawn(4, 4, layout, 16, "none"))
    out = triton_mixed(problem((query, keys, values + 1, None), layout, p=p))[..., 0]  # type: ignore[operator,arg-type]
    variance = p / (1 - p) / 64
    assert abs(float(out.mean()) - 1) < 5 * math.sqrt(variance / out.numel())
    assert abs(float(out.var()) - variance) < 5 * variance * math.sqrt(2 / out.numel())
