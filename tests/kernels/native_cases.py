"""Calls of weighted attention at odd sizes, computed by the reference and by the C++ kernel."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from computing import native_computes
from torch import Tensor

import fullrank as fr
from fullrank.core.attention import WeightedValues
from fullrank.core.project import Heads
from fullrank.core.stage import HeadSize
from fullrank.kernels.native import attend as native
from moving import moved


@dataclass(frozen=True)
class Case:
    """where: of which kind the layout is; size: by what the queries and keys are multiplied, which makes scores large."""

    queries: int
    keys: int
    heads: int
    dim: int
    score: str = "dot_product"
    normalize: str = "softmax"
    mix: str = "none"
    where: str = "causal"
    texts: int = 2
    size: float = 1.0

    def layout(self) -> fr.Layout:
        queries, keys = self.queries, self.keys
        mask = torch.rand(self.texts, keys, generator=torch.Generator().manual_seed(3)) > 0.3
        match self.where:
            case "causal":
                return fr.Layout.of(queries, keys)
            case "window":
                return fr.Layout.of(queries, keys, window=max(1, keys // 3))
            case "gaps":
                return fr.Layout.of_runs(queries, self.runs())
            case "gaps and window":
                return fr.Layout.of_runs(queries, self.runs(), window=keys // 2 + 3)
            case "cross":
                return fr.Layout.of(queries, keys, causal=False)
            case "left":
                mask = torch.arange(keys)[None] >= torch.arange(self.texts)[:, None] * (keys // 2)
            case "right":
                mask = torch.arange(keys)[None] < keys - torch.arange(self.texts)[:, None] * (keys // 2)
            case "only padding" | "cross, only padding":
                mask[0] = False
        return fr.Layout.of(queries, keys, causal=not self.where.startswith("cross"), key_mask=mask)

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Three pieces; the queries are the end of the last one."""
        before = self.keys - self.queries
        first, second = before // 3, before // 2
        return ((0, first), (first + 4, second), (first + second + 11, self.keys - first - second))


def built(case: Case, dropout: float = 0.0) -> WeightedValues:
    config = fr.AttentionConfig(score=case.score, normalize=case.normalize, mix=case.mix)
    torch.manual_seed(9)
    size = HeadSize(case.heads, case.dim, case.heads * case.dim, max(case.queries, case.keys))
    return moved(WeightedValues(config, size, dropout))


def heads_of(case: Case, attend: WeightedValues, dtype: torch.dtype) -> Heads:
    """As a projection leaves them: heads behind positions in memory."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def heads(length: int, times: float) -> Tensor:
        x = drawn(case.texts, length, case.heads, case.dim) * times
        return x.to(dtype).transpose(1, 2).requires_grad_()

    query, keys, values = heads(case.queries, case.size), heads(case.keys, case.size), heads(case.keys, 1.0)
    relative = None
    if case.score == "relative":
        relative = drawn(case.heads, case.layout().distances, case.dim).to(dtype).requires_grad_()
    return Heads(query=query, scored=query, keys=keys, values=values, relative=relative)


def by_native(attend: WeightedValues, heads: Heads, layout: fr.Layout) -> Tensor:
    """By this kernel and no other."""
    problem = attend.problem(heads, layout, attend.mix.matrix(heads.query))
    assert native_computes(problem)
    return native(problem)


def by_reference(attend: WeightedValues, heads: Heads, layout: fr.Layout) -> Tensor:
    with fr.kernel("reference"):
        return attend(heads, layout)


def given(heads: Heads) -> dict[str, Tensor]:
    """What is differentiated, by name."""
    tensors = {"query": heads.query, "keys": heads.keys, "values": heads.values, "relative": heads.relative}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def found(case: Case, dtype: torch.dtype, kernel: str) -> dict[str, Tensor]:
    """Output and every gradient under a random cotangent, by name."""
    attend, layout = built(case).to(dtype), case.layout()
    heads = heads_of(case, attend, dtype)
    out = (by_native if kernel == "native" else by_reference)(attend, heads, layout)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    inputs = given(heads) | dict(attend.named_parameters())
    gradients = torch.autograd.grad(out, list(inputs.values()), cotangent.to(dtype), allow_unused=True)
    named = {"output": out.detach()} | {f"gradient of {n}": g for n, g in zip(inputs, gradients, strict=True)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def compare(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    """With the reference in fp64, relative to the greatest number of each."""
    expected = found(case, torch.float64, "reference")
    ours = found(case, dtype, "native")
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == dtype
        assert tensor.isfinite().all(), f"{name} is not finite"
        off = float((tensor.double() - expected[name]).abs().max())
        assert off <= tolerance * max(1.0, float(expected[name].abs().max())), f"{case}: {name} is off by {off:.1e}"


def random_case(draw: random.Random) -> Case:
    """One of the calls that this kernel computes."""
    queries, score = draw.randint(1, 90), draw.choice(["dot_product", "relative"])
    places = ["causal", "window", "gaps", "gaps and window"]
    if score == "dot_product":
        places += ["left", "right", "holes", "only padding", "cross", "cross, only padding"]
    where = draw.choice(places)
    keys = draw.randint(1, 90) if where.startswith("cross") else queries + draw.choice([0, draw.randint(1, 90)])
    return Case(
        queries, keys, draw.randint(1, 13), draw.randint(1, 40), score, draw.choice(["softmax", "sigsoftmax"]),
        draw.choice(["none", "position_independent", "position_wise", "random", "average"]), where, draw.randint(1, 3),
        draw.choice([1.0, 1.0, 4.0]),
    )  # fmt: skip


def needs_compiler() -> None:
    from fullrank.kernels.native_build import library

    if library() is None:
        pytest.skip("no C++ compiler, or FULLRANK_NATIVE is 0")
