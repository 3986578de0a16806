"""Token ids as batches: running text, also with masked tokens, and what all kinds of batches share.

Every batch is a pure function of (seed, epoch, index), so a position in training is two integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.data.tokenizers import Tokenizer

# numbers that keep draws of the same seed apart
_LENGTHS, _OFFSETS, _MASKS, _FIXED_MASKS = 0x6C656E67, 0x6F666673, 0x6D61736B, 0x65766163
_COUNTED_TOGETHER = 1 << 12  # batches


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy of a tensor on another device. To a GPU it is copied while that computes, from pinned memory."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def check_index(epoch: int, index: int, batches: int) -> None:
    if epoch < 0 or not 0 <= index < batches:
        raise IndexError(
            f"batch {index} of epoch {epoch}: an epoch has batches 0 to {batches - 1}, epochs count from 0"
        )


def check_positive(**values: int) -> None:
    for key, value in values.items():
        if value < 1:
            raise InputError(f"train.{key}: a positive number, given {value}")


@dataclass(frozen=True)
class Share:
    """The rows of each batch that one of several processes reads."""

    rank: int = 0
    count: int = 1

    def part(self, rows: int, tokens: int, read: int | None = None) -> Part | None:
        """The part of a batch of `rows` rows; None where it is all of it. tokens, read: of all rows."""
        if self.count == 1:
            return None
        first, end = (rows * number // self.count for number in (self.rank, self.rank + 1))
        return Part(first, end - first, rows, tokens, tokens if read is None else read, self.count)


@dataclass(frozen=True)
class Part:
    """Rows `first` .. `first + rows` - 1 of a batch of `of` rows, which `count` processes share.

    tokens: those that the loss of the whole batch is a mean over. read: those that count as trained on.
    A process without rows reads the first row, with weight 0: it takes part in the exchange of gradients.
    """

    first: int
    rows: int
    of: int
    tokens: int
    read: int
    count: int

    @property
    def slice(self) -> slice:
        """The rows that are read, one at least."""
        return slice(self.first, self.first + self.rows) if self.rows else slice(0, 1)


ALL_ROWS = Share()


@dataclass(frozen=True)
class Tensors:
    """Base of batches, whose tensors move to a device together. part: None where one process reads all rows."""

    part: Part | None = field(default=None, kw_only=True)

    def to(self, device: torch.device | str) -> Self:
        """A copy of the batch on another device."""
        fields: dict[str, Any] = vars(self)
        moved: dict[str, Any] = {
            name: to_device(value, device) for name, value in fields.items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **moved)


# running text: the input of a target is the token before it; the first token of the text follows `start_id`


@dataclass(frozen=True)
class Batch(Tensors):
    """inputs (B, N) int64, targets (B, T) int64, weights (B, T) float32: 1 counts, 0 is padding; None: all count.

    Targets are those of the last T inputs; N is T, except where text before a segment is read again.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Targets that count."""
        return self.targets.numel() if self.weights is None else int(self.weights.sum().item())


@lru_cache(maxsize=2)  # of this epoch and the next
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    order = np.arange(size, dtype=np.int32 if size < 1 << 31 else np.int64)
    np.random.default_rng([seed % (1 << 64), epoch]).shuffle(order)
    return order


class _TextBatches:
    """Batches of a text whose rows are spans of it, `batch_size` rows at a time: here consecutive ones, in their order."""

    def __init__(
        self, ids: np.ndarray, batch_size: int, segment_length: int, start_id: int, share: Share = ALL_ROWS
    ) -> None:
        if ids.ndim != 1 or len(ids) == 0:
            raise InputError(f"token ids: a non-empty sequence is wanted, given shape {tuple(ids.shape)}")
        check_positive(batch_size=batch_size, segment_length=segment_length)
        self._ids, self._batch_size, self._start_id, self._share = np.asarray(ids), batch_size, start_id, share
        self._length = min(segment_length, len(ids))  # never longer than the text: nobody waits for padding
        self._rows = -(-len(ids) // self._length)
        self.tokens_per_epoch = len(ids)

    @property
    def batches_per_epoch(self) -> int:
        return -(-self._rows // self._batch_size)

    def _spans(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The targets [start, end) of each row that count."""
        return rows * self._length, np.minimum((rows + 1) * self._length, len(self._ids))

    def _order(self, epoch: int, batches: range) -> np.ndarray:
        """The rows of some batches, which follow each other."""
        first, last = batches.start * self._batch_size, batches.stop * self._batch_size
        return np.arange(first, min(last, self._rows))

    def _spans_of_batch(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        check_index(epoch, index, self.batches_per_epoch)
        return self._spans(epoch, self._order(epoch, range(index, index + 1)))

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index` of an epoch; IndexError if there is none."""
        starts, ends = self._spans_of_batch(epoch, index)
        length = self._measure_longest(epoch, index)
        part = self._share.part(len(starts), int((ends - starts).sum()))
        if part is None:
            return self._read(starts, ends, length, epoch)
        batch = self._read(starts[part.slice], ends[part.slice], length, epoch)
        weights = batch.weights if part.rows else torch.zeros(batch.targets.shape)
        return dataclasses.replace(batch, weights=weights, part=part)

    def _measure_longest(self, epoch: int, index: int) -> int:
        """Targets of the longest row of a batch, and of every row of it where all are padded alike."""
        return self._length

    def _read(self, starts: np.ndarray, ends: np.ndarray, length: int, epoch: int = 0) -> Batch:
        """The batch whose row r scores ids[starts[r]:ends[r]] (at most `length` of them), padded at its end."""
        at = starts[:, None] + np.arange(-1, length)
        padding = np.arange(length) >= (ends - starts)[:, None]
        read = self._ids[np.clip(at, 0, len(self._ids) - 1)].astype(np.int64)
        read[starts == 0, 0] = self._start_id
        # copies, so that a write to inputs does not change targets
        inputs, targets = read[:, :-1].copy(), read[:, 1:].copy()
        inputs[padding] = targets[padding] = self._start_id
        weights = torch.from_numpy((~padding).astype(np.float32)) if padding.any() else None
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), weights)

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Targets that count in each batch of an epoch: those with short rows have fewer."""
        tokens: list[int] = []
        for first in range(0, self.batches_per_epoch, _COUNTED_TOGETHER):
            starts, ends = self._spans(epoch, self._order(epoch, range(first, first + _COUNTED_TOGETHER)))
            tokens += np.add.reduceat(ends - starts, np.arange(0, len(starts), self._batch_size)).tolist()
        return tokens


class Blocks(_TextBatches):
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
        share: Share = ALL_ROWS,
    ) -> None:
        super().__init__(ids, batch_size, segment_length, start_id, share)
        self._shuffle, self._seed = shuffle, seed

    def _order(self, epoch: int, batches: range) -> np.ndarray:
        rows = super()._order(epoch, batches)
        return _permutation(self._seed, epoch, self._rows)[rows].astype(np.int64) if self._shuffle else rows


class Streams(_TextBatches):
    """`batch_size` contiguous streams read side by side: row b of batch t+1 continues row b of batch t.

    Streams are of equal length and of whole segments; up to batch_size * segment_length + batch_size - 2 tokens at their ends
    are never targets.

    With draws from (seed, epoch):
    deviation, half: lengths of segments are random, N(L, deviation^2), a share `half` of them N(L / 2, deviation^2), five
    tokens at least (Merity et al. 2018, §4.1). An epoch has the number of segments that fill a stream on average, and their
    lengths are stretched by the few thousandths that make them fill it exactly. multiple: all but the last are multiples of it.
    shuffle: each stream begins at a place of its own in every epoch, and goes round (partial shuffle, Press 2019).
    context: so many tokens before a segment are among its inputs, fewer at the beginning of a stream.
    """

    def __init__(
        self, ids: np.ndarray, *, batch_size: int, segment_length: int, start_id: int,
        share: Share = ALL_ROWS, seed: int = 0, deviation: float = 0.0, half: float = 0.0, multiple: int = 1,
        context: int = 0, shuffle: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(ids, batch_size, segment_length, start_id, share)
        self._seed, self._deviation, self._half, self._context, self._shuffle = seed, deviation, half, context, shuffle
        self._random, self._multiple = deviation > 0 or half > 0, multiple
        self._stream = len(ids) // batch_size
        segments = self._stream // segment_length
        if segments == 0:
            raise InputError(
                f"{len(ids):,} tokens are too few for {batch_size} streams of at least {segment_length}; "
                "lower train.batch_size or train.segment_length"
            )
        self._used = segments * segment_length
        if self._random:
            segments = max(1, round(self._stream / (segment_length * (1 - half / 2))))
            self._used = self._stream
        self.tokens_per_epoch = batch_size * self._used
        self._rows = segments * batch_size
        self._cuts = lru_cache(maxsize=2)(self._draw_cuts)  # of this epoch and the next

    def _spans(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        segments, streams = np.divmod(rows, self._batch_size)
        first = streams * self._stream
        if self._random:
            cuts = self._cuts(epoch)
            return first + cuts[segments], first + cuts[segments + 1]
        starts = first + segments * self._length
        return starts, starts + self._length

    def _draw_cuts(self, epoch: int) -> np.ndarray:
        """The borders of the segments of an epoch, of random lengths, from 0 to the length of a stream."""
        count = self.batches_per_epoch
        drawn = np.random.default_rng([self._seed % (1 << 64), epoch, _LENGTHS])
        means = np.where(drawn.random(count) < self._half, self._length / 2, self._length)
        lengths = np.maximum(drawn.normal(means, self._deviation), min(5, self._length))
        places = np.concatenate(([0.0], np.cumsum(lengths))) * (self._used / lengths.sum() / self._multiple)
        cuts = np.rint(places).astype(np.int64) * self._multiple
        cuts[-1] = self._used
        return cuts

    def _measure_longest(self, epoch: int, index: int) -> int:
        if not self._random:
            return self._length
        cuts = self._cuts(epoch)
        return int(cuts[index + 1] - cuts[index])

    def _read(self, starts: np.ndarray, ends: np.ndarray, length: int, epoch: int = 0) -> Batch:
        if not (self._context or self._shuffle):
            return super()._read(starts, ends, length, epoch)
        streams, first = np.divmod(starts, self._stream)
        context = min(self._context, int(first[0]))  # the same in all streams
        at = first[:, None] + np.arange(-1 - context, length)
        if self._shuffle:
            drawn = np.random.default_rng([self._seed % (1 << 64), epoch, _OFFSETS])
            offsets = drawn.integers(self._stream, size=self._batch_size)
            at = (at + offsets[streams][:, None]) % self._stream
        at += (streams * self._stream)[:, None]
        read = torch.from_numpy(self._ids[np.maximum(at, 0)].astype(np.int64))
        read[torch.from_numpy(at < 0)] = self._start_id
        return Batch(read[:, :-1].clone(), read[:, 1 + context :].clone())


# tokens masked, for a model that predicts them


@dataclass(frozen=True)
class MaskedBatch(Tensors):
    """inputs (B, N) int64; at (T,) int64: positions of the chosen tokens in the flattened inputs, in order; targets (T,).

    attention_mask (B, N) float32: 0 where there is padding, on the right; None: nowhere. `read`: tokens that are no padding.
    """

    inputs: Tensor
    at: Tensor
    targets: Tensor
    attention_mask: Tensor | None
    read: int

    @property
    def tokens(self) -> int:
        """Tokens to predict."""
        return self.at.numel() if self.part is None else int((self.targets >= 0).sum())

    def rows(self, part: Part) -> MaskedBatch:
        """A part of the batch; where no token of it is to be predicted, one target is -100, which does not count."""
        rows, width = part.slice, self.inputs.shape[1]
        in_rows = (self.at >= part.first * width) & (self.at < (part.first + part.rows) * width)
        at, targets = self.at[in_rows] - part.first * width, self.targets[in_rows]
        if not len(at):
            at, targets = torch.zeros(1, dtype=torch.int64), torch.full((1,), -100)
        mask = None if self.attention_mask is None else self.attention_mask[rows]
        read = self.inputs[rows].numel() if mask is None else int(mask.sum())
        return MaskedBatch(self.inputs[rows], at, targets, mask, read, part=part)


@dataclass(frozen=True)
class Masking:
    """The rule by which tokens are masked, for models that predict them (BERT, Devlin et al. 2019).

    A token is chosen with `probability`. Of the chosen ones, a share `replaced` becomes `<mask>` (`mask_id`), a share `drawn` a
    random token, and the rest stay: so a model cannot trust its input anywhere.
    marks: ids of `<eos>` and `<sos>`, which are neither chosen nor drawn.  ordinary: the others, each drawn equally often.
    """

    probability: float
    replaced: float
    drawn: float
    mask_id: int
    marks: np.ndarray
    ordinary: np.ndarray

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, mask_id: int, *, probability: float, replaced: float, drawn: float
    ) -> Masking:
        """Masking for texts of `tokenizer`. InputError if `<mask>` is an entry of it, or if it has nothing but marks."""
        if mask_id < len(tokenizer):
            raise InputError(
                f"model.vocab_size: <mask> is an entry of its own, so at least {len(tokenizer) + 1}, one more than the "
                f"vocabulary of the text; given {mask_id + 1}"
            )
        marks = np.array([i for i in (tokenizer.eos_id, tokenizer.sos_id) if i is not None], dtype=np.int64)
        ordinary = np.setdiff1d(np.arange(len(tokenizer)), marks)
        if len(ordinary) == 0:
            raise InputError("the vocabulary of the text has nothing but <eos> and <sos>, so there is nothing to mask")
        return cls(probability, replaced, drawn, mask_id, marks, ordinary)

    def batch(self, text: Batch, generator: np.random.Generator) -> MaskedBatch:
        """The tokens of `text` (its targets), masked. Every token that is no padding takes three numbers of `generator`."""
        tokens = text.targets.numpy()
        real = np.ones(tokens.shape, dtype=bool) if text.weights is None else text.weights.numpy() != 0
        read = tokens[real]
        choice, kind, replacement = generator.random((len(read), 3)).T
        chosen = (choice < self.probability) & ~np.isin(read, self.marks)
        seen = read.copy()
        seen[chosen & (kind < self.replaced)] = self.mask_id
        random = chosen & (kind >= self.replaced) & (kind < self.replaced + self.drawn)
        seen[random] = self.ordinary[(replacement[random] * len(self.ordinary)).astype(np.int64)]
        inputs = tokens.copy()
        inputs[real] = seen
        at = np.flatnonzero(real)[chosen]
        return MaskedBatch(
            torch.from_numpy(inputs),
            torch.from_numpy(at),
            torch.from_numpy(tokens.ravel()[at]),
            None if real.all() else torch.from_numpy(real.astype(np.float32)),
            len(read),
        )


class MaskedBatches:
    """Batches of text, masked anew in every epoch: a pure function of (seed, epoch, index), as the text is."""

    def __init__(self, text: Blocks | Streams, masking: Masking, *, seed: int, share: Share = ALL_ROWS) -> None:
        self._text, self._masking, self._seed, self._share = text, masking, seed, share
        self.batches_per_epoch, self.tokens_per_epoch = text.batches_per_epoch, text.tokens_per_epoch

    def tokens_of_batches(self, epoch: int) -> None:
        """None: the counts are unknown before a batch is made, so a budget in tokens is planned with their mean."""

    def batch(self, epoch: int, index: int) -> MaskedBatch:
        """Batch `index` of an epoch; IndexError if there is none."""
        text = self._text.batch(epoch, index)
        masked = self._masking.batch(text, np.random.default_rng([_MASKS, self._seed % (1 << 64), epoch, index]))
        part = self._share.part(len(masked.inputs), masked.tokens, masked.read)
        return masked if part is None else masked.rows(part)


def iterate_masked_blocks(
    ids: np.ndarray, masking: Masking, *, batch_size: int, segment_length: int, seed: int
) -> Iterator[MaskedBatch]:
    """The text `ids` once, in blocks of `segment_length` tokens, masked for evaluation.

    The masks depend on positions in the text and on `seed` alone: not on the size of blocks and batches.
    """
    generator = np.random.default_rng([_FIXED_MASKS, seed % (1 << 64)])
    text = Blocks(ids, batch_size=batch_size, segment_length=segment_length, start_id=int(masking.ordinary[0]))
    for index in range(text.batches_per_epoch):
        yield masking.batch(text.batch(0, index), generator)
