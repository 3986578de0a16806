"""The kernel of query blocks against the definition, however it is cut: outputs, gradients, dropout, precision, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from computing import blocks_compute
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fullrank as fr
from fullrank.core.engine import Distances, Problem
from fullrank.kernels import block_plan
from fullrank.kernels.block_plan import Limits, plan
from fullrank.kernels.problem import differentiable, fits
from fullrank.kernels.query_blocks import attend as query_blocks

H, D = 3, 16
PADDED = torch.ones(3, 13, dtype=torch.bool)
PADDED[0, :4] = False
PADDED[1, 9:] = False
PADDED[2] = False
LAYOUTS = {
    "causal": fr.Layout.of(13),
    "past": fr.Layout.of(9, 13),
    "one query": fr.Layout.of(1, 13),
    "padding": fr.Layout.of(13, key_mask=PADDED),
    "past and padding": fr.Layout.of(7, 13, key_mask=PADDED),
    "window": fr.Layout.of(11, 13, window=4),
    "window and padding": fr.Layout.of(11, 13, key_mask=PADDED, window=6),
    "gaps and window": fr.Layout.of_runs(9, ((0, 2), (4, 1), (6, 10)), window=7),
    "cross": fr.Layout.of(7, 13, causal=False),
    "cross, more queries": fr.Layout.of(15, 4, causal=False),
    "cross and padding": fr.Layout.of(7, 13, causal=False, key_mask=PADDED),
    "one query, cross and padding": fr.Layout.of(1, 13, causal=False, key_mask=PADDED),
}
CUTS = {
    "as on this machine": None,
    "many blocks": Limits(1, 3, 3),
    "two texts at once": Limits(H * 4 * 13 * 2, 4, 4),
    "all texts at once": Limits(10**6, 5, 5),
    "one row": Limits(1, 1, 1),
}


def cut(monkeypatch: pytest.MonkeyPatch, forward: Limits | None, backward: Limits | None) -> None:
    for limits, given in ((block_plan._FORWARD, forward), (block_plan._BACKWARD, backward)):
        if given is not None:
            monkeypatch.setitem(limits, "cpu", given)


def call(
    layout: fr.Layout, mixing: str, *, relative: bool = False, sigsoftmax: bool = False, p: float = 0.0, batch: int = 3,
    dtype: torch.dtype = torch.float64,
) -> Problem:  # fmt: skip
    (queries, keys), generator = layout.shape, torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    matrix = {"none": None, "shared": (H, H), "by query": (batch, queries, H, H)}[mixing]
    # as a projection leaves them: heads behind positions
    query, key, value = (drawn(batch, length, H, D).transpose(1, 2) for length in (queries, keys, keys))
    far = Distances(drawn(H, layout.distances, D), drawn(H, D), drawn(H, D)) if relative else None
    return Problem(query, key, value, None if matrix is None else drawn(*matrix), far, layout, 0.3,
                    "sigsoftmax" if sigsoftmax else "softmax", p)  # fmt: skip


def definition(given: Problem, kept: Tensor | None = None) -> Tensor:
    """As the equations read; kept: what dropout leaves, (B, H, N, M)."""
    layout, query = given.layout, given.query
    if given.distances is None:
        scores = query @ given.keys.transpose(2, 3)
    else:
        far = given.distances
        rows = layout.distance_rows(layout.query_positions[:, None] - layout.key_positions)  # (N, M)
        by_distance = (query + far.v[:, None]) @ far.keys.transpose(1, 2)
        scores = (query + far.u[:, None]) @ given.keys.transpose(2, 3)
        scores = scores + by_distance.gather(-1, rows.expand(scores.shape))
    scores = given.scale * scores
    if given.normalize == "sigsoftmax":
        scores = scores + scores.sigmoid().log()
    weights = torch.where(layout.visible(), scores, -math.inf).softmax(-1)
    if given.mixing is not None:
        matrix = given.mixing.expand(*weights.shape[0::2], H, H)  # (B, N, H, H)
        weights = torch.einsum("bjnm,bnji->binm", weights, matrix)
    if kept is not None:
        weights = weights * kept / (1 - given.dropout)
    return weights @ given.values


def check(given: Problem, out: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Output and all gradients."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(out.dtype)
    inputs = differentiable(given)
    found, wanted = ((x, *torch.autograd.grad(x, inputs, cotangent)) for x in (out, expected))
    for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert got.shape == want.shape
        off, scale = float((got - want).detach().abs().max()), max(1.0, float(want.detach().abs().max()))
        assert off <= tolerance * scale, f"{'output' if place == 0 else f'gradient {place - 1}'} is off by {off:.1e}"


def causal_runs(layout: fr.Layout) -> bool:
    return layout.causal and layout.runs is not None


@pytest.mark.parametrize("mixing", ["none", "shared", "by query"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("cuts", CUTS)
def test_however_it_is_cut(cuts: str, name: str, mixing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layout and mixing, forward and backward cut alike and differently; both scores and normalisers."""
    layout = LAYOUTS[name]
    cut(monkeypatch, CUTS[cuts], CUTS["two texts at once"] if cuts == "many blocks" else CUTS[cuts])
    for relative in (False, True)[: 1 + causal_runs(layout)]:
        for sigsoftmax in (False, True):
            given = call(layout, mixing, relative=relative, sigsoftmax=sigsoftmax)
            assert blocks_compute(given)
            check(given, query_blocks(given), definition(given))
            with torch.no_grad():
                assert torch.allclose(query_blocks(given), definition(given), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mixing", ["none", "shared", "by query"])
def test_sizes_at_which_there_are_blocks(mixing: str) -> None:
    given = call(fr.Layout.of(150, 211), mixing, relative=mixing == "none", batch=2)
    assert len(plan(given, backward=False).blocks) > 1
    assert len(plan(given, backward=True).blocks) > 1
    check(given, query_blocks(given), definition(given))


@pytest.mark.parametrize("cuts", ["many blocks", "two texts at once", "all texts at once"])
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_texts_that_share_a_mask(causal: bool, queries: int, cuts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, CUTS[cuts], CUTS[cuts])
    given = call(fr.Layout.of(queries, 13, causal=causal, key_mask=PADDED[:1]), "shared")
    assert fits(given)
    check(given, query_blocks(given), definition(given))


def test_wherever_tensors_are_made_by_default() -> None:
    given, found = call(LAYOUTS["window and padding"], "shared", p=0.4), []
    for default in ("cpu", "meta"):
        torch.manual_seed(4)
        with torch.device(default):
            out = query_blocks(given)
        found.append((out, *torch.autograd.grad(out.sum(), differentiable(given))))
    assert all(map(torch.equal, *found))


def test_several_texts_are_one_block_where_they_are_short() -> None:
    assert len(plan(call(fr.Layout.of(8), "none", batch=40), backward=True).texts) == 1
    assert len(plan(call(fr.Layout.of(600), "none", batch=4), backward=True).texts) == 4


def test_blocks_leave_out_what_no_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, Limits(1, 60, 60), None)
    blocks = plan(call(fr.Layout.of(300, 400), "none"), backward=False).blocks
    assert [block.keys.stop for block in blocks] == [100 + block.rows.stop for block in blocks]
    blocks = plan(call(fr.Layout.of(300, 400, window=50), "none"), backward=False).blocks
    assert [block.keys.start for block in blocks] == [51 + block.rows.start for block in blocks]
    assert blocks[-1].rows.stop == 300
    assert all(a.rows.stop == b.rows.start for a, b in pairwise(blocks))


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_gradients_of_some_inputs_only(wanted: int) -> None:
    given = call(fr.Layout.of(9), "by query")
    inputs = differentiable(given)
    for x in inputs[:wanted] + inputs[wanted + 1 :]:
        x.requires_grad_(False) if x.is_leaf else None
    names = ("query", "keys", "values", "mixing")
    given = replace(
        given, **{n: x.detach().requires_grad_(i == wanted) for i, (n, x) in enumerate(zip(names, inputs, strict=True))}
    )
    one = differentiable(given)[wanted]
    cotangent = torch.randn(given.query.shape, dtype=torch.float64)
    found, expected = (torch.autograd.grad(f(given), one, cotangent)[0] for f in (query_blocks, definition))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


