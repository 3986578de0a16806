"""The kernel of query blocks against the equation, however it is cut: outputs, gradients, dropout, precision, memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise as neighbours
from typing import Any

import pytest
import torch
from calls import LAYOUTS, call, check, equation, relative_can
from torch import Tensor

import fullrank as fr
from fullrank.core.engine import Problem
from fullrank.kernels import blocks
from fullrank.kernels.blocks import Block, attend, descending, pieces, plan, scores_of
from fullrank.kernels.problem import declines, differentiable
from pairs import covering, product

CUTS = {  # scores of a block, its rows at least
    "as on this machine": None,
    "many blocks": (1, 3),
    "two sequences at once": (2 * 3 * 4 * 13, 4),
    "one row": (1, 1),
}


def cut(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int] | None) -> None:
    if limits is not None:
        monkeypatch.setitem(blocks._SCORES, "cpu", limits[0])
        monkeypatch.setattr(blocks, "_LEAST_ROWS", limits[1])


CASES = covering(
    row
    for row in product(
        layout=LAYOUTS,
        relative=[False, True],
        mixing=["none", "A", "B"],
        normalize=["softmax", "sigsoftmax"],
        cuts=CUTS,
    )
    if relative_can(LAYOUTS[row["layout"]]) or not row["relative"]
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_equals_the_equation(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, CUTS[case["cuts"]])
    problem = call(
        LAYOUTS[case["layout"]], case["mixing"], relative=case["relative"], normalize=case["normalize"], batch=2
    )
    assert declines(problem) is None
    check(problem, attend(problem), 1e-12)
    with torch.no_grad():
        assert torch.allclose(attend(problem), equation(problem), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "mixing"),
    [
        (fr.Layout.of(150, 211), "B"),
        (fr.Layout.of_runs(150, ((0, 41), (60, 30), (100, 161))), "A"),
        (fr.Layout.of_runs(201, ((0, 333),), window=77), "none"),
    ],
    ids=["past", "gaps", "window"],
)
def test_sizes_at_which_there_are_blocks(layout: fr.Layout, mixing: str) -> None:
    problem = call(layout, mixing, relative=True)
    assert len({block.rows.start for block in plan(problem)}) > 1
    check(problem, attend(problem), 1e-12)


def test_blocks_leave_out_what_no_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, (1, 60))
    causal = plan(call(fr.Layout.of(300, 400), batch=1))
    assert [block.keys.stop for block in causal] == [100 + block.rows.stop for block in causal]
    windowed = plan(call(fr.Layout.of(300, 400, window=50), batch=1))
    assert [block.keys.start for block in windowed] == [51 + block.rows.start for block in windowed]
    assert windowed[-1].rows.stop == 300
    assert all(a.rows.stop == b.rows.start for a, b in neighbours(windowed))


# -- the shift --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["past", "gaps and window"])
def test_scores_of_bf16_are_sums_in_fp32(name: str) -> None:
    problem = call(LAYOUTS[name], relative=True, dtype=torch.bfloat16)
    assert problem.distances is not None
    every = slice(None)
    queries, keys = problem.layout.shape
    parts = pieces(problem.layout, 0, queries)
    block = Block(every, slice(0, queries), slice(parts[0].keys.start, keys), parts)
    far = replace(problem.distances, keys=descending(problem.distances.keys, [block]))
    part = replace(problem, keys=problem.keys[:, :, block.keys], distances=far)
    assert scores_of(part, block).dtype == torch.float32


# -- dropout ----------------------------------------------------------------------------------------------------------


def mask(problem: Problem, seed: int) -> Tensor:
    """The weights that dropout keeps under this seed, read off one-hot values."""
    batch, heads, keys, _ = problem.keys.shape
    one_hot = torch.eye(keys, problem.keys.shape[-1], dtype=torch.float64).expand(batch, heads, keys, -1)
    torch.manual_seed(seed)
    with torch.no_grad():
        return (attend(replace(problem, values=one_hot))[..., :keys] != 0).double()


@pytest.mark.parametrize(
    ("name", "mixing", "relative", "cuts"),
    [
        ("causal", "A", True, "many blocks"),
        ("padding", "B", False, "two sequences at once"),
        ("gaps and window", "B", True, "many blocks"),
        ("cross, more queries", "none", False, "two sequences at once"),
        ("one query", "A", False, "as on this machine"),
    ],
)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(
    name: str, mixing: str, relative: bool, cuts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, CUTS[cuts])
    layout = LAYOUTS[name]
    problem = call(layout, mixing, relative=relative, p=0.4, size=17)
    kept = mask(problem, 3)
    seen = layout.visible().expand(kept.shape)
    assert 0.4 < float(kept[seen].mean()) < 0.8
    torch.manual_seed(3)
    check(problem, attend(problem), 1e-12, kept)


# -- precision, memory, limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "mixing", "relative"),
    [
        (torch.bfloat16, "none", True),
        (torch.bfloat16, "A", False),
        (torch.float16, "B", False),
        (torch.float16, "A", True),
    ],
)
def test_low_precision(dtype: torch.dtype, mixing: str, relative: bool) -> None:
    """Products in the dtype of the heads, all else in fp32: errors stay those of one rounding or a few."""
    problem = call(fr.Layout.of(130), mixing, relative=relative, dtype=dtype)
    out = attend(problem)
    assert out.dtype == dtype
    check(problem, out, 0.02 if dtype == torch.bfloat16 else 0.003, relative_norm=True)


@pytest.mark.parametrize("mixing", ["none", "B"])
def test_nothing_as_large_as_the_weights_is_kept(mixing: str) -> None:
    problem, kept = call(fr.Layout.of(200), mixing, relative=True, p=0.1), list[int]()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(problem)
    assert 0 < sum(kept) <= sum(x.numel() for x in differentiable(problem))
    assert max(kept) < 200 * 200
    torch.autograd.grad(out.sum(), differentiable(problem))
