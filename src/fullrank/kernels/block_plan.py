"""How the kernel of query blocks cuts a call: texts together, query rows, the keys that these see, and which they do not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fullrank.core.engine import Problem
from fullrank.core.shift import Piece, pieces
from fullrank.kernels.sight import Sight, sight_of


@dataclass(frozen=True)
class Limits:
    """Texts stand together up to about so many scores for one thread; query rows of a block, at least and at most."""

    numbers: int
    least: int
    most: int


# On a CPU short texts stand together until their scores fill the cache that a core has beside the first (1 MiB and more), so
# that few operations are called. A long text has 64 rows at least: with fewer, matrix products and the sums over blocks of the
# gradients of all keys become slow sooner than scores that only the last cache holds. Elsewhere launches cost more than memory.
_FORWARD = {"cpu": Limits(2**18, 64, 128)}
_BACKWARD = {"cpu": Limits(2**18, 64, 128)}
_ELSEWHERE = Limits(2**25, 64, 512)
_ROOM = {"cpu": 2**21}  # scores of a block with more rows than the least; elsewhere 2^25
_SHARE = 8  # of causal blocks up to so many: of the n rows by m keys that a block computes, n (n - 1) / 2 are not seen


@dataclass(frozen=True)
class Block:
    """Query rows and the keys that some of them sees, in pieces where scores are relative.

    later (n, n): -inf at those of the last n keys that come after a row; None where no key does.
    aged (n, x): of the first x of the keys, True where the window hides one from a row; None without such keys.
    """

    rows: slice
    keys: slice
    pieces: tuple[Piece, ...]
    later: Tensor | None
    aged: Tensor | None

    @property
    def size(self) -> tuple[int, int]:
        """(n, m), rows and keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


@dataclass(frozen=True)
class Plan:
    """Groups of texts, and the blocks into which each of them is cut. tokens (B, M): see `Sight`; None without padding."""

    texts: tuple[slice, ...]
    blocks: tuple[Block, ...]
    tokens: Tensor | None
    causal: bool

    def numbers(self, query: torch.Size) -> int:
        """The most scores of a block, or products with distances, or gradients of its keys. query: (B, H, N, D)."""
        most = max(max(block.size[0], query[3]) * _width(block) for block in self.blocks)
        return max(texts.stop - texts.start for texts in self.texts) * query[1] * most

    @property
    def table_rows(self) -> int:
        """How many rows of the descending table of distances, idle ones included, these blocks read."""
        return max(piece.table.stop for block in self.blocks for piece in block.pieces)

    def hide(self, scores: Tensor, block: Block, texts: slice) -> Tensor:
        """-inf at keys that a row does not see, in place; scores (H b, n, m), finite."""
        if block.later is not None:
            scores[..., scores.shape[-1] - block.size[0] :].add_(block.later)
        if block.aged is not None:
            scores[..., : block.aged.shape[1]].masked_fill_(block.aged, float("-inf"))
        if self.tokens is not None:
            hidden = self._padding(block, texts, scores)
            scores.unflatten(0, (-1, hidden.shape[0])).add_(hidden)
        return scores

    def _padding(self, block: Block, texts: slice, like: Tensor) -> Tensor:
        """-inf at padding, (b, n or 1, m): a causal query sees its own token, even if that is padding itself."""
        assert self.tokens is not None
        tokens, (rows, width) = self.tokens[texts, None, block.keys], block.size
        hidden = like.new_zeros(tokens.shape).masked_fill_(~tokens, float("-inf"))
        if not self.causal:
            return hidden
        hidden = hidden.repeat(1, rows, 1)
        hidden.diagonal(width - rows, 1, 2).zero_()
        return hidden


def plan(problem: Problem, *, backward: bool, threads: int | None = None) -> Plan:
    """How a call is cut, in the backward pass or before; on a CPU for so many threads, or those that there are.

    The layout is one whose `sight_of` there is, with runs and causal if scores are relative.
    """
    query, layout, sight = problem.query, problem.layout, sight_of(problem.layout)
    assert sight is not None
    batch, heads, queries, _ = query.shape
    device = query.device.type
    limits = (_BACKWARD if backward else _FORWARD).get(device, _ELSEWHERE)
    numbers = limits.numbers * ((threads or torch.get_num_threads()) if device == "cpu" else 1)
    first, end = sight.first.tolist(), sight.end.tolist()
    widest = max(stop - start for start, stop in zip(first, end, strict=True))
    most = min(limits.most, _ROOM.get(device, 2**25) // (heads * widest), -(-queries // _SHARE))
    count = -(-queries // max(most, limits.least))  # blocks of nearly as many rows each
    later: dict[int, Tensor] = {}
    found = []
    for row, stop in pairwise(queries * i // count for i in range(count + 1)):
        size, keys = stop - row, slice(first[row], end[stop - 1])
        if layout.causal and size > 1 and size not in later:
            hidden = torch.full((size, size), float("-inf"), dtype=_wide(query), device=query.device)
            later[size] = hidden.triu_(1)
        parts = () if problem.distances is None else pieces(layout, row, stop)
        aged = _aged(sight, row, stop, query.device) if first[stop - 1] > first[row] else None
        found.append(Block(slice(row, stop), keys, parts, later.get(size), aged))
    largest = heads * max(block.size[0] * _width(block) for block in found)
    together = max(1, numbers // largest)
    texts = tuple(slice(text, min(text + together, batch)) for text in range(0, batch, together))
    tokens = None if sight.tokens is None else sight.tokens.expand(batch, -1)  # all texts may share a mask
    return Plan(texts, tuple(found), tokens, layout.causal)


def _aged(sight: Sight, row: int, stop: int, device: torch.device) -> Tensor:
    start, last = int(sight.first[row]), int(sight.first[stop - 1])
    return (torch.arange(start, last, device="cpu") < sight.first[row:stop, None]).to(device)


def _width(block: Block) -> int:
    """Keys, or distances with which products are formed."""
    return max([block.size[1], *(piece.table.stop - piece.table.start for piece in block.pieces)])


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
