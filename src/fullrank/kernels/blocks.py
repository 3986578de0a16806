"""Weighted attention by PyTorch's operations, a block of query rows of all heads at a time.

    A = C K^T + shift(Z R^T),   C = s (Q + u),   Z = s (Q + v);    of a dot product  A = C K^T  with  C = s Q
    P = normalize(A),   P'_i = sum_j M_ji P_j,   O = dropout(P') V

For machines without a C++ compiler, and for relative scores on a GPU or in a compiled model. The backward pass computes each
block again and differentiates it, so nothing of size N M is kept. Causal blocks leave out the keys after their last row,
windows those before their first; dropout is drawn again from a seed.
Scores, normaliser, mixing and sums are fp32 (or fp64), products have the dtype of the heads.
Limits: no double backward, no functorch transforms. A compiler gets all rows as one block, and forms its own backward pass.

The shift of relative scores is a view. A block of n rows meets the w keys of one run of positions. Z R^T holds for each row its
products with L rows of the table of distances, the farthest first; the wanted number of row i and key j stands at
`begin + i (L - 1) + j` of them all (docs/derivations/relative_attention.md). L > w, so that no two pairs share a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullrank.core import draws
from fullrank.core.draws import dropout, keep_mask
from fullrank.core.engine import Distances, Problem
from fullrank.core.layout import Layout
from fullrank.core.mix import mix_heads
from fullrank.kernels.problem import find_visible_keys, normalize_scores, refuse_second_order, table_row

# Scores of a block, about. On a CPU they stay in the cache that a core has beside the first; elsewhere launches cost more
# than memory. A long sequence has 64 rows a block at least: with fewer, matrix products become slow.
_SCORES = {"cpu": 2**17}
_SCORES_ELSEWHERE = 2**25
_LEAST_ROWS = 64

# layout, scale, normalize, dropout: the fields of a `Problem` after its tensors
Choices = tuple[Layout, float, str, float]
# query, keys, values, mixing, distances, u, v
Operands = Sequence[Tensor | None]


@dataclass(frozen=True)
class Piece:
    """Keys of one run, for a block of query rows.

    table: the L rows of the descending table of distances that are multiplied; begin: where the view begins.
    """

    keys: slice
    table: slice
    begin: int


@dataclass(frozen=True)
class Block:
    """Query rows of some sequences, and the keys that some of the rows sees, in pieces where scores are relative."""

    batch: slice
    rows: slice
    keys: slice
    pieces: tuple[Piece, ...]


def attend(problem: Problem) -> Tensor:
    """(B, H, N, D)."""
    far = problem.distances
    relative = (None, None, None) if far is None else (far.keys, far.u, far.v)
    operands = (problem.query, problem.keys, problem.values, problem.mixing, *relative)
    choices: Choices = (problem.layout, problem.scale, problem.normalize, problem.dropout)
    if torch.compiler.is_compiling():
        return _attend_whole(choices, operands)
    with torch.autocast(problem.query.device.type, enabled=False):
        seed = tuple(draws.seed().tolist()) if problem.dropout else (0, 0)
        out: Tensor = _Blocks.apply(choices, seed, *operands)
        return out


# -- how a call is cut ------------------------------------------------------------------------------------------------


def plan(problem: Problem) -> list[Block]:
    """A function of layout, shapes and device only: the backward pass, which draws dropout again, cuts the call alike."""
    batch, heads, queries, _ = problem.query.shape
    visible = find_visible_keys(problem.layout)
    assert visible is not None
    first, end = visible.first.tolist(), visible.end.tolist()
    row_scores = heads * max(stop - start for start, stop in zip(first, end, strict=True))
    scores = _SCORES.get(problem.query.device.type, _SCORES_ELSEWHERE)
    most = min(scores // row_scores, -(-queries // 8))  # of a causal block, a part that grows with its rows is not seen
    count = -(-queries // max(_LEAST_ROWS, most))  # blocks of nearly as many rows each
    rows = -(-queries // count)
    sequences = max(1, scores // (row_scores * rows))
    blocks = []
    for start in range(0, batch, sequences):
        for row in range(0, queries, rows):
            stop = min(row + rows, queries)
            run_pieces = () if problem.distances is None else pieces(problem.layout, row, stop)
            keys = slice(first[row], end[stop - 1])
            blocks.append(Block(slice(start, start + sequences), slice(row, stop), keys, run_pieces))
    return blocks


def pieces(layout: Layout, first: int, end: int) -> tuple[Piece, ...]:
    """For query rows `first` .. `end` - 1 of a layout with runs, the keys that some of them sees, oldest first."""
    rows, total = end - first, layout.distances
    after = layout.runs[-1][0] + layout.runs[-1][1] if layout.runs else 0
    oldest, newest = after - layout.shape[0] + first, after - layout.shape[0] + end - 1  # positions of the rows
    parts, column = [], 0
    for position, size in layout.runs or ():
        start, stop = position, min(position + size, newest + 1)
        if layout.window is not None:
            start = max(start, oldest - layout.window + 1)
        if start < stop:
            width = stop - start
            farthest, nearest = newest - start, max(oldest - stop + 1, 0)
            known = farthest if layout.window is None else min(farthest, layout.window - 1)
            row = total - 1 - table_row(layout, known)
            table = slice(row, row + max(known - nearest, width) + 1)
            keys = slice(column + start - position, column + stop - position)
            parts.append(Piece(keys, table, rows - 1 - (farthest - known)))
        column += size
    return tuple(parts)


def descending(relative: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Keys of distances (H, T, D), the farthest first, as (H, D, T or more).

    Idle columns after them, which no visible pair reads, repeat the nearest distance.
    """
    columns = max(piece.table.stop for block in blocks for piece in block.pieces)
    idle = max(columns - relative.shape[1], 0)
    table = torch.cat((relative.flip(1), relative[:, :1].expand(-1, idle, -1)), dim=1)
    return table.transpose(1, 2).contiguous()


