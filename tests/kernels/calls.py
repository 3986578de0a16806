"""Calls of weighted attention at odd sizes, their equation in double precision, and the comparison of a kernel with it."""

import math
from dataclasses import replace

import pytest
import torch

import fullrank as fr
from fullrank.core.engine import Distances, Problem
from fullrank.kernels.native import differentiable

PADDED = torch.ones(2, 13, dtype=torch.bool)
PADDED[0, :4] = False
PADDED[0, 8] = False
PADDED[1, 9:] = False
EMPTY = PADDED.clone()
EMPTY[1] = False  # a sequence without any token
runs = fr.Layout.from_runs
PACKED = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2]])


def with_documents(layout):
    return replace(layout, documents=PACKED)


LAYOUTS = {
    "causal": fr.Layout.of(13),
    "past": fr.Layout.of(9, 13),
    "one query": fr.Layout.of(1, 13),
    "padding": fr.Layout.of(13, key_mask=PADDED),
    "past and padding": fr.Layout.of(7, 13, key_mask=EMPTY),
    "one mask for all": fr.Layout.of(7, 13, key_mask=PADDED[:1]),
    "window": fr.Layout.of(11, 13, window=4),
    "window of one": fr.Layout.of(6, 9, window=1),
    "window that hides nothing": fr.Layout.of(5, 9, window=9),
    "window and padding": fr.Layout.of(11, 13, key_mask=PADDED, window=6),
    "documents": with_documents(fr.Layout.of(13)),
    "documents and past": with_documents(fr.Layout.of(5, 13)),
    "documents and padding": with_documents(fr.Layout.of(13, key_mask=PADDED)),
    "documents and one mask": with_documents(fr.Layout.of(7, 13, key_mask=PADDED[:1])),
    "documents and window": with_documents(fr.Layout.of(11, 13, window=4)),
    "gap": runs(13, ((0, 9), (15, 20))),
    "gap beyond the segment": runs(13, ((0, 9), (50, 20))),
    "no earlier key beside the segment": runs(11, ((-40, 17), (0, 11))),
    "three runs": runs(7, ((-90, 5), (-20, 3), (-4, 11))),
    "gap of one": runs(10, ((0, 6), (7, 3), (11, 12))),
    "gaps and window": runs(9, ((0, 2), (4, 1), (6, 10)), window=7),
    "window that ends in a gap": runs(6, ((0, 9), (30, 10)), window=12),
    "window that ends in an old run": runs(6, ((0, 9), (14, 10)), window=16),
    "window that hides an old run from some": runs(9, ((0, 4), (6, 5), (14, 12)), window=11),
    "window that hides an old run from later rows": runs(9, ((0, 4), (14, 12)), window=18),
    "one query after a gap": runs(1, ((0, 9), (15, 4), (40, 1))),
    "one query, gap and window": runs(1, ((0, 6), (9, 5)), window=8),
    "cross": fr.Layout.of(7, 13, causal=False),
    "cross, more queries": fr.Layout.of(15, 4, causal=False),
    "cross and padding": fr.Layout.of(7, 13, causal=False, key_mask=EMPTY),
}


def relative_can(layout):
    return layout.causal and layout.runs is not None and layout.key_mask is None


def call(
    layout, mixing = "none", *, relative = False, normalize = "softmax", p = 0.0,
    batch = 2, heads = 3, size = 5, dtype = torch.float64, device = "cpu", times = 1.0,
    scoring = False,
):  # fmt: skip
    """mixing: none, A = (H, H), B = (B, N, H, H). scoring: scores are mixed, too.

    times: what queries and keys are multiplied by, which makes scores large."""
    (queries, keys), generator = layout.shape, torch.Generator().manual_seed(5)

    def drawn(*shape, times=1.0):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64) * times
        return x.to(device, dtype).requires_grad_()

    matrix = {"none": None, "A": (heads, heads), "B": (batch, queries, heads, heads)}[mixing]
    # as a projection leaves them: heads behind positions
    query, key = (drawn(batch, length, heads, size, times=times).transpose(1, 2) for length in (queries, keys))
    value = drawn(batch, keys, heads, size).transpose(1, 2)
    far = Distances(drawn(heads, layout.distances, size), drawn(heads, size), drawn(heads, size)) if relative else None
    mixed = None if matrix is None else drawn(*matrix)
    of_scores = drawn(heads, heads) if scoring else None
    return Problem(query, key, value, mixed, far, layout, 0.3, normalize, p, of_scores)


