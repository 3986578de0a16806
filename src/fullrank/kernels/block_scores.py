"""Scores of query blocks, of content and of distance, and what their gradients make of query, keys, distances, u and v.

    A = C K^T + shift(Z R^T),    C = s (Q + u),    Z = s (Q + v);    of a dot product  A = C K^T  with  C = s Q
    dC = dA K,   dK = dA^T C,    dZ = shift^T(dA) R,   dR = shift^T(dA)^T Z,    dQ = s (dC + dZ),   du, dv: sums of s dC, s dZ

The shift is a view of Z R^T in both directions, also for keys with gaps between them and within a window
(`attention/shift.py`, docs/derivations/relative_attention.md).
Heads of all texts stand in one dimension G = H b, the texts of a head side by side: what mixing multiplies is then one matrix
with a row for each head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.core.engine import Problem
from fullrank.core.shift import Piece, shift
from fullrank.kernels.block_plan import Block, Plan

_LOOP = (
    2**16
)  # numbers of a factor from which a sum into rows with gaps, which PyTorch forms head by head, beats a copy


class Scratch:
    """Room for the numbers of one block, used again by the next: fresh memory would cost as much as a product."""

    def __init__(self, numbers: int, device: torch.device) -> None:
        self._numbers, self._device = numbers, device
        self._rooms: dict[tuple[str, torch.dtype], Tensor] = {}

    def room(self, name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Of this shape, without gaps; what was in the room of this name and dtype is lost."""
        key = (name, dtype)
        if key not in self._rooms:
            self._rooms[key] = torch.empty(self._numbers, dtype=dtype, device=self._device)
        return self._rooms[key].as_strided(shape, (shape[1] * shape[2], shape[2], 1))

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x itself, or in a room of its own in this lower precision, without gaps."""
        return x if x.dtype == dtype else self.room("cast", (x.shape[0], x.shape[1], x.shape[2]), dtype).copy_(x)

    def product(self, name: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """a b of (G, n, D) and (G, D, m), formed in the precision of both, in `dtype`."""
        shape = (a.shape[0], a.shape[1], b.shape[2])
        room = self.room(name, shape, dtype)
        if a.dtype == dtype:
            return torch.bmm(a, b, out=room)
        return room.copy_(torch.bmm(a, b, out=self.room("cast", shape, a.dtype)))

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total (G, D, m) += a b, of (G, D, n) and (G, n, m); total has gaps between its rows."""
        if total.dtype == a.dtype and b.shape[1] * b.shape[2] >= _LOOP:
            total.baddbmm_(a, b)
        else:
            shape = (total.shape[0], total.shape[1], total.shape[2])
            total.add_(torch.bmm(a, b, out=self.room("sum", shape, a.dtype)))