# -- dropout ----------------------------------------------------------------------------------------------------------


def mask(given: Problem, seed: int) -> Tensor:
    """What dropout leaves under this seed, read off the weighted values of keys that each have a value of their own."""
    batch, _, keys, _ = given.keys.shape
    one_hot = torch.eye(keys, D, dtype=torch.float64).expand(batch, H, keys, D)
    torch.manual_seed(seed)
    with torch.no_grad():
        return (query_blocks(replace(given, values=one_hot))[..., :keys] != 0).double()


@pytest.mark.parametrize("mixing", ["none", "shared", "by query"])
@pytest.mark.parametrize("name", ["causal", "padding", "gaps and window", "cross, more queries", "one query"])
@pytest.mark.parametrize("cuts", ["many blocks", "two texts at once"])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(
    cuts: str, name: str, mixing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, Limits(50, 2, 2), CUTS[cuts])
    layout = LAYOUTS[name]
    for relative in (False, True)[: 1 + causal_runs(layout)]:
        given = call(layout, mixing, relative=relative, sigsoftmax=relative, p=0.4)
        kept = mask(given, 3)
        seen = layout.visible().expand(kept.shape)
        assert 0.4 < float(kept[seen].mean()) < 0.8
        torch.manual_seed(3)
        check(given, query_blocks(given), definition(given, kept))


def test_masks_are_a_function_of_one_number_of_the_default_generator() -> None:
    given, other = (call(fr.Layout.of(n), "shared", p=0.5) for n in (5, 13))
    after = []
    for each in (given, other):
        torch.manual_seed(8)
        query_blocks(each)
        after.append(torch.rand(()))
    assert after[0] == after[1]
    assert torch.equal(mask(other, 1), mask(other, 1))
    assert not torch.equal(mask(other, 1), mask(other, 2))
    first = mask(other, 1)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("before", [1, 2])