def shift(products: Tensor, piece: Piece) -> Tensor:
    """(.., n, L) without gaps -> the view (.., n, w) of it."""
    rows, step = products.shape[-2], products.shape[-1] - 1
    flat = products.flatten(-2)[..., piece.begin : piece.begin + rows * step]
    return flat.unflatten(-1, (rows, step))[..., : piece.keys.stop - piece.keys.start]


# -- what a block computes --------------------------------------------------------------------------------------------


def scores_of(problem: Problem, block: Block) -> Tensor:
    """Scores of a block before the mask, (b, H, n, m), in fp32 at least; those of hidden keys are any finite numbers.

    `problem` has the tensors of the block; the keys of its distances are a table (H, D, T) from `descending`.
    """
    query, keys, far = problem.query, problem.keys.transpose(-1, -2), problem.distances
    wide = torch.promote_types(query.dtype, torch.float32)
    if far is None:
        return ((query * problem.scale) @ keys).to(wide)
    content, position = (((query + bias[:, None]) * problem.scale).to(query.dtype) for bias in (far.u, far.v))
    by_distance = [shift(position @ far.keys[..., piece.table], piece) for piece in block.pieces]
    whole = by_distance[0] if len(by_distance) == 1 else torch.cat(by_distance, dim=-1)
    return (content @ keys).to(wide) + whole


def _attend_block(problem: Problem, block: Block, hidden: Tensor | None, kept: Tensor | None) -> Tensor:
    """The definition for one block. hidden: -inf where a row does not see a key, else 0; kept: the factors of dropout."""
    scores = scores_of(problem, block)
    weights = normalize_scores(scores if hidden is None else scores.add_(hidden), problem.normalize)
    mixing = problem.mixing
    if mixing is not None and mixing.dim() == 2:  # one product, without a copy in another order
        mixed = (mixing.t().to(weights) @ weights.flatten(2)).view(weights.shape)
    else:
        mixed = mix_heads(weights, mixing)
    if kept is not None:
        mixed = mixed * kept
    return mixed.to(problem.values.dtype) @ problem.values


def _parts(
    problem: Problem, blocks: Sequence[Block], seed: tuple[int, int]
) -> Iterator[tuple[Block, Tensor | None, Tensor | None]]:
    """Each block with its mask and its factors of dropout, which depend on the seed, the sequence and the rows alone.

    seed: with the number of the first sequence (`Draws.seed`).
    """
    device, heads, p = problem.query.device, problem.query.shape[1], problem.dropout
    wide = torch.promote_types(problem.query.dtype, torch.float32)
    visible = find_visible_keys(problem.layout)
    assert visible is not None
    generator = torch.Generator(device) if p else None
    for block in blocks:
        at = torch.arange(block.keys.start, block.keys.stop, dtype=torch.int32, device="cpu")
        first, end, own = (x[block.rows, None] for x in (visible.first, visible.end, visible.own))
        seen = ((at >= first) & (at < end)).to(device)
        if visible.tokens is not None:
            tokens = visible.tokens[block.batch if len(visible.tokens) > 1 else slice(None), None, None, block.keys]
            seen = seen & (tokens | (at == own).to(device))
        hidden = torch.zeros(seen.shape, dtype=wide, device=device).masked_fill_(~seen, float("-inf"))
        kept = None
        if generator is not None:
            shape = torch.Size((heads, block.rows.stop - block.rows.start, len(at)))
            kept = torch.empty(len(problem.query[block.batch]), *shape, dtype=wide, device=device)
            for i, one in enumerate(kept, start=block.batch.start + seed[1]):
                generator.manual_seed(
                    (seed[0] ^ i * 0x9E3779B97F4A7C15 ^ block.rows.start * 0x94D049BB133111EB) % 2**63
                )
                drawn = keep_mask(shape, p, one, generator)
                one.copy_(torch.rand(shape, generator=generator, device=device) >= p if drawn is None else drawn)
            kept.mul_(0.0 if p == 1 else 1 / (1 - p))
        yield block, hidden, kept


