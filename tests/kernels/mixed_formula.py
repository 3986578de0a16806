"""Attention with mixed heads as one formula in double precision, and the comparison of the Triton kernels with it."""

from __future__ import annotations

import torch
from computing import triton_computes
from torch import Tensor
from torch.nn import functional as F

import fullrank as fr
from fullrank.core.engine import Problem
from fullrank.kernels.triton_mixed import attend as triton_mixed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = 2e-6 if DEVICE == "cpu" else 5e-6  # of fp32
Given = tuple[Tensor, Tensor, Tensor, Tensor | None]


def drawn(
    batch: int, heads: int, layout: fr.Layout, size: int, mixing: str, dtype: torch.dtype = torch.float32
) -> Given:
    """query, keys, values and M, which need gradients."""
    (queries, keys), generator = layout.shape, torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {"none": None, "A": (heads, heads), "B": (batch, queries, heads, heads)}
    given = [normal(batch, heads, n, size).to(DEVICE, dtype).requires_grad_() for n in (queries, keys, keys)]
    shape = shapes[mixing]
    matrix = None if shape is None else normal(*shape).to(DEVICE, torch.float32).requires_grad_()
    return given[0], given[1], given[2], matrix


def problem(given: Given, layout: fr.Layout, normalize: str = "softmax", p: float = 0.0) -> Problem:
    return Problem(*given, None, layout, 0.3, normalize, p)  # type: ignore[arg-type]


def formula(given: Given, layout: fr.Layout, normalize: str, kept: Tensor | None = None) -> Tensor:
    """All weights at once, in double precision."""
    query, keys, values, mixing = given
    scores = 0.3 * (query @ keys.transpose(-1, -2))
    if normalize == "sigsoftmax":
        scores = scores + F.logsigmoid(scores)
    weights = torch.softmax(scores.masked_fill(~layout.visible().to(DEVICE), -torch.inf), -1)
    if mixing is not None:
        matrix = mixing if mixing.dim() == 4 else mixing.expand(weights.shape[0], weights.shape[2], -1, -1)
        weights = (matrix.permute(0, 2, 3, 1)[..., None] * weights[:, :, None]).sum(1)
    return (weights if kept is None else weights * kept) @ values


def check(
    given: Given, layout: fr.Layout, normalize: str, tolerance: float, p: float = 0.0, kept: Tensor | None = None
) -> None:
    """Output and all gradients under a random cotangent."""
    asked = [tensor for tensor in given if tensor is not None]
    wanted = problem(given, layout, normalize, p)
    assert triton_computes(wanted)
    out = triton_mixed(wanted)
    assert out.dtype == given[2].dtype
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    found = [out, *torch.autograd.grad(out, asked, cotangent)]
    wide = [tensor.detach().double().requires_grad_() for tensor in asked]
    exact = formula((*wide, None)[:4] if len(wide) == 3 else tuple(wide), layout, normalize, kept)  # type: ignore[arg-type]
    expected = [exact, *torch.autograd.grad(exact, wide, cotangent.double())]
    for name, own, right in zip(("output", "query", "keys", "values", "mixing"), found, expected, strict=False):
        assert own.isfinite().all(), name
        off = float((own.double() - right).detach().abs().max() / right.detach().abs().max().clamp(min=1.0))
        assert off <= tolerance, f"{name} is off by {off:.1e} of its largest number or of 1"
