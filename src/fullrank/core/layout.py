"""Layout of one attention call: positions of queries and keys, and the keys that each query sees. And the state of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import InputError

# Consecutive positions: (the first one, how many)
Run = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Positions of N queries and M keys, and which key each query sees; queries of self-attention are the last N of the keys.

    query_positions (N,) or (B, N), key_positions (M,) or (B, M): positions in the text, in tokens.
    causal: a query sees no later key.
    key_mask (B, M), True for tokens and False for padding; None when there is no padding.
    runs: the key positions as runs of consecutive ones, oldest first, counted from any origin; the queries are the end of the
    last run. The memory of a layer that was skipped leaves a gap between two runs. The documents of a text are one run. None
    where rows differ otherwise.
    from_start: key positions are 0, 1, .., M - 1.
    window: a query sees only keys that are less than so many tokens before it; None: all of them.
    stride: a query sees only keys that are at most so many tokens away, or a multiple of it (Sparse Transformer); None: all.
    farthest: for a layout without runs, the greatest distance from a query to a key before it, in tokens; None where the
    keys have no gaps, so that it is M - 1.
    documents (B, M): the number of the document of each key; a query sees keys of its own only. None: there is one document.
    distance_bias (T, H): what positions add to the scores of every layer at the distances in `spans` (ALiBi, T5).
    encodings (T, E): the sinusoids of the distances in `spans`, the smallest first; rotation: the tables of `Rotary` for the
    last keys: where a model makes them once for all its layers.
    """

    query_positions: Tensor
    key_positions: Tensor
    causal: bool = True
    key_mask: Tensor | None = None
    runs: tuple[Run, ...] | None = None
    from_start: bool = False
    window: int | None = None
    stride: int | None = None
    farthest: int | None = None
    documents: Tensor | None = None
    distance_bias: Tensor | None = None
    encodings: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, queries: int, keys: int | None = None, *, causal: bool = True, device: torch.device | None = None,
           key_mask: Tensor | None = None, window: int | None = None) -> Layout:  # fmt: skip
        """Lay out the last `queries` tokens of a text of `keys` tokens.

        Args:
            queries: number of queries N.
            keys: number of keys M; None: as many as queries.
            causal: whether a query sees no later key. Otherwise there may be more queries than keys (cross-attention). Both
                end at the same position.
            device: where positions are; None for the default device.
            key_mask: (B, M), True for tokens and False for padding; None: there is no padding.
            window: a query sees only keys that are less than so many tokens before it; None: all of them.

        Raises:
            ValueError: a causal layout has more queries than keys.
        """
        keys = queries if keys is None else keys
        if causal and queries > keys:
            raise ValueError(f"{queries} queries over {keys} keys: causal queries are the last ones of the keys")
        query_positions = torch.arange(keys - queries, keys, device=device)
        key_positions = torch.arange(keys, device=device)
        return cls(query_positions, key_positions, causal, key_mask, ((0, keys),), True, window)

    @classmethod
    def from_runs(cls, queries: int, runs: Iterable[Run], *, origin: int = 0, device: torch.device | None = None,
                window: int | None = None) -> Layout:  # fmt: skip
        """Lay out keys in runs of consecutive positions, and the last `queries` of them, causally.

        Args:
            queries: number of queries N, all in the last run.
            runs: first position and size of each run, the oldest first. Runs that touch become one.
            origin: position from which runs are counted, so that compiled code sees the same numbers while a text goes on.
            device: where positions are; None for the default device.
            window: a query sees only keys that are less than so many tokens before it; None: all of them.

        Raises:
            ValueError: runs overlap, or queries begin before the last run.
        """
        joined = join_runs(runs)
        if not joined or joined[-1][1] < queries:
            raise ValueError(f"{queries} queries, but the last run of keys is {joined[-1:]}")
        positions = origin + list_positions(joined, device)
        query_positions = positions[positions.shape[0] - queries :]
        from_start = len(joined) == 1 and joined[0][0] + origin == 0
        return cls(query_positions, positions, runs=joined, from_start=from_start, window=window)

    @property
    def shape(self) -> tuple[int, int]:
        """N and M, the numbers of queries and of keys."""
        return self.query_positions.shape[-1], self.key_positions.shape[-1]

    @property
    def unrestricted(self) -> bool:
        """True if every query sees every key."""
        if self.key_mask is not None or self.documents is not None or self.narrow or self.strided:
            return False
        return not self.causal or self.shape[0] == 1

    @property
    def plain_causal(self) -> bool:
        """True if the layout is causal, without padding and without earlier keys: `is_causal` of a fused kernel."""
        queries, keys = self.shape
        is_whole = self.key_mask is None and self.documents is None
        return self.causal and is_whole and queries == keys and not (self.narrow or self.strided)

    @property
    def narrow(self) -> bool:
        """True if the window hides a key from some query."""
        return self.window is not None and self.reach[1] >= self.window

    @property
    def strided(self) -> bool:
        """True if the stride hides a key from some query."""
        if self.stride is None:  # before the reach, on which compiled code would depend
            return False
        nearest, farthest = self.reach
        return 1 < self.stride < max(farthest, -nearest)

    @property
    def reach(self) -> tuple[int, int]:
        """The smallest and the greatest distance of a key that a query sees, query minus key position in tokens.

        Keys that a window, a stride or padding hides count, too.
        """
        queries, keys = self.shape
        nearest = 0 if self.causal else 1 - queries
        if self.runs is not None and self.causal:
            start, size = self.runs[-1]
            return nearest, start + size - 1 - self.runs[0][0]
        return nearest, keys - 1 if self.farthest is None else self.farthest

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The distances at which some query sees some key, as ascending intervals with both ends that do not touch."""
        nearest, farthest = self.reach
        if self.window is not None:
            farthest = min(farthest, self.window - 1)
        if self.runs is None or len(self.runs) == 1 or not self.causal:
            return ((nearest, farthest),)
        start, size = self.runs[-1]
        last = start + size - 1
        first = last - self.shape[0] + 1
        spans: list[tuple[int, int]] = []
        for start, size in reversed(self.runs):  # the nearest keys first
            low = max(nearest, first - (start + size - 1))
            high = min(farthest, last - start)
            if spans and low <= spans[-1][1] + 1:
                lowest, highest = spans[-1]
                spans[-1] = (lowest, max(high, highest))
            elif low <= high:
                spans.append((low, high))
        return tuple(spans)

    @property
    def origins(self) -> Tensor:
        """Positions (N,) or (B, N) from which distances to keys are counted: those of the queries."""
        return self.query_positions

    @property
    def distances(self) -> int:
        """T, the number of distances within `spans`."""
        return sum(high - low + 1 for low, high in self.spans)

    @property
    def from_zero(self) -> bool:
        """True if the distances within `spans` are 0, 1, .., T - 1."""
        spans = self.spans
        return len(spans) == 1 and spans[0][0] == 0

    def distance_rows(self, distances: Tensor) -> Tensor:
        """Return the index of each distance among the T within `spans`, any one for a distance that no query sees."""
        spans = self.spans
        row = distances - spans[0][0]
        for (_, before), (low, _) in pairwise(spans):
            row = torch.where(distances >= low, row - (low - before - 1), row)
        return row.clamp(0, None if self.window is None else self.distances - 1)

    def expand_bias(self) -> Tensor:
        """Expand `distance_bias` to what it adds to scores, (1 or B, H, N, M)."""
        assert self.distance_bias is not None
        distances = measure_distances(self.query_positions, self.key_positions)
        bias = F.embedding(self.distance_rows(distances), self.distance_bias)
        return bias.movedim(-1, 1)

    @property
    def tokens(self) -> Tensor | None:
        """Keys that are tokens, (B, M) or None for all; unless it is causal, a sequence without any token is seen whole."""
        mask = self.key_mask
        return mask if mask is None or self.causal else mask | ~mask.any(-1, keepdim=True)

    def visible(self) -> Tensor:
        """Compute the mask (1 or B, 1, N, M), True where a query sees a key.

        A query that would see nothing, since it or its whole sequence is padding, sees itself, or without a causal mask every
        key. Its output is never used, and no weight becomes NaN.
        """
        queries, keys = self.shape
        device = self.key_positions.device
        query_index = torch.arange(keys - queries, keys, device=device)[:, None]
        index = torch.arange(keys, device=device)
        last = query_index if self.causal else torch.full_like(query_index, keys)
        seen = (index <= last)[None, None]
        if self.window is not None or self.stride is not None:
            distances = measure_distances(self.query_positions, self.key_positions)[:, None]
            if self.window is not None:
                seen = seen & (distances < self.window)
            if self.stride is not None:
                seen = seen & ((distances.abs() <= self.stride) | (distances % self.stride == 0))
        if self.documents is not None:
            query_documents = self.documents[:, None, keys - queries :, None]
            seen = seen & (query_documents == self.documents[:, None, None, :])
        if self.key_mask is None:
            return seen
        seen = seen & self.key_mask[:, None, None, :]
        if self.causal:
            return seen | (index == query_index)
        return seen | ~seen.any(-1, keepdim=True)


def measure_distances(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Compute query minus key position, (1 or B, N, M), of positions (N,) or (B, N) and (M,) or (B, M)."""
    queries = torch.atleast_2d(query_positions)
    keys = torch.atleast_2d(key_positions)
    return queries[:, :, None] - keys[:, None, :]