def test_masks_are_the_same_where_the_number_of_threads_changes(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread more, two texts stand in a block in which one stood."""
    cut(monkeypatch, Limits(160, 4, 4), Limits(160, 4, 4))
    given, threads = call(fr.Layout.of(13), "shared", p=0.4), torch.get_num_threads()
    try:
        torch.set_num_threads(before)
        kept = mask(given, 3)
        torch.manual_seed(3)
        out = query_blocks(given)
        torch.set_num_threads(3 - before)
        assert not torch.equal(mask(given, 3), kept), "the number of threads has to matter here"
        check(given, out, definition(given, kept))
    finally:
        torch.set_num_threads(threads)


def test_every_weight_is_dropped_equally_often_and_alone() -> None:
    p, layout = 0.3, fr.Layout.of(16, causal=False)
    kept = torch.stack([mask(call(layout, "none", p=p), seed) for seed in range(300)])  # (S, B, H, N, M)
    places = kept.mean(0)
    assert abs(float(kept.mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    assert float((places - (1 - p)).abs().max()) < 6 * math.sqrt(p * (1 - p) / 300)
    together = (kept[..., 1:] * kept[..., :-1]).mean() - kept.mean() ** 2
    assert abs(float(together)) < 5 * p * (1 - p) / math.sqrt(kept.numel())


def test_dropout_with_probability_one_leaves_nothing() -> None:
    given = call(fr.Layout.of(5), "shared", p=1.0)
    out = query_blocks(given)
    assert torch.equal(out, torch.zeros_like(out))
    for gradient in torch.autograd.grad(out.sum(), differentiable(given)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_dropout_under_checkpointing() -> None:
    """What runs the forward pass again restores the default generator, and with it the seed."""
    given, found = call(fr.Layout.of(13), "by query", p=0.4), []
    for again in (False, True):
        torch.manual_seed(4)
        out = checkpoint(query_blocks, given, use_reentrant=False) if again else query_blocks(given)
        found.append([out, *torch.autograd.grad(out.square().sum(), differentiable(given))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- precision, memory, limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixing", ["none", "shared", "by query"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, mixing: str) -> None:
    """Products in the dtype of the heads; all else in fp32, so that errors stay those of one rounding or a few."""
    layout = fr.Layout.of(130)
    exact, low = call(layout, mixing, batch=2), call(layout, mixing, batch=2, dtype=dtype)
    out, expected = query_blocks(low), definition(exact)
    assert out.dtype == dtype
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = (out, *torch.autograd.grad(out, differentiable(low), cotangent.to(dtype)))
    wanted = (expected, *torch.autograd.grad(expected, differentiable(exact), cotangent))
    for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
        off = float(((got.double() - want).norm() / want.norm()).detach())
        assert off < (0.02 if dtype == torch.bfloat16 else 0.003), f"{place}: {off:.4f}"


@pytest.mark.parametrize("mixing", ["none", "shared", "by query"])
def test_nothing_as_large_as_the_weights_is_kept(mixing: str) -> None:
    given = call(fr.Layout.of(200), mixing, relative=True, p=0.1, batch=2)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = query_blocks(given)
    assert kept
    assert sum(kept) <= sum(x.numel() for x in differentiable(given))
    assert max(kept) < 200 * 200
    torch.autograd.grad(out.sum(), differentiable(given))


def test_second_derivatives_are_refused_and_changed_inputs_noticed() -> None:
    given = call(fr.Layout.of(5), "shared")
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(query_blocks(given).sum(), differentiable(given), create_graph=True)
    out = query_blocks(given)
    assert given.mixing is not None
    with torch.no_grad():
        given.mixing.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_functorch_is_refused() -> None:
    given = call(fr.Layout.of(5), "shared")
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda query: query_blocks(replace(given, query=query)).sum())(given.query)


def test_autocast_changes_nothing_inside() -> None:
    given = call(fr.Layout.of(9), "by query", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = query_blocks(given)
        found = torch.autograd.grad(out.sum(), differentiable(given))
    assert torch.equal(out, query_blocks(given))
    assert all(
        torch.equal(a, b)
        for a, b in zip(found, torch.autograd.grad(query_blocks(given).sum(), differentiable(given)), strict=True)
    )


def test_what_it_does_not_compute() -> None:
    rows = torch.arange(9).expand(2, 9)
    apart = fr.Layout(rows, rows)
    assert blocks_compute(call(apart, "none", batch=2))  # distances play no part
    assert not blocks_compute(call(fr.Layout(rows, rows, window=3), "none", batch=2))
    assert not blocks_compute(call(fr.Layout.of(9, causal=False, window=3), "none"))
    assert not blocks_compute(call(apart, "none", relative=True, batch=2))
    assert not blocks_compute(call(fr.Layout.of(9, causal=False), "none", relative=True))
    given = call(fr.Layout.of(9), "none")
    assert blocks_compute(given)
    assert not blocks_compute(replace(given, query=given.query.to("meta")))
    assert not blocks_compute(call(fr.Layout.of(9), "none", batch=0))
    assert not blocks_compute(replace(given, keys=given.keys.float()))