def scores(problem):
    """Before the mask, one query and key after the other where distances count."""
    layout, query, far = problem.layout, problem.query, problem.distances
    if far is None:
        return problem.scale * query @ problem.keys.transpose(2, 3)
    row, rows = {}, []  # distance -> its place in the table
    for low, high in layout.spans:
        for distance in range(low, high + 1):
            row[distance] = len(row)
    for n in layout.query_positions.tolist():
        rows.append([row.get(n - m, 0) for m in layout.key_positions.tolist()])
    keys_of_distances = far.keys[:, torch.tensor(rows, device=query.device)]  # (H, N, M, D)
    content = (query + far.u[:, None]) @ problem.keys.transpose(2, 3)
    return problem.scale * (content + torch.einsum("bhnd,hnmd->bhnm", query + far.v[:, None], keys_of_distances))


def weights(problem):
    """Before dropout, as the equations read."""
    a = scores(problem)
    if problem.scoring is not None:
        a = torch.stack([sum(problem.scoring[j, i] * a[:, j] for j in range(a.shape[1])) for i in range(a.shape[1])], 1)
    if problem.normalize == "sigsoftmax":
        a = a + a.clamp(max=0) - (-a.abs()).exp().log1p()  # log sigmoid(a), without overflow
    normalized = torch.where(problem.layout.visible().to(a.device), a, -math.inf).softmax(-1)
    if problem.mixing is None:
        return normalized
    matrix = problem.mixing.expand(*normalized.shape[0::2], *problem.mixing.shape[-2:])  # (B, N, H, H)
    return (matrix.permute(0, 2, 3, 1)[..., None] * normalized[:, :, None]).sum(1)  # sum over j of M_ji P_j


def equation(problem, kept=None):
    """kept: 1 where dropout keeps a weight, (B, H, N, M)."""
    mixed = weights(problem)
    if kept is not None:
        mixed = mixed * kept / (1 - problem.dropout)
    return mixed @ problem.values


def exact(problem):
    """These operands in fp64."""

    def wide(x):
        return None if x is None else x.detach().double().requires_grad_()

    far = problem.distances
    query, keys, values = (x.detach().double().requires_grad_() for x in (problem.query, problem.keys, problem.values))
    distances = None if far is None else Distances(*(wide(x) for x in (far.keys, far.u, far.v)))
    matrices = {"mixing": wide(problem.mixing), "scoring": wide(problem.scoring)}
    return replace(problem, query=query, keys=keys, values=values, distances=distances, **matrices)


def named(problem):
    """The names of what is differentiated."""
    far = () if problem.distances is None else ("distances", "u", "v")
    matrices = [name for name in ("mixing", "scoring") if getattr(problem, name) is not None]
    return ["query", "keys", "values", *matrices, *far]


def check(problem, out, tolerance, kept=None, relative_norm=False):
    """`out` and all gradients under a random cotangent beside the equation: relative to the largest number, or by norms."""
    wide = exact(problem)
    expected = equation(wide, kept)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(out)
    found = [out.detach(), *torch.autograd.grad(out, differentiable(problem), cotangent)]
    right = [expected.detach(), *torch.autograd.grad(expected, differentiable(wide), cotangent.double())]
    for name, one, other in zip(["output", *named(problem)], found, right, strict=True):
        assert one.shape == other.shape, name
        assert one.isfinite().all(), f"{name} is not finite"
        if relative_norm:
            off = float((one.double() - other).norm() / other.norm())
        else:
            off = float((one.double() - other).abs().max() / other.abs().max().clamp(min=1.0))
        assert off <= tolerance, f"{name} is off by {off:.1e}"


def needs_compiler():
    from fullrank.kernels.native.build import library

    if library() is None:
        pytest.skip("no C++ compiler, or FULLRANK_NATIVE is 0")
