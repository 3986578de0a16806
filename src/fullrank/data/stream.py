"""Token ids as batches. Every batch is a pure function of (seed, epoch, index), so a position in training is two integers.

The input of a target is the token before it; the first token of the text follows `start_id`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fullrank.core.errors import InputError


@dataclass(frozen=True)
class Batch:
    """inputs (B, N) int64, targets (B, N) int64, weights (B, N) float32: 1 counts, 0 is padding; None: all count."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Targets that count."""
        return self.targets.numel() if self.weights is None else int(self.weights.sum().item())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device. To a GPU it goes beside what that computes, from pages that stay where they are."""
        gpu = torch.device(device).type == "cuda"

        def moved(tensor: Tensor) -> Tensor:
            if gpu and tensor.device.type == "cpu":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        weights = None if self.weights is None else moved(self.weights)
        return Batch(moved(self.inputs), moved(self.targets), weights)


def _checked(ids: np.ndarray, batch_size: int, segment_length: int) -> None:
    if ids.ndim != 1 or len(ids) == 0:
        raise InputError(f"token ids: a non-empty sequence is wanted, given shape {tuple(ids.shape)}")
    for key, value in (("train.batch_size", batch_size), ("train.segment_length", segment_length)):
        if value < 1:
            raise InputError(f"{key}: a positive number, given {value}")


def _check_window(context: int, stride: int) -> None:
    if context < 0:
        raise InputError(f"eval.context: zero or more tokens, given {context}")
    if stride < 1:
        raise InputError(f"eval.stride: a positive number, given {stride}")


def _check_place(epoch: int, index: int, batches: int) -> None:
    if epoch < 0 or not 0 <= index < batches:
        raise IndexError(
            f"batch {index} of epoch {epoch}: an epoch has batches 0 to {batches - 1}, epochs count from 0"
        )


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed % (1 << 64), epoch]).permutation(size)


def _rows(ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, length: int, start_id: int) -> Batch:
    """The batch whose row r scores ids[starts[r]:ends[r]] (at most `length` of them), padded at its end."""
    if (ends - starts == length).all():  # nearly always: read in one go, with the token before each row
        taken = ids[np.maximum(starts[:, None] + np.arange(-1, length), 0)].astype(np.int64)
        taken[starts == 0, 0] = start_id
        # copies, also of one row, whose numbers lie without gaps: who writes to inputs must not change targets
        return Batch(torch.from_numpy(taken[:, :-1].copy()), torch.from_numpy(taken[:, 1:].copy()))
    inputs = np.full((len(starts), length), start_id, dtype=np.int64)
    targets = np.full((len(starts), length), start_id, dtype=np.int64)
    weights = np.ones((len(starts), length), dtype=np.float32)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        size = max(0, end - start)
        targets[row, :size] = ids[start:end]
        if start == 0:
            inputs[row, 1:size] = ids[: max(0, end - 1)]  # column 0 is start_id
        else:
            inputs[row, :size] = ids[start - 1 : start - 1 + size]
        weights[row, size:] = 0
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(weights))


class Blocks:
    """Consecutive blocks of `segment_length` targets, each read without what came before but its first input.

    Every token is a target exactly once in an epoch. The last block may be short: it is padded, with weight 0; the last
    batch has as many rows as blocks are left. A `segment_length` beyond the text means the whole text.
    `shuffle`: the order of blocks is a permutation drawn from (seed, epoch).
    """

    def __init__(
        self,
        ids: np.ndarray,
        *,
        batch_size: int,
        segment_length: int,
        start_id: int,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        _checked(ids, batch_size, segment_length)
        self._ids, self._start_id = np.asarray(ids), start_id
        # nobody waits for padding: a block is never longer than the text
        self._batch_size, self._length = batch_size, min(segment_length, len(ids))
        self._shuffle, self._seed = shuffle, seed
        self._blocks = -(-len(ids) // self._length)
        self.tokens_per_epoch = len(ids)
        self.batches_per_epoch = -(-self._blocks // batch_size)

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index` of an epoch; IndexError if there is none."""
        _check_place(epoch, index, self.batches_per_epoch)
        first, last = index * self._batch_size, min((index + 1) * self._batch_size, self._blocks)
        blocks = _permutation(self._seed, epoch, self._blocks)[first:last] if self._shuffle else np.arange(first, last)
        starts = blocks * self._length
        ends = np.minimum(starts + self._length, len(self._ids))
        return _rows(self._ids, starts, ends, self._length, self._start_id)

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Targets that count in each batch of an epoch: the batch with the short block has fewer."""
        sizes = np.full(self._blocks, self._length)
        sizes[-1] = len(self._ids) - (self._blocks - 1) * self._length
        if self._shuffle:
            sizes = sizes[_permutation(self._seed, epoch, self._blocks)]
        found: list[int] = np.add.reduceat(sizes, np.arange(0, self._blocks, self._batch_size)).tolist()
        return found


class Streams:
    """`batch_size` contiguous streams read side by side: row b of batch t+1 goes on where row b of batch t ended.

    remainder="drop": streams of equal length, whole segments; up to batch_size * segment_length + batch_size - 2 tokens
    at the ends of streams are never targets. remainder="keep": every token is a target exactly once; streams and their
    last segments are padded with weight 0 (for evaluation). All epochs are alike.
    """

    def __init__(
        self,
        ids: np.ndarray,
        *,
        batch_size: int,
        segment_length: int,
        start_id: int,
        remainder: Literal["drop", "keep"] = "drop",
    ) -> None:
        _checked(ids, batch_size, segment_length)
        self._ids, self._start_id, self._length = np.asarray(ids), start_id, segment_length
        if remainder == "drop":
            segments = len(ids) // batch_size // segment_length
            if segments == 0:
                raise InputError(
                    f"{len(ids):,} tokens are too few for {batch_size} streams of at least {segment_length}; "
                    "lower train.batch_size or train.segment_length"
                )
            stream = len(ids) // batch_size
            self._starts = np.arange(batch_size) * stream
            self._ends = self._starts + segments * segment_length
        else:
            stream = -(-len(ids) // batch_size)
            self._length = min(segment_length, stream)
            segments = -(-stream // self._length)
            self._starts = np.minimum(np.arange(batch_size) * stream, len(ids))
            self._ends = np.minimum(self._starts + stream, len(ids))
        self.tokens_per_epoch = int((self._ends - self._starts).sum())
        self.batches_per_epoch = segments

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index` of an epoch; IndexError if there is none."""
        _check_place(epoch, index, self.batches_per_epoch)
        starts = np.minimum(self._starts + index * self._length, self._ends)
        ends = np.minimum(starts + self._length, self._ends)
        return _rows(self._ids, starts, ends, self._length, self._start_id)

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Targets that count in each batch of an epoch: with remainder="keep", the last ones have fewer."""
        sizes, reached = self._ends - self._starts, np.arange(self.batches_per_epoch + 1) * self._length
        return [int((np.minimum(sizes, end) - np.minimum(sizes, end - self._length)).sum()) for end in reached[1:]]


class Windows:
    """Overlapping windows of `context + stride` inputs; the last `stride` targets of each count, in reading order.

    Window k reads from token k * stride - context on (the first ones from the beginning of the text, so they are shorter) and
    scores tokens k * stride .. k * stride + stride - 1. Every token is a target exactly once. Weights are 0 where a target is
    context; windows shorter than others of their batch are padded at their ends, with weight 0. All epochs are alike.
    """

    def __init__(self, ids: np.ndarray, *, batch_size: int, context: int, stride: int, start_id: int) -> None:
        _check_window(context, stride)
        _checked(ids, batch_size, context + stride)
        self._ids, self._start_id, self._batch_size = np.asarray(ids), start_id, batch_size
        self._stride = min(stride, len(ids))
        self._context = min(context, len(ids))
        self._windows = -(-len(ids) // self._stride)
        self.tokens_per_epoch = len(ids)
        self.batches_per_epoch = -(-self._windows // batch_size)

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index` of an epoch; IndexError if there is none."""
        _check_place(epoch, index, self.batches_per_epoch)
        windows = np.arange(index * self._batch_size, min((index + 1) * self._batch_size, self._windows))
        scored = windows * self._stride
        starts = np.maximum(scored - self._context, 0)
        ends = np.minimum(scored + self._stride, len(self._ids))
        batch = _rows(self._ids, starts, ends, int((ends - starts).max()), self._start_id)
        weights = torch.ones(batch.targets.shape) if batch.weights is None else batch.weights
        weights[torch.arange(weights.shape[1]) < torch.from_numpy(scored - starts)[:, None]] = 0
        return Batch(batch.inputs, batch.targets, weights)