def list_positions(runs: Iterable[Run], device: torch.device | None = None) -> Tensor:
    """List the positions (M,) of all keys in runs."""
    pieces = [torch.arange(start, start + size, device=device) for start, size in runs]
    return torch.cat([torch.arange(0, device=device), *pieces])


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join runs that touch, oldest first, and drop empty ones; raise ValueError if two overlap or are out of order."""
    joined: list[Run] = []
    for start, size in runs:
        if size == 0:
            continue
        end = joined[-1][0] + joined[-1][1] if joined else start
        if start < end:
            raise ValueError(f"keys overlap: one run ends at position {end}, the next begins at {start}")
        if joined and start == end:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return tuple(joined)


def find_last_runs(runs: tuple[Run, ...], size: int) -> tuple[Run, ...]:
    """Find the runs of the last `size` keys, oldest first."""
    last: list[Run] = []
    for start, length in reversed(runs):
        take = min(length, size)
        if take:
            last.append((start + length - take, take))
        size -= take
    return tuple(reversed(last))


def read_mask(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """Convert a mask to booleans; raise InputError unless it has the shape of input_ids."""
    mask = None if attention_mask is None else attention_mask.bool()
    if mask is not None and mask.shape != input_ids.shape:
        raise InputError(f"attention_mask must be {tuple(input_ids.shape)} like input_ids, given {tuple(mask.shape)}")
    return mask


def find_positions(mask: Tensor, documents: Tensor | None = None) -> Tensor:
    """Find the positions (B, M) of the tokens of `mask` (B, M) in their text or document; padding takes none."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    if documents is None:
        return positions
    begins = documents.diff(dim=1, prepend=documents[:, :1]) > 0
    first_positions = torch.where(begins, positions, 0).cummax(1).values
    return positions - first_positions


