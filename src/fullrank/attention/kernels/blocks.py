"""Blocks of query rows for relative attention: which keys a block sees, its scores, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fullrank.attention.layout import Layout
from fullrank.attention.shift import Piece, pieces, shift

_ROWS = {"cpu": 64}  # query rows of a block, at most; elsewhere 512
_NUMBERS = {"cpu": 2**17}  # about so many scores in a block, so that it stays in cache; elsewhere 2^25


@dataclass(frozen=True)
class Block:
    """Texts, query rows, and the keys that some row sees, in pieces.

    aged (n, x): of the first x of these keys, True where the window hides one from a row; None without such keys.
    """

    texts: slice
    rows: slice
    keys: slice
    pieces: tuple[Piece, ...]
    aged: Tensor | None


def blocks(query: Tensor, layout: Layout, rows: int | None = None) -> list[Block]:
    """All blocks of a causal layout with runs; `rows`: at most so many query rows of one, None as the device likes it."""
    (batch, heads, queries, _), length = query.shape, layout.shape[1]
    most = _ROWS.get(query.device.type, 512) if rows is None else rows
    count = max(1, -(-queries // most))  # blocks of nearly as many rows each
    parts = []
    for row, end in pairwise(queries * i // count for i in range(count + 1)):
        found = pieces(layout, row, end)
        keys = slice(found[0].keys.start, found[-1].keys.stop)
        parts.append((slice(row, end), keys, found, _aged(layout, row, end, keys)))
    widest = max(keys.stop - keys.start for _, keys, _, _ in parts) if layout.window else length
    texts = max(1, _NUMBERS.get(query.device.type, 2**25) // (heads * max(1, -(-queries // count)) * widest))
    return [Block(slice(text, min(text + texts, batch)), *part) for text in range(0, batch, texts) for part in parts]


def _aged(layout: Layout, row: int, end: int, keys: slice) -> Tensor | None:
    if layout.window is None or layout.runs is None:
        return None
    last = layout.runs[-1][0] + layout.runs[-1][1] - layout.shape[0] + end - 1  # position of the last row
    column = count = 0
    for position, size in layout.runs:  # keys that the last row does not see any more
        inside = min(max(last - layout.window + 1 - position, 0), size)
        count = column + inside if inside else count
        column += size
    if count <= keys.start:
        return None
    places = layout.key_positions[keys.start : count]
    return places <= layout.query_positions[row:end, None] - layout.window


def table_rows(found: list[Block]) -> int:
    """How many rows of the descending table, idle ones included, these blocks read."""
    return max(piece.table.stop for block in found for piece in block.pieces)


class Scores:
    """The scores of one block, with what their gradients read. Heads of all texts of a block stand in one dimension G."""

    def __init__(self, block: Block, query: Tensor, keys: Tensor, table: Tensor, u: Tensor, v: Tensor) -> None:
        self.scale, self.block, self.table = query.shape[-1] ** -0.5, block, table
        part = query[block.texts, :, block.rows]  # (b, H, n, D)
        self.shape = part.shape
        self.content = ((part + u[:, None]) * self.scale).to(query.dtype).flatten(0, 1)  # (G, n, D)
        turned = part.transpose(0, 1)
        # all texts read the same distances, so that their rows make one product: (H, b n, D)
        self.position = ((turned + v[:, None, None]) * self.scale).to(query.dtype).flatten(1, 2)
        self.keys = keys[block.texts, :, block.keys].flatten(0, 1)  # (G, m, D)

    def bias(self) -> Tensor:
        """The shifted position scores, unmasked, (b, H, n, m); a view that may be written."""
        batch, heads, rows, _ = self.shape
        parts = []
        for piece in self.block.pieces:
            raw = torch.bmm(self.position, self.table[:, piece.table].transpose(1, 2))
            parts.append(shift(raw.view(heads, batch, rows, -1), piece).transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def hide(self, scores: Tensor, value: float) -> Tensor:
        """`value` at keys that a row does not see, in place: later ones, in the last corner, and those beyond the window."""
        rows = self.shape[2]
        if rows > 1:
            later = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
            scores[..., scores.shape[-1] - rows :].masked_fill_(later, value)
        if self.block.aged is not None:
            scores[..., : self.block.aged.shape[1]].masked_fill_(self.block.aged, value)
        return scores

    def forward(self) -> Tensor:
        """Masked, (b, H, n, m), in the dtype of the heads."""
        scores = self.bias().contiguous()
        scores.flatten(0, 1).baddbmm_(self.content, self.keys.transpose(1, 2))
        return self.hide(scores, float("-inf"))

    def backward(self, d_scores: Tensor, d_keys: Tensor, d_table: Tensor) -> tuple[Tensor, Tensor]:
        """Adds to d_keys (b, H, m, D) and d_table (H, T, D); gradients at Q + u and at Q + v, (b, H, n, D) each."""
        batch, heads, rows, _ = self.shape
        flat = self.hide(d_scores.to(self.content.dtype), 0.0)
        by_head = flat.transpose(0, 1)
        flat = flat.flatten(0, 1)
        at_content = torch.bmm(flat, self.keys).mul_(self.scale)
        add_product(d_keys, flat.transpose(1, 2), self.content)
        at_position: Tensor | None = None
        for piece in self.block.pieces:
            far = self.table[:, piece.table]
            raw = flat.new_zeros(heads, batch, rows, far.shape[1])
            keys = slice(piece.keys.start - self.block.keys.start, piece.keys.stop - self.block.keys.start)
            shift(raw, piece).copy_(by_head[..., keys])
            raw = raw.flatten(1, 2)  # (H, b n, L)
            found = torch.bmm(raw, far)
            at_position = found if at_position is None else at_position.add_(found)
            add_product(d_table[None, :, piece.table], raw.transpose(1, 2), self.position)
        assert at_position is not None
        at_position = at_position.mul_(self.scale).view(heads, batch, rows, -1).transpose(0, 1)
        return at_content.view(self.shape), at_position


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (b, H, m, D) += a b, of (b H, m, n) and (b H, n, D)."""
    if total.dtype == a.dtype:
        total.flatten(0, 1).baddbmm_(a, b)  # a view: texts and heads lie evenly
    else:
        total += torch.bmm(a, b).view(total.shape)