def _problem(choices: Choices, operands: Operands) -> Problem:
    query, keys, values, mixing, distances, u, v = operands
    assert query is not None
    assert keys is not None
    assert values is not None
    far = None if distances is None or u is None or v is None else Distances(distances, u, v)
    return Problem(query, keys, values, mixing, far, *choices)


def _indices(block: Block, mixing: Tensor | None) -> list[tuple[slice, ...]]:
    """The part of each operand that a block reads."""
    every = slice(None)
    rows, keys = (block.batch, every, block.rows), (block.batch, every, block.keys)
    by_query = mixing is not None and mixing.dim() == 4
    return [rows, keys, keys, (block.batch, block.rows) if by_query else (every,), *[(every,)] * 3]


def _attend_whole(choices: Choices, operands: Operands) -> Tensor:
    """All rows at once, for a compiler."""
    problem, every = _problem(choices, operands), slice(None)
    layout, far, p = problem.layout, problem.distances, problem.dropout
    queries, keys = layout.shape
    run_pieces = () if far is None else pieces(layout, 0, queries)
    block = Block(every, slice(0, queries), slice(run_pieces[0].keys.start if run_pieces else 0, keys), run_pieces)
    part = [None if x is None else x[at] for x, at in zip(operands, _indices(block, problem.mixing), strict=True)]
    part[4] = None if far is None else descending(far.keys, [block])
    hidden = kept = None
    if not layout.unrestricted:
        seen = layout.visible()[..., block.keys]
        hidden = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))
    if p:
        shape = (*problem.query.shape[:3], keys - block.keys.start)
        kept = dropout(torch.ones(shape, device=problem.query.device), p)
    return _attend_block(_problem(choices, part), block, hidden, kept)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, choices: Choices, seed: tuple[int, int], *operands: Tensor | None) -> Tensor:
        ctx.choices, ctx.seed = choices, seed
        ctx.save_for_backward(*operands)
        problem = _problem(choices, operands)
        blocks, tensors = _prepare_blocks(problem, operands)
        out = torch.empty_like(problem.query)
        for block, hidden, kept in _parts(problem, blocks, seed):
            indices = _indices(block, problem.mixing)
            part = [None if x is None else x[at] for x, at in zip(tensors, indices, strict=True)]
            out[block.batch, :, block.rows] = _attend_block(_problem(choices, part), block, hidden, kept)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("this attention kernel", "keeps the weights")
        operands, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        problem = _problem(ctx.choices, operands)
        blocks, tensors = _prepare_blocks(problem, operands)
        wide = torch.promote_types(problem.query.dtype, torch.float32)
        # gradients by number of the operand, summed over blocks
        sums = {i: torch.zeros_like(x, dtype=wide) for i, x in enumerate(tensors) if x is not None and wanted[i]}
        with torch.autocast(problem.query.device.type, enabled=False), torch.enable_grad():
            for block, hidden, kept in _parts(problem, blocks, ctx.seed):
                indices = _indices(block, problem.mixing)
                part = [None if x is None else x[at].detach() for x, at in zip(tensors, indices, strict=True)]
                leaves = [x.requires_grad_() for i in sums if (x := part[i]) is not None]
                out = _attend_block(_problem(ctx.choices, part), block, hidden, kept)
                gradients = torch.autograd.grad(out, leaves, cotangent[block.batch, :, block.rows])
                for i, gradient in zip(sums, gradients, strict=True):
                    sums[i][indices[i]] += gradient
        if 4 in sums:  # distances in their own order again, without idle columns
            sums[4] = sums[4].transpose(1, 2)[:, : operands[4].shape[1]].flip(1)
        return None, None, *(sums[i].to(x.dtype) if i in sums else None for i, x in enumerate(operands))


def _prepare_blocks(problem: Problem, operands: Operands) -> tuple[list[Block], Operands]:
    """The blocks of a call, and its operands with the descending table as distances."""
    blocks, far = plan(problem), problem.distances
    return blocks, operands if far is None else (*operands[:4], descending(far.keys, blocks), *operands[5:])
