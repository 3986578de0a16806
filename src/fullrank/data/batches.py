"""Token ids as batches: running text, sentence pairs, and encoded examples.

Every batch is a pure function of (seed, epoch, index), so a position in training is two integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.data.prepared import Pairs

_EXAMPLE_DRAWS = 11  # keeps the draws of examples apart from others of the same seed
_GROUPED = (
    50  # batches of examples that are sorted by length together: enough for little padding, few enough to stay random
)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same tensor on another device. To a GPU it is copied while that computes, from pinned memory."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _check_index(epoch: int, index: int, batches: int) -> None:
    if epoch < 0 or not 0 <= index < batches:
        raise IndexError(
            f"batch {index} of epoch {epoch}: an epoch has batches 0 to {batches - 1}, epochs count from 0"
        )


def _check_positive(**values: int) -> None:
    for key, value in values.items():
        if value < 1:
            raise InputError(f"train.{key}: a positive number, given {value}")


# running text: the input of a target is the token before it; the first token of the text follows `start_id`


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
        """The same batch on another device."""
        weights = None if self.weights is None else to_device(self.weights, device)
        return Batch(to_device(self.inputs, device), to_device(self.targets, device), weights)


def _check_text(ids: np.ndarray, batch_size: int, segment_length: int) -> None:
    if ids.ndim != 1 or len(ids) == 0:
        raise InputError(f"token ids: a non-empty sequence is wanted, given shape {tuple(ids.shape)}")
    _check_positive(batch_size=batch_size, segment_length=segment_length)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed % (1 << 64), epoch]).permutation(size)


def _rows(ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, length: int, start_id: int) -> Batch:
    """The batch whose row r scores ids[starts[r]:ends[r]] (at most `length` of them), padded at its end."""
    if (ends - starts == length).all():  # nearly always: read in one go, with the token before each row
        taken = ids[np.maximum(starts[:, None] + np.arange(-1, length), 0)].astype(np.int64)
        taken[starts == 0, 0] = start_id
        # copies, so that a write to inputs does not change targets
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
    """Consecutive blocks of `segment_length` targets, each read without the text before it, except for its first input.

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
        _check_text(ids, batch_size, segment_length)
        self._ids, self._start_id = np.asarray(ids), start_id
        # a block is never longer than the text: nobody waits for padding
        self._batch_size, self._length = batch_size, min(segment_length, len(ids))
        self._shuffle, self._seed = shuffle, seed
        self._blocks = -(-len(ids) // self._length)
        self.tokens_per_epoch = len(ids)
        self.batches_per_epoch = -(-self._blocks // batch_size)

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index` of an epoch; IndexError if there is none."""
        _check_index(epoch, index, self.batches_per_epoch)
        first, last = index * self._batch_size, min((index + 1) * self._batch_size, self._blocks)
        blocks = _permutation(self._seed, epoch, self._blocks)[first:last] if self._shuffle else np.arange(first, last)
        starts = blocks * self._length
        ends = np.minimum(starts + self._length, len(self._ids))
        return _rows(self._ids, starts, ends, self._length, self._start_id)

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Targets that count in each batch of an epoch: the batch with the short block has fewer."""
        order = _permutation(self._seed, epoch, self._blocks) if self._shuffle else np.arange(self._blocks)
        sizes = np.minimum(len(self._ids) - order * self._length, self._length)
        tokens: list[int] = np.add.reduceat(sizes, np.arange(0, self._blocks, self._batch_size)).tolist()
        return tokens


class Streams:
    """`batch_size` contiguous streams read side by side: row b of batch t+1 continues row b of batch t.

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
        _check_text(ids, batch_size, segment_length)
        self._ids, self._start_id, self._length = np.asarray(ids), start_id, segment_length
        if remainder == "drop":
            stream = len(ids) // batch_size
            segments = stream // segment_length
            if segments == 0:
                raise InputError(
                    f"{len(ids):,} tokens are too few for {batch_size} streams of at least {segment_length}; "
                    "lower train.batch_size or train.segment_length"
                )
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
        _check_index(epoch, index, self.batches_per_epoch)
        starts = np.minimum(self._starts + index * self._length, self._ends)
        ends = np.minimum(starts + self._length, self._ends)
        return _rows(self._ids, starts, ends, self._length, self._start_id)

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Targets that count in each batch of an epoch: with remainder="keep", the last ones have fewer."""
        sizes, ends = self._ends - self._starts, np.arange(1, self.batches_per_epoch + 1) * self._length
        return [int((np.minimum(sizes, end) - np.minimum(sizes, end - self._length)).sum()) for end in ends]


class Windows:
    """Overlapping windows of `context + stride` inputs; the last `stride` targets of each count, in reading order.

    Window k reads from token k * stride - context on (the first ones from the beginning of the text, so they are shorter) and
    scores tokens k * stride .. k * stride + stride - 1. Every token is a target exactly once. Weights are 0 where a target is
    context; windows shorter than others of their batch are padded at their ends, with weight 0. All epochs are alike.
    """

    def __init__(self, ids: np.ndarray, *, batch_size: int, context: int, stride: int, start_id: int) -> None:
        if context < 0:
            raise InputError(f"eval.context: zero or more tokens, given {context}")
        if stride < 1:
            raise InputError(f"eval.stride: a positive number, given {stride}")
        _check_text(ids, batch_size, context + stride)
        self._ids, self._start_id, self._batch_size = np.asarray(ids), start_id, batch_size
        self._stride, self._context = min(stride, len(ids)), min(context, len(ids))
        self._windows = -(-len(ids) // self._stride)
        self.tokens_per_epoch = len(ids)
        self.batches_per_epoch = -(-self._windows // batch_size)

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index` of an epoch; IndexError if there is none."""
        _check_index(epoch, index, self.batches_per_epoch)
        windows = np.arange(index * self._batch_size, min((index + 1) * self._batch_size, self._windows))
        scored = windows * self._stride
        starts = np.maximum(scored - self._context, 0)
        ends = np.minimum(scored + self._stride, len(self._ids))
        batch = _rows(self._ids, starts, ends, int((ends - starts).max()), self._start_id)
        weights = torch.ones(batch.targets.shape) if batch.weights is None else batch.weights
        weights[torch.arange(weights.shape[1]) < torch.from_numpy(scored - starts)[:, None]] = 0
        return Batch(batch.inputs, batch.targets, weights)


# sentence pairs


@dataclass(frozen=True)
class PairBatch:
    """source_ids (B, M), inputs (B, N), targets (B, N) int64; source_mask (B, M) bool, True at tokens; weights (B, N)
    float32: 1 counts, 0 is padding. Mask and weights are None where nothing is padded.

    A source ends in `<eos>`; inputs are `<eos>` y_1 .. y_n, targets y_1 .. y_n `<eos>`. Padded at the end, with `<eos>`.
    """

    source_ids: Tensor
    source_mask: Tensor | None
    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Targets that count, `<eos>` among them."""
        return self.targets.numel() if self.weights is None else int(self.weights.sum().item())

    def to(self, device: torch.device | str) -> PairBatch:
        """The same batch on another device."""
        source_ids, inputs, targets = (
            to_device(tensor, device) for tensor in (self.source_ids, self.inputs, self.targets)
        )
        mask, weights = (
            None if tensor is None else to_device(tensor, device) for tensor in (self.source_mask, self.weights)
        )
        return PairBatch(source_ids, mask, inputs, targets, weights)


def pair_batch(pairs: Pairs, indices: np.ndarray) -> PairBatch:
    """The batch of these pairs, in this order."""
    source_ids, source_mask = _padded([pairs.source(int(i)) for i in indices], pairs.source_eos_id)
    outputs, weights = _padded([pairs.target(int(i)) for i in indices], pairs.target_eos_id)
    inputs = np.roll(outputs, 1, axis=1)  # at least one <eos> is at the end of the longest
    inputs[:, 0] = pairs.target_eos_id
    return PairBatch(
        torch.from_numpy(source_ids),
        None if source_mask is None else torch.from_numpy(source_mask),
        torch.from_numpy(inputs),
        torch.from_numpy(outputs),
        None if weights is None else torch.from_numpy(weights.astype(np.float32)),
    )


def _padded(sentences: list[np.ndarray], eos_id: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(B, N) int64: sentences with `<eos>` and padding; (B, N) bool: True at tokens, None if all are."""
    lengths = np.array([len(sentence) + 1 for sentence in sentences])
    ids = np.full((len(sentences), int(lengths.max())), eos_id, dtype=np.int64)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
    if (lengths == ids.shape[1]).all():
        return ids, None
    return ids, np.arange(ids.shape[1]) < lengths[:, None]


class PairBatches:
    """Pairs of about the same length together; batch b has at most `batch_tokens` tokens on its longer side, padding counted.

    Pairs are sorted by the length of their longer side, then by that of the target and of the source (with `<eos>`). The ends
    of batches depend on lengths alone, so an epoch always has the same number of batches. `shuffle`: pairs of equal lengths
    change places and batches come in another order, drawn anew from (seed, epoch). Every pair is in exactly one batch of an
    epoch. `max_pairs`: of a batch.
    Raises InputError for a pair that is longer than `batch_tokens`.
    """

    def __init__(
        self, pairs: Pairs, *, batch_tokens: int, seed: int, shuffle: bool = True, max_pairs: int | None = None
    ) -> None:
        _check_positive(batch_tokens=batch_tokens)
        if max_pairs is not None and max_pairs < 1:
            raise InputError(f"pairs of a batch: a positive number, given {max_pairs}")
        if len(pairs) == 0:
            raise InputError("there are no sentence pairs to make batches of")
        self._pairs, self._shuffle, self._seed = pairs, shuffle, seed
        source, target = pairs.source_lengths + 1, pairs.target_lengths + 1
        longer = np.maximum(source, target)
        if longer.max() > batch_tokens:
            raise InputError(
                f"train.batch_tokens: pair {int(longer.argmax()) + 1:,} of {pairs.split} has {int(longer.max()):,} tokens on "
                f"its longer side, more than a batch of {batch_tokens:,} holds; raise train.batch_tokens, or lower "
                "data.max_length (words, so that long training pairs are left out)"
            )
        self._lengths = (source, target, longer)
        # pairs in rising order of length: the last pair of a batch sets its width
        starts = [0]
        for i, width in enumerate(np.sort(longer).tolist()):
            if (i - starts[-1] + 1) * width > batch_tokens or i - starts[-1] == max_pairs:
                starts.append(i)
        self._starts = np.array([*starts, len(pairs)])
        self.tokens_per_epoch = int(target.sum())
        self.batches_per_epoch = len(starts)
        self._orders = lru_cache(maxsize=2)(self._ordered)

    def _ordered(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs in the order of their lengths, and the numbers of the batches in the order in which they come."""
        source, target, longer = self._lengths
        if not self._shuffle:
            return np.lexsort((source, target, longer)), np.arange(self.batches_per_epoch)
        draw = np.random.default_rng([self._seed % (1 << 64), epoch])
        ties = draw.permutation(len(self._pairs))
        return np.lexsort((ties, source, target, longer)), draw.permutation(self.batches_per_epoch)

    def indices(self, epoch: int, index: int) -> np.ndarray:
        """Pairs of batch `index` of an epoch; IndexError if there is none."""
        _check_index(epoch, index, self.batches_per_epoch)
        pairs, batches = self._orders(epoch)
        return pairs[self._starts[batches[index]] : self._starts[batches[index] + 1]]

    def batch(self, epoch: int, index: int) -> PairBatch:
        """Batch `index` of an epoch; IndexError if there is none."""
        return pair_batch(self._pairs, self.indices(epoch, index))

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Targets that count in each batch of an epoch."""
        pairs, batches = self._orders(epoch)
        tokens: list[int] = np.add.reduceat(self._lengths[1][pairs], self._starts[:-1])[batches].tolist()
        return tokens


# encoded examples of a task


@dataclass(frozen=True)
class Encoded:
    """Examples as token ids: for every input of the model (`input_ids`, `token_type_ids` ...) a list of each example's.

    padding: the value that fills the end of a shorter row, by input.
    """

    inputs: Mapping[str, Sequence[Sequence[int]]]
    padding: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    @property
    def lengths(self) -> np.ndarray:
        return np.fromiter((len(row) for row in self.inputs["input_ids"]), dtype=np.int64, count=len(self))

    def rows(self, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """These examples, padded on the right to the longest, each input (B, N)."""
        longest = max(len(self.inputs["input_ids"][i]) for i in indices)
        batch: dict[str, Tensor] = {}
        for name, values in self.inputs.items():
            table = np.full((len(indices), longest), self.padding[name], dtype=np.int64)
            for row, i in enumerate(indices):
                table[row, : len(values[i])] = values[i]
            batch[name] = torch.from_numpy(table)
        return batch


@dataclass(frozen=True)
class ExampleBatch:
    """Inputs (B, N) by name, and the indices of their examples."""

    inputs: dict[str, Tensor]
    indices: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.inputs["attention_mask"].sum())


class ExampleBatches:
    """Training examples in batches, in another order every epoch.

    group_by_length: examples of like length share a batch. They are shuffled, sorted within groups of 50 batches, and the
    batches shuffled again. The last batch of an epoch is smaller where the examples do not come out even.
    """

    def __init__(self, examples: Encoded, *, batch_size: int, seed: int, group_by_length: bool = True) -> None:
        self._examples, self._size, self._seed, self._grouped = examples, batch_size, seed, group_by_length
        self._lengths = examples.lengths
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self.tokens_per_epoch = int(self._lengths.sum())
        self._batches = lru_cache(maxsize=1)(self._drawn)

    def tokens_of_batches(self, epoch: int) -> None:
        """Not known: a budget in tokens is planned with the mean."""

    def batch(self, epoch: int, index: int) -> ExampleBatch:
        """Batch `index` of an epoch; IndexError if there is none."""
        chosen = self._batches(epoch)[index]
        return ExampleBatch(self._examples.rows(chosen), chosen)

    def _drawn(self, epoch: int) -> list[np.ndarray]:
        """The examples of each batch of an epoch."""

        def parts(order: np.ndarray, size: int) -> list[np.ndarray]:
            return [order[i : i + size] for i in range(0, len(order), size)]

        generator = np.random.default_rng([_EXAMPLE_DRAWS, self._seed % (1 << 64), epoch])
        order = generator.permutation(len(self._examples))
        if not self._grouped:
            return parts(order, self._size)
        groups = parts(order, self._size * _GROUPED)
        batches = parts(
            np.concatenate([group[np.argsort(-self._lengths[group], kind="stable")] for group in groups]), self._size
        )
        return [batches[i] for i in generator.permutation(len(batches))]


def by_length(examples: Encoded, batch_size: int) -> Iterator[ExampleBatch]:
    """All examples once, the longest first, so that there is little padding; for evaluation."""
    order = np.argsort(-examples.lengths, kind="stable")
    for i in range(0, len(order), batch_size):
        yield ExampleBatch(examples.rows(order[i : i + batch_size]), order[i : i + batch_size])


def subset(count: int, most: int | None, seed: int) -> np.ndarray:
    """The fixed subset of `most` of `count` examples, drawn by `seed`, in their order; all of them for None."""
    if most is None or most >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng([_EXAMPLE_DRAWS, seed]).permutation(count)[:most])
