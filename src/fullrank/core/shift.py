"""The shift of relative attention as a view, for keys in pieces and within a window.

A block of n query rows meets the w keys of one run. `raw` holds for each row its products with L rows of the table of
distances, the farthest first; the wanted number of row i and key j stands at `begin + i (L - 1) + j` of them all
(docs/derivations/relative_attention.md). L > w, so that no two pairs share a number and the view can be written too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from .layout import Layout

_KEPT: Any = WeakTensorKeyDictionary()  # owner of a table -> (which view of it, the same in descending order)


@dataclass(frozen=True)
class Piece:
    """Keys of one run, for a block of query rows.

    keys: which ones; table: the L rows of the descending table that are multiplied, some of them perhaps idle;
    begin: where in `raw` the view begins.
    """

    keys: slice
    table: slice
    begin: int


def pieces(layout: Layout, first: int, end: int) -> tuple[Piece, ...]:
    """For query rows `first` .. `end` - 1 of a layout with runs, the keys that some of them sees, oldest first."""
    rows, spans, total = end - first, layout.spans, layout.distances
    after = layout.runs[-1][0] + layout.runs[-1][1] if layout.runs else 0
    oldest, newest = after - layout.shape[0] + first, after - layout.shape[0] + end - 1  # positions of the rows
    found, column = [], 0
    for position, size in layout.runs or ():
        start, stop = position, min(position + size, newest + 1)
        if layout.window is not None:
            start = max(start, oldest - layout.window + 1)
        if start < stop:
            width = stop - start
            farthest, nearest = newest - start, max(oldest - stop + 1, 0)
            known = farthest if layout.window is None else min(farthest, layout.window - 1)
            row = total - 1 - _row(spans, known)
            table = slice(row, row + max(known - nearest, width) + 1)
            keys = slice(column + start - position, column + stop - position)
            found.append(Piece(keys, table, rows - 1 - (farthest - known)))
        column += size
    return tuple(found)


def _row(spans: Sequence[tuple[int, int]], distance: int) -> int:
    """Which of the distances within `spans` it is, the smallest first."""
    row = 0
    for low, high in spans:
        if distance <= high:
            return row + distance - low
        row += high - low + 1
    raise AssertionError(f"distance {distance} is not within {spans}")


def descending(relative: Tensor, rows: int) -> Tensor:
    """Keys of distances (H, T, D), the farthest first, and idle rows after them so that there are at least `rows`.

    Idle rows repeat the nearest one: nothing that is read or written by way of them ever counts.
    """
    idle = max(rows - relative.shape[1], 0)
    return torch.cat((relative.flip(1), relative[:, :1].expand(-1, idle, -1)), dim=1)


def kept_descending(relative: Tensor, rows: int) -> Tensor:
    """The same without gradients, made once for a table that is read again: in evaluation, by the next segment.

    It is kept as long as the tensor lives of which `relative` is a view, and made anew if that was changed.
    """
    if relative.is_inference():  # such tensors do not tell whether they were changed
        return descending(relative, rows)
    owner = relative if relative._base is None else relative._base
    place = (relative.storage_offset(), relative.shape, relative.stride(), relative._version, rows)
    known = _KEPT.get(owner)
    if known is None or known[0] != place:
        known = _KEPT[owner] = (place, descending(relative, rows))
    table: Tensor = known[1]
    return table


def shift(raw: Tensor, piece: Piece) -> Tensor:
    """(.., n, L) without gaps -> the view (.., n, w) of it."""
    rows, step = raw.shape[-2], raw.shape[-1] - 1
    flat = raw.flatten(-2)[..., piece.begin : piece.begin + rows * step]
    return flat.unflatten(-1, (rows, step))[..., : piece.keys.stop - piece.keys.start]


def shifted(position: Tensor, relative: Tensor, layout: Layout) -> Tensor:
    """position (B, H, N, D) times keys of distances (H, T, D), one number for each key, (B, H, N, M).

    Numbers of keys that a query does not see are finite and mean nothing. All rows at once, for a compiler.
    """
    found = pieces(layout, 0, layout.shape[0])
    table = descending(relative[:, : layout.distances], max(piece.table.stop for piece in found))
    parts = [shift(position @ table[:, piece.table].transpose(-1, -2), piece) for piece in found]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    hidden = found[0].keys.start  # no query sees the first keys
    return F.pad(whole, (hidden, 0)) if hidden else whole
