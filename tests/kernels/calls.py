"""Calls of weighted attention at odd sizes, their equation in double precision, and the comparison of a kernel with it."""

import math
from dataclasses import replace

import pytest
import torch

from fullrank.core.engine import Distances, Problem
from fullrank.kernels.build import library
from fullrank.kernels.native import differentiable

MATRICES = ("mixing", "scoring", "key_mixing", "key_scoring", "convolution")


def call(
    layout, mixing = "none", *, relative = False, normalize = "softmax", p = 0.0,
    batch = 2, heads = 3, size = 5, dtype = torch.float64, device = "cpu", times = 1.0,
):  # fmt: skip
    """mixing: how weights are mixed: "none", "A" of shape (H, H) or "B" of (B, N, H, H). After a comma "A scores" and the like
    mix scores, or "convolution" convolves them; last, "keys" adds matrices of the keys to both.

    times: what queries and keys are multiplied by, which makes scores large."""
    queries, keys = layout.shape
    generator = torch.Generator().manual_seed(5)
    mixing, scoring, of_keys = (*mixing.split(", "), "none", "none")[:3]

    def drawn(*shape, times=1.0):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64) * times
        return x.to(device, dtype).requires_grad_()

    shapes = {"A": (heads, heads), "B": (batch, queries, heads, heads)}
    # with the strides of a projection, heads behind positions; or queries that are contiguous, or amid other numbers
    query, key = (drawn(batch, length, heads, size, times=times).transpose(1, 2) for length in (queries, keys))
    query = (query, query.contiguous(), torch.cat((query, query), dim=3)[..., size:])[queries % 3]
    value = drawn(batch, keys, heads, size).transpose(1, 2)
    far = Distances(drawn(heads, layout.distances, size), drawn(heads, size), drawn(heads, size)) if relative else None
    mixed, of_scores = (drawn(*shapes[kind]) if kind in shapes else None for kind in (mixing, scoring[:1]))
    matrices = [drawn(batch, keys, heads, heads) if of_keys == "keys" else None for _ in range(2)]
    convolution = drawn(heads, 4, 5) if scoring == "convolution" else None
    return Problem(query, key, value, mixed, far, layout, 0.3, normalize, p, of_scores, *matrices, convolution)


def scores(problem):
    """Before the mask, one query and key after the other where distances count."""
    layout, query, far = problem.layout, problem.query, problem.distances
    if far is None:
        return problem.scale * query @ problem.keys.transpose(2, 3)
    row = {}  # distance -> its place in the table
    for low, high in layout.spans:
        for distance in range(low, high + 1):
            row[distance] = len(row)
    rows = []
    for n in layout.query_positions.tolist():
        rows.append([row.get(n - m, 0) for m in layout.key_positions.tolist()])
    keys_of_distances = far.keys[:, torch.tensor(rows, device=query.device)]  # (H, N, M, D)
    content = (query + far.u[:, None]) @ problem.keys.transpose(2, 3)
    return problem.scale * (content + torch.einsum("bhnd,hnmd->bhnm", query + far.v[:, None], keys_of_distances))


def weights(problem):
    """Before dropout, as the equations read."""
    a = scores(problem)
    a = mixed_maps(a, problem.scoring, problem.key_scoring)
    if problem.convolution is not None:
        a = convolved(a, problem.convolution, problem.layout)
    if problem.normalize == "sigsoftmax":
        a = a + a.clamp(max=0) - (-a.abs()).exp().log1p()  # log sigmoid(a), without overflow
    normalized = torch.where(problem.layout.visible().to(a.device), a, -math.inf).softmax(-1)
    return mixed_maps(normalized, problem.mixing, problem.key_mixing)


def convolved(scores, kernel, layout):
    """sum_ab w(a, b) S(n - a, m + b) of scores that are seen, a = 0 last"""
    seen = layout.visible().to(scores.device)
    if layout.tokens is not None:
        seen = seen & layout.tokens[:, None, None] & layout.tokens[:, None, :, None]
    rows, columns = kernel.shape[1:]
    padded = torch.nn.functional.pad(scores.where(seen, 0), (columns // 2, columns // 2, rows - 1, 0))
    windows = padded.unfold(2, rows, 1).unfold(3, columns, 1)
    return torch.einsum("bhnmac,hac->bhnm", windows, kernel)


def mixed_maps(maps, of_queries, of_keys):
    """sum_j (M_ji(n) + K_ji(m)) P_j(n, m)"""
    heads = maps.shape[1]
    matrix = torch.eye(heads).to(maps) if of_queries is None else of_queries
    matrix = matrix.expand(*maps.shape[0::2], heads, heads)[:, :, None]  # (B, N, 1, H, H)
    matrix = matrix if of_keys is None else matrix + of_keys[:, None]
    return (matrix.permute(0, 3, 4, 1, 2) * maps[:, :, None]).sum(1)


def equation(problem, keep_mask=None):
    """keep_mask: 1 where dropout keeps a weight, (B, H, N, M)."""
    mixed = weights(problem)
    if keep_mask is not None:
        mixed = mixed * keep_mask / (1 - problem.dropout)
    return mixed @ problem.values


def exact(problem):
    """These operands in fp64."""

    def wide(x):
        return None if x is None else x.detach().double().requires_grad_()

    far = problem.distances
    query, keys, values = (x.detach().double().requires_grad_() for x in (problem.query, problem.keys, problem.values))
    distances = None if far is None else Distances(*(wide(x) for x in (far.keys, far.u, far.v)))
    matrices = {name: wide(getattr(problem, name)) for name in MATRICES}
    return replace(problem, query=query, keys=keys, values=values, distances=distances, **matrices)


def named(problem):
    """The names of what is differentiated."""
    far = () if problem.distances is None else ("distances", "u", "v")
    matrices = [name for name in MATRICES if getattr(problem, name) is not None]
    return ["query", "keys", "values", *matrices, *far]


def check(problem, out, tolerance, keep_mask=None, relative_norm=False):
    """`out` and all gradients under a random cotangent beside the equation: relative to the largest number, or by norms."""
    wide = exact(problem)
    expected = equation(wide, keep_mask)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(out)
    cotangent = cotangent[:, :1].expand_as(out) if out.shape[2] % 2 else cotangent  # heads share one memory
    actual = [out.detach(), *torch.autograd.grad(out, differentiable(problem), cotangent)]
    references = [expected.detach(), *torch.autograd.grad(expected, differentiable(wide), cotangent.double())]
    for name, tensor, reference in zip(["output", *named(problem)], actual, references, strict=True):
        assert tensor.shape == reference.shape, name
        assert tensor.isfinite().all(), f"{name} is not finite"
        if relative_norm:
            off = float((tensor.double() - reference).norm() / reference.norm())
        else:
            off = float((tensor.double() - reference).abs().max() / reference.abs().max().clamp(min=1.0))
        assert off <= tolerance, f"{name} is off by {off:.1e}"


def needs_compiler():
    if library() is None:
        pytest.skip("no C++ compiler, or FULLRANK_NATIVE is 0")