def number_documents(input_ids: Tensor, token: int, mask: Tensor | None, before: Tensor | None = None) -> Tensor:
    """Assign each token the number of its document.

    Args:
        input_ids: (B, N), the new tokens.
        token: id that begins another document.
        mask: (B, M + N), False for padding, which begins no document; None: there is no padding.
        before: (B, M), document numbers of M earlier tokens, from which counting goes on; None: there are none.

    Returns:
        Document numbers of all tokens, earlier ones included, (B, M + N).
    """
    begins = input_ids == token
    if mask is not None:
        begins = begins & mask[:, mask.shape[1] - input_ids.shape[1] :]
    documents = begins.cumsum(1)
    if before is None:
        return documents
    return torch.cat((before, before[:, -1:] + documents), dim=1)


class State:
    """State of the layers in one call, without earlier tokens. `CacheState` and `MemoryState` know some.

    layout: of the tokens of the call; positions (N,) or (B, N): those of the new ones. place: the model's `Position.place`,
    which runs once for layers of one layout.
    keeps: layers hand over their keys and values for the next call.
    """

    keeps = False

    def __init__(self, layout: Layout, place: Callable[..., Layout]) -> None:
        self.layout = layout
        self.place = place
        self.placed = False
        self.positions = layout.query_positions

    def enter(self, layer: int, x: Tensor) -> tuple[Layout, Any, Tensor | None]:
        """Return the context of `layer` beside its inputs x (B, N, E).

        It is the layout of all tokens, earlier tokens as keys and values (or sums), and earlier ones as hidden states
        (B, M, E); each of the last two is None where there are none.
        """
        if not self.placed:
            self.layout = self.place(self.layout, x)
            self.placed = True
        return self.layout, None, None

    def leave(self, layer: int, x: Tensor, pasts: list[Any]) -> None:
        """Take over the pasts of a layer.

        Args:
            layer: number of the layer.
            x: inputs of the layer (B, N, E).
            pasts: one record, keys and values or sums of all tokens so far; empty unless the state `keeps` them.
        """

    def skip(self, layer: int) -> None:
        """Pass over `layer`."""

    def next(self) -> tuple[Any, Any]:
        """Return the memory and the cache of the next call, each None where there is none."""
        return None, None