@dataclass(frozen=True)
class Group:
    """Some texts: query (G, N, D), keys and values (G, M, D), views where it is one text."""

    texts: slice
    query: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Sums:
    """Gradients of a group, summed over blocks, in fp32 at least. keys and values (G, D, M): products add to wide rows faster.

    table (H, D, T), u and v (H, D) are those of all groups.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor | None
    u: Tensor | None
    v: Tensor | None


class Scores:
    """The scores of one block of query rows of a group.

    table (H, D, T): keys of distances, the farthest first; None where only content counts.
    """

    def __init__(
        self, problem: Problem, plan: Plan, group: Group, block: Block, table: Tensor | None, scratch: Scratch
    ) -> None:
        self.plan, self.group, self.block, self.scale = plan, group, block, problem.scale
        self.table, self.scratch = table, scratch
        rows = group.query[:, block.rows]  # (G, n, D)
        self.dtype, self.wide = rows.dtype, torch.promote_types(rows.dtype, torch.float32)
        self.keys = group.keys[:, block.keys]
        if problem.distances is None:
            self.content = self._scaled(rows)
        else:
            by_head = rows.unflatten(0, (-1, group.texts.stop - group.texts.start))  # (H, b, n, D)
            u, v = (bias[:, None, None] for bias in (problem.distances.u, problem.distances.v))
            self.content = self._scaled(by_head + u).flatten(0, 1)
            # all texts read the same distances, so that their rows make one product: (H, b n, D)
            self.position = self._scaled(by_head + v).flatten(1, 2)

    def _scaled(self, rows: Tensor) -> Tensor:
        return (rows * self.scale).to(self.dtype).contiguous()

    def forward(self) -> Tensor:
        """Masked, (G, n, m), in fp32 at least, in the room `scores`."""
        scores = self.scratch.product("scores", self.content, self.keys.transpose(1, 2), self.wide)
        for piece in self.block.pieces:
            scores[..., self._columns(piece.keys)].add_(self._shifted(piece))
        return self.plan.hide(scores, self.block, self.group.texts)

    def bias(self) -> Tensor:
        """What distance adds to content, masked, (G, n, m): a view that may have gaps."""
        parts = [self._shifted(piece) for piece in self.block.pieces[-1:]]
        if len(self.block.pieces) > 1:  # they share a room
            parts = [torch.cat([self._shifted(piece).clone() for piece in self.block.pieces], dim=-1)]
        return self.plan.hide(parts[0], self.block, self.group.texts)

    def _shifted(self, piece: Piece) -> Tensor:
        assert self.table is not None
        raw = self.scratch.product("shifted", self.position, self.table[..., piece.table], self.wide)
        return shift(raw.view(*self.content.shape[:2], -1), piece)

    def backward(self, d_scores: Tensor, sums: Sums) -> None:
        """Adds to `sums`, but for its values. d_scores (G, n, m) in the dtype of the heads."""
        self.scratch.add_product(sums.keys[..., self.block.keys], self.content.transpose(1, 2), d_scores)
        at_query = torch.bmm(d_scores, self.keys).to(self.wide).mul_(self.scale)
        if self.table is not None:
            assert sums.u is not None
            assert sums.v is not None
            at_position = self._position_backward(d_scores, sums)
            for total, part in ((sums.u, at_query), (sums.v, at_position)):
                total.add_(part.view(total.shape[0], -1, total.shape[1]).sum(1))
            at_query.add_(at_position)
        sums.query[:, self.block.rows] = at_query

    def _position_backward(self, d_scores: Tensor, sums: Sums) -> Tensor:
        """The gradient at Q + v, (G, n, D)."""
        assert self.table is not None
        assert sums.table is not None
        at_position: Tensor | None = None
        for piece in self.block.pieces:
            far = self.table[..., piece.table]
            shape = (d_scores.shape[0], d_scores.shape[1], far.shape[2])
            raw = self.scratch.room("shifted", shape, self.dtype).zero_()
            shift(raw, piece).copy_(d_scores[..., self._columns(piece.keys)])
            raw = raw.view(self.table.shape[0], -1, far.shape[2])  # (H, b n, L)
            found = torch.bmm(raw, far.transpose(1, 2)).to(self.wide)
            at_position = found if at_position is None else at_position.add_(found)
            self.scratch.add_product(sums.table[..., piece.table], self.position.transpose(1, 2), raw)
        assert at_position is not None
        return at_position.mul_(self.scale).view(self.content.shape)

    def _columns(self, keys: slice) -> slice:
        return slice(keys.start - self.block.keys.start, keys.stop - self.block.keys.start)


def by_head(x: Tensor) -> Tensor:
    """(b, H, n, D) -> (G, n, D), a view of one text."""
    return x[0] if x.shape[0] == 1 else x.transpose(0, 1).flatten(0, 1)


def by_text(x: Tensor, texts: int) -> Tensor:
    """(G, n, D) -> (b, H, n, D)."""
    return x.unflatten(0, (-1, texts)).transpose(0, 1)
