"""Weighted attention, a block of query rows of all heads at a time: every score, normaliser and mixing that a `Problem` knows.

The scores of a block stay in cache, from which normaliser, mixing and weighted values read them, and are thrown away; the
backward pass forms them again. Causal blocks leave out the keys after their last row, windows those before their first. What
the blocks compute is in `block_scores` and `block_weights`; with W the weights after mixing and dropout,

    O = W V,      dV = W^T dO,      G = dO V^T o Z / (1 - p)

Memory: nothing of size N M is kept; dropout masks are drawn again from a seed. Scores, weights and sums are fp32 (or fp64).
Limits: no double backward, no functorch transforms; a compiler gets other kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.engine import Distances, Problem
from fullrank.core.shift import descending, kept_descending
from fullrank.kernels.block_plan import Block, Plan, plan
from fullrank.kernels.block_scores import Group, Scores, Scratch, Sums, by_head, by_text
from fullrank.kernels.block_weights import (
    Masks,
    mix,
    mix_backward,
    mixing_gradient,
    normalize_,
    normalize_backward_,
)
from fullrank.kernels.precision import refuse_second_order
from fullrank.kernels.problem import fits, needs_grad
from fullrank.kernels.sight import sight_of

_GAPLESS = torch.contiguous_format


def declines(problem: Problem) -> str | None:
    layout, heads = problem.layout, (problem.query, problem.keys, problem.values)
    if any(x.is_meta or x.numel() == 0 for x in heads):  # `meta` knows no autocast either
        return "there are no numbers"
    if any(x.dtype != problem.values.dtype for x in heads):
        return "query, keys and values must have one dtype"
    if problem.distances is not None and (layout.runs is None or not layout.causal):
        return "relative scores need causal keys in runs"
    if problem.distances is None and layout.narrow and sight_of(layout) is None:
        return "a window needs causal keys in runs"
    return None if fits(problem) else "the shapes do not fit each other"


def attend(problem: Problem) -> Tensor:
    """(B, H, N, D)."""
    with torch.autocast(problem.query.device.type, enabled=False):
        if not needs_grad(problem) and not problem.dropout:
            return _evaluate(problem)
        seed = _seed() if problem.dropout else 0
        if not needs_grad(problem):
            return _forward(problem, seed)
        distances = problem.distances
        far = (None,) * 3 if distances is None else (distances.keys, distances.u, distances.v)
        fixed = (problem.layout, problem.scale, problem.normalize, problem.dropout)
        out: Tensor = _Blocks.apply(fixed, seed, problem.query, problem.keys, problem.values, problem.mixing, *far)
        return out


def _seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


class _Call:
    """What the blocks of one pass share."""

    def __init__(self, problem: Problem, cut: Plan, table: Tensor | None, seed: int) -> None:
        self.problem, self.plan = problem, cut
        query = problem.query
        self.dtype, self.wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
        self.scratch = Scratch(cut.numbers(query.shape), query.device)
        self.table = None if table is None else table.transpose(1, 2).contiguous()
        self.masks = Masks(problem.dropout, seed, query.device) if problem.dropout else None
        shared = problem.mixing is not None and problem.mixing.dim() == 2
        self._shared = problem.mixing.to(self.wide) if shared and problem.mixing is not None else None

    def groups(self) -> Iterator[Group]:
        given = (self.problem.query, self.problem.keys, self.problem.values)
        for texts in self.plan.texts:
            yield Group(texts, *(by_head(x[texts]) for x in given))

    def scores(self, group: Group, block: Block) -> Scores:
        return Scores(self.problem, self.plan, group, block, self.table, self.scratch)

    def matrix(self, group: Group, block: Block) -> Tensor | None:
        """(H, H), or (b n, H, H)."""
        if self._shared is not None or self.problem.mixing is None:
            return self._shared
        return self.problem.mixing[group.texts, block.rows].flatten(0, 1).to(self.wide)


def _forward(problem: Problem, seed: int, keep_table: bool = False) -> Tensor:
    cut = plan(problem, backward=bool(problem.dropout))  # masks go with blocks
    table = None
    if problem.distances is not None:
        table = (kept_descending if keep_table else descending)(problem.distances.keys, cut.table_rows)
    call = _Call(problem, cut, table, seed)
    out = torch.empty_like(problem.query)
    for group in call.groups():
        texts = out[group.texts]
        for block in cut.blocks:
            weights = normalize_(call.scores(group, block).forward(), problem.normalize, call.scratch)
            mixed = mix(weights, call.matrix(group, block), call.scratch)
            if call.masks is not None:
                mixed.mul_(call.masks.draw(mixed))
            seen = torch.bmm(call.scratch.cast(mixed, call.dtype), group.values[:, block.keys])
            texts[:, :, block.rows] = by_text(seen, texts.shape[0])
    return out if call.masks is None else out.mul_(call.masks.scale)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fixed: tuple[Any, ...],
        seed: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mixing: Tensor | None,
        distances: Tensor | None,
        u: Tensor | None,
        v: Tensor | None,
    ) -> Tensor:
        # masks are drawn block after block: the backward pass has to cut the call as it is cut here
        ctx.fixed, ctx.seed, ctx.threads = fixed, seed, torch.get_num_threads()
        ctx.save_for_backward(query, keys, values, mixing, distances, u, v)
        return _forward(_problem(fixed, query, keys, values, mixing, distances, u, v), seed)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("this attention kernel", "keeps the weights")
        problem = _problem(ctx.fixed, *ctx.saved_tensors)
        with torch.autocast(cotangent.device.type, enabled=False):
            return None, None, *_backward(problem, cotangent, ctx.seed, ctx.threads, ctx.needs_input_grad[5])


def _problem(
    fixed: tuple[Any, ...],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mixing: Tensor | None,
    distances: Tensor | None,
    u: Tensor | None,
    v: Tensor | None,
) -> Problem:
    far = None
    if distances is not None:
        assert u is not None
        assert v is not None
        far = Distances(distances, u, v)
    return Problem(query, keys, values, mixing, far, *fixed)


def _backward(
    problem: Problem, cotangent: Tensor, seed: int, threads: int, mixing_wanted: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of query, keys, values, mixing, distances, u and v."""
    cut, far = plan(problem, backward=True, threads=threads), problem.distances
    call = _Call(problem, cut, None if far is None else descending(far.keys, cut.table_rows), seed)
    given = (problem.query, problem.keys, problem.values, problem.mixing)

    def zeros(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.zeros_like(x, dtype=call.wide)

    d_query = torch.empty_like(problem.query, dtype=call.wide)
    # products add to wide rows faster: (B, H, D, M)
    d_keys, d_values = (
        torch.zeros_like(x.transpose(2, 3), dtype=call.wide, memory_format=_GAPLESS) for x in given[1:3]
    )
    d_mixing, table = zeros(problem.mixing) if mixing_wanted else None, zeros(call.table)
    u, v = (None, None) if far is None else (zeros(far.u), zeros(far.v))
    for group in call.groups():
        own = [x[group.texts] for x in (d_query, d_keys, d_values)]
        query, keys, values = (x[0] if len(x) == 1 else torch.zeros_like(by_head(x)) for x in own)
        sums = Sums(query, keys, values, table, u, v)
        at_out = by_head(cotangent[group.texts])
        for block in cut.blocks:
            _differentiate(call, group, block, at_out, sums, d_mixing)
        if len(own[0]) > 1:
            for x, part in zip(own, (query, keys, values), strict=True):
                x.copy_(by_text(part, len(x)))
    d_far = None if table is None or far is None else table.transpose(1, 2)[:, : far.keys.shape[1]].flip(1)
    found = (d_query, d_keys.transpose(2, 3), d_values.transpose(2, 3), d_mixing, d_far, u, v)
    likes = (*given, *((None,) * 3 if far is None else (far.keys, far.u, far.v)))
    return tuple(None if x is None or y is None else x.to(y.dtype) for x, y in zip(found, likes, strict=True))


def _differentiate(
    call: _Call, group: Group, block: Block, cotangent: Tensor, sums: Sums, d_mixing: Tensor | None
) -> None:
    """Add the gradients of one block."""
    scratch, how = call.scratch, call.problem.normalize
    parts, matrix = call.scores(group, block), call.matrix(group, block)
    scores = parts.forward()
    weights = normalize_(scores, how, scratch)
    at_out = cotangent[:, block.rows].contiguous()
    if call.masks is not None:
        at_out = at_out * call.masks.scale
    d_mixed = scratch.product("gradient", at_out, group.values[:, block.keys].transpose(1, 2), call.wide)
    dropped = mix(weights, matrix, scratch)
    if call.masks is not None:
        kept = call.masks.draw(weights)
        d_mixed.mul_(kept)
        dropped = torch.mul(dropped, kept, out=kept)
    scratch.add_product(sums.values[..., block.keys], at_out.transpose(1, 2), scratch.cast(dropped, call.dtype))
    if d_mixing is not None and matrix is not None:
        found = mixing_gradient(weights, d_mixed, matrix)
        if d_mixing.dim() == 2:
            d_mixing.add_(found)
        else:
            d_mixing[group.texts, block.rows] = found.view(-1, at_out.shape[1], *found.shape[1:])
    d_weights = mix_backward(d_mixed, matrix, scratch)
    d_scores = normalize_backward_(d_weights, weights, scores, how)
    parts.backward(scratch.cast(d_scores, call.dtype), sums)


def _evaluate(problem: Problem) -> Tensor:
    """Without gradients and dropout."""
    query = problem.query
    if query.shape[2] == 1:
        return _one_query(problem)
    plain = problem.distances is not None and problem.normalize == "softmax" and problem.mixing is None
    if plain and query.device.type == "cpu" and query.dtype.itemsize > 2:
        assert problem.distances is not None
        return _fused(problem, problem.distances)
    return _forward(problem, 0, keep_table=True)


def _fused(problem: Problem, distances: Distances) -> Tensor:
    """Plain relative attention: position scores are the bias of PyTorch's fused kernel."""
    cut = plan(problem, backward=False)
    call = _Call(problem, cut, kept_descending(distances.keys, cut.table_rows), 0)
    out = torch.empty_like(problem.query)
    for group in call.groups():
        for block in cut.blocks:
            parts = call.scores(group, block)
            at_keys, at_values = (x[group.texts, :, block.keys] for x in (problem.keys, problem.values))
            content, bias = (by_text(x, len(at_keys)) for x in (parts.content, parts.bias()))
            out[group.texts, :, block.rows] = F.scaled_dot_product_attention(
                content, at_keys, at_values, attn_mask=bias, scale=1.0
            )
    return out


def _one_query(problem: Problem) -> Tensor:
    """Nothing is shifted: every distance is that of one key, the last T keys being those in sight."""
    query, keys, distances, layout = problem.query, problem.keys, problem.distances, problem.layout
    seen = slice(0 if distances is None else keys.shape[2] - distances.keys.shape[1], None)
    if distances is None:
        scores = (query * problem.scale) @ keys.transpose(2, 3)
    else:
        content, position = (
            ((query + bias[:, None]) * problem.scale).to(query.dtype) for bias in (distances.u, distances.v)
        )
        by_distance = torch.bmm(position[:, :, 0].transpose(0, 1), distances.keys.transpose(1, 2)).flip(-1)
        scores = by_distance.transpose(0, 1).contiguous()[:, :, None]  # (B, H, 1, T)
        scores.flatten(0, 1).baddbmm_(content.flatten(0, 1), keys[:, :, seen].flatten(0, 1).transpose(1, 2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if layout.key_mask is not None or (layout.narrow and distances is None):
        scores = scores.masked_fill(~layout.visible()[..., seen], float("-inf"))
    if problem.normalize == "sigsoftmax":
        scores = scores + F.logsigmoid(scores)
    weights = torch.softmax(scores, -1)
    if (matrix := problem.mixing) is not None:
        by_query = (matrix if matrix.dim() == 2 else matrix[:, 0]).to(weights.dtype)
        weights = (by_query.transpose(-1, -2) @ weights[:, :, 0])[:, :, None]
    return weights.to(query.dtype) @ problem.values[:, :, seen]
