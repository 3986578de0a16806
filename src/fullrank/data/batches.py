"""Token ids as batches: running text, also with masked tokens, and what all kinds of batches share.

Every batch is a pure function of (seed, epoch, index), so a position in training is two integers. What all kinds of batches
answer is said once, in `training.values.Batches`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fullrank.config.run import TrainConfig
from fullrank.core.errors import InputError
from fullrank.data.tokenizers import Tokenizer

# numbers that keep draws of the same seed apart
_LENGTHS = 0x6C656E67
_OFFSETS = 0x6F666673
_MASKS = 0x6D61736B
_FIXED_MASKS = 0x65766163


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device, unless it is there already.

    To a GPU it is copied from pinned memory, while the GPU computes.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Part:
    """Rows `first` .. `first + rows` - 1 of a batch of `batch_rows` rows, which `processes` processes share.

    tokens: those that the loss of the whole batch is a mean over. read: those that count as trained on.
    A process without rows reads the first row, with weight 0: it takes part in the exchange of gradients.
    """

    first: int
    rows: int
    batch_rows: int
    tokens: int
    read: int
    processes: int

    @property
    def slice(self) -> slice:
        """The rows that are read, one at least."""
        return slice(self.first, self.first + self.rows) if self.rows else slice(0, 1)


@dataclass(frozen=True)
class Shared:
    """Base of batches, which processes share by rows. part: None where one process reads all rows."""

    inputs: Any
    part: Part | None = field(default=None, kw_only=True)

    @property
    def rows(self) -> int:
        return len(self.inputs)

    @property
    def tokens(self) -> int:
        """What the loss is a mean over."""
        raise NotImplementedError

    @property
    def read(self) -> int:
        """Tokens that count as trained on."""
        return self.tokens

    def share(self, rank: int, count: int) -> Self:
        """Return the rows of process `rank` of `count`."""
        first, end = (self.rows * number // count for number in (rank, rank + 1))
        return self.take(Part(first, end - first, self.rows, self.tokens, self.read, count))

    def take(self, part: Part) -> Self:
        return dataclasses.replace(self._change(lambda tensor: tensor[part.slice]), part=part)

    def to(self, device: torch.device | str) -> Self:
        """Copy the batch to a device; tensors that are there already are not copied."""
        return self._change(lambda tensor: to_device(tensor, device))

    def _change(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, dict):
                changed[name] = {key: change(tensor) for key, tensor in value.items()}
        return dataclasses.replace(self, **changed)


# running text: the input of a target is the token before it; the first token of the text follows `start_id`


@dataclass(frozen=True)
class Batch(Shared):
    """A batch of running text.

    inputs (B, N) int64, targets (B, T) int64, weights (B, T) float32: 1 counts, 0 is padding; None: all count.
    Targets are those of the last T inputs; N is T, except where text before a segment is read again.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Targets that count."""
        return self.targets.numel() if self.weights is None else int(self.weights.sum().item())

    def take(self, part: Part) -> Self:
        batch = super().take(part)
        return batch if part.rows else dataclasses.replace(batch, weights=torch.zeros(batch.targets.shape))


@dataclass(eq=False)
class Blocks:
    """Consecutive blocks of `segment_length` targets, each read without the text before it, except for its first input.

    Every token is a target exactly once in an epoch. The last block may be short: it is padded, with weight 0; the last
    batch has as many rows as blocks are left. A `segment_length` beyond the text means the whole text.
    `shuffle`: the order of blocks is a permutation drawn from (seed, epoch).
    """

    ids: np.ndarray
    _: KW_ONLY
    batch_size: int
    segment_length: int
    start_id: int
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self._length = min(self.segment_length, len(self.ids))  # a longer block would be padding
        self._blocks = -(-len(self.ids) // self._length)
        self.batches_per_epoch = -(-self._blocks // self.batch_size)
        self._order = lru_cache(maxsize=2)(self._draw_order)  # of this epoch and the next

    def _draw_order(self, epoch: int) -> np.ndarray:
        order = np.arange(self._blocks)
        if self.shuffle:
            np.random.default_rng([self.seed, epoch]).shuffle(order)
        return order

    def batch(self, epoch: int, index: int) -> Batch:
        first = index * self.batch_size
        blocks = self._order(epoch)[first : first + self.batch_size]
        positions = blocks[:, None] * self._length + np.arange(-1, self._length)
        padding = positions[:, 1:] >= len(self.ids)
        tokens = self.ids[np.clip(positions, 0, len(self.ids) - 1)].astype(np.int64)
        tokens[positions < 0] = self.start_id
        # copies, so that a write to inputs does not change targets
        inputs = tokens[:, :-1].copy()
        targets = tokens[:, 1:].copy()
        inputs[padding] = targets[padding] = self.start_id
        weights = torch.from_numpy((~padding).astype(np.float32)) if padding.any() else None
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), weights)

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Count the targets in each batch of an epoch, without padding: a batch with the short block has fewer."""
        lengths = np.full(self._blocks, self._length)
        lengths[self._order(epoch) == self._blocks - 1] -= self._blocks * self._length - len(self.ids)
        firsts = np.arange(0, self._blocks, self.batch_size)
        return np.add.reduceat(lengths, firsts).tolist()


@dataclass(eq=False)
class Streams:
    """`batch_size` contiguous streams read side by side: row b of batch t+1 continues row b of batch t.

    Streams are of equal length and of whole segments; up to batch_size * segment_length + batch_size - 2 tokens at their ends
    are never targets.

    Keys of the train section (`options`); what is random is drawn from (seed, epoch):
    segment_deviation, half_segments: lengths of segments are random, N(L, deviation^2), a share of them N(L / 2, deviation^2),
    five tokens at least (Merity et al. 2018, §4.1). An epoch has the number of segments that fill a stream on average. Their
    lengths are then scaled to fill it exactly, which changes them by a few thousandths.
    segment_multiple: lengths of all segments but the last are multiples of it, and at least two of it before they are scaled.
    partial_shuffle: each stream begins at a random position in every epoch, and wraps around (Press 2019).
    context: tokens before a segment that are among its inputs, fewer at the beginning of a stream.
    """

    ids: np.ndarray
    options: TrainConfig
    start_id: int

    def __post_init__(self) -> None:
        options = self.options
        self._random = options.segment_deviation > 0 or options.half_segments > 0
        self._stream = len(self.ids) // options.batch_size
        segments = self._stream // options.segment_length
        if segments == 0:
            raise InputError(
                f"{len(self.ids):,} tokens are too few for {options.batch_size} streams of at least "
                f"{options.segment_length}; lower train.batch_size or train.segment_length"
            )
        if self._random:
            mean = options.segment_length * (1 - options.half_segments / 2)
            segments = max(1, round(self._stream / mean))
        self.batches_per_epoch = segments
        self._cuts = lru_cache(maxsize=2)(self._draw_cuts)  # of this epoch and the next

    def _draw_cuts(self, epoch: int) -> np.ndarray:
        """Draw the borders of the segments of an epoch, from 0 to the length of a stream."""
        options = self.options
        count = self.batches_per_epoch
        length = options.segment_length
        multiple = options.segment_multiple
        if not self._random:
            return np.arange(count + 1) * length
        generator = np.random.default_rng([options.seed, epoch, _LENGTHS])
        means = np.where(generator.random(count) < options.half_segments, length / 2, length)
        shortest = min(max(5, 2 * multiple), length)  # less than a multiple would round to none
        lengths = np.maximum(generator.normal(means, options.segment_deviation), shortest)
        stretch = self._stream / lengths.sum() / multiple
        borders = np.concatenate(([0.0], np.cumsum(lengths)))
        cuts = np.rint(borders * stretch).astype(np.int64) * multiple
        cuts[-1] = self._stream
        return cuts

    def batch(self, epoch: int, index: int) -> Batch:
        rows = self.options.batch_size
        start, end = self._cuts(epoch)[index : index + 2].tolist()
        context = min(self.options.context, start)
        positions = np.tile(np.arange(start - 1 - context, end), (rows, 1))
        if self.options.partial_shuffle:
            generator = np.random.default_rng([self.options.seed, epoch, _OFFSETS])
            offsets = generator.integers(self._stream, size=(rows, 1))
            positions = (positions + offsets) % self._stream
        positions += np.arange(rows)[:, None] * self._stream
        tokens = torch.from_numpy(self.ids[np.maximum(positions, 0)].astype(np.int64))
        tokens[torch.from_numpy(positions < 0)] = self.start_id
        return Batch(tokens[:, :-1].clone(), tokens[:, 1 + context :].clone())

    def tokens_of_batches(self, epoch: int) -> list[int]:
        lengths = np.diff(self._cuts(epoch))
        return (lengths * self.options.batch_size).tolist()


# tokens masked, for a model that predicts them


@dataclass(frozen=True)
class MaskedBatch(Shared):
    """A batch of text of which some tokens are masked, to be predicted.

    inputs (B, N) int64; at (T,) int64: positions of the chosen tokens in the flattened inputs, in order; targets (T,).
    attention_mask (B, N) float32: 0 where there is padding, on the right; None: nowhere.
    """

    inputs: Tensor
    at: Tensor
    targets: Tensor
    attention_mask: Tensor | None

    @property
    def tokens(self) -> int:
        """Tokens to predict."""
        return self.at.numel() if self.part is None else int((self.targets >= 0).sum())

    @property
    def read(self) -> int:
        """Tokens that are no padding."""
        return self.inputs.numel() if self.attention_mask is None else int(self.attention_mask.sum())

    def take(self, part: Part) -> MaskedBatch:
        """Take a part of the batch.

        Where no token of it is to be predicted, one target is -100, which does not count.
        """
        rows = part.slice
        width = self.inputs.shape[1]
        in_rows = (self.at >= part.first * width) & (self.at < (part.first + part.rows) * width)
        at = self.at[in_rows] - part.first * width
        targets = self.targets[in_rows]
        if not len(at):
            at = torch.zeros(1, dtype=torch.int64)
            targets = torch.full((1,), -100)
        mask = None if self.attention_mask is None else self.attention_mask[rows]
        return MaskedBatch(self.inputs[rows], at, targets, mask, part=part)


class Masking:
    """The rule by which tokens are masked, for models that predict them (BERT, Devlin et al. 2019).

    A token is chosen with `mlm_probability`. Of the chosen ones, a share `mask_replace_prob` becomes `<mask>` (`mask_id`), a
    share `random_replace_prob` a random token, and the rest stay. So the model cannot tell which of its inputs are true.
    marks: ids of `<eos>` and `<sos>`, which are neither chosen nor drawn.  ordinary: the others, each drawn equally often.
    """

    def __init__(self, tokenizer: Tokenizer, mask_id: int, options: TrainConfig) -> None:
        self.options = options
        self.mask_id = mask_id
        self.marks = [mark for mark in (tokenizer.eos_id, tokenizer.sos_id) if mark is not None]
        self.ordinary = np.setdiff1d(np.arange(len(tokenizer)), self.marks)

    def batch(self, text: Batch, generator: np.random.Generator) -> MaskedBatch:
        """Mask the tokens of `text`, which are its targets.

        Every token that is no padding takes three numbers of `generator`.
        """
        tokens = text.targets.numpy()
        is_token = np.ones(tokens.shape, dtype=bool) if text.weights is None else text.weights.numpy() != 0
        originals = tokens[is_token]
        choice, kind, replacement = generator.random((len(originals), 3)).T
        chosen = (choice < self.options.mlm_probability) & ~np.isin(originals, self.marks)
        mask_prob = self.options.mask_replace_prob
        corrupted = originals.copy()
        corrupted[chosen & (kind < mask_prob)] = self.mask_id
        is_random = chosen & (kind >= mask_prob) & (kind < mask_prob + self.options.random_replace_prob)
        corrupted[is_random] = self.ordinary[(replacement[is_random] * len(self.ordinary)).astype(np.int64)]
        inputs = tokens.copy()
        inputs[is_token] = corrupted
        at = np.flatnonzero(is_token)[chosen]
        return MaskedBatch(
            torch.from_numpy(inputs),
            torch.from_numpy(at),
            torch.from_numpy(tokens.ravel()[at]),
            None if is_token.all() else torch.from_numpy(is_token.astype(np.float32)),
        )


@dataclass(eq=False)
class MaskedBatches:
    """Batches of text, masked anew in every epoch: a pure function of (seed, epoch, index), as the text is."""

    text: Blocks | Streams
    masking: Masking

    def __post_init__(self) -> None:
        self.batches_per_epoch = self.text.batches_per_epoch

    def tokens_of_batches(self, epoch: int) -> list[int]:
        return self.text.tokens_of_batches(epoch)

    def batch(self, epoch: int, index: int) -> MaskedBatch:
        generator = np.random.default_rng([_MASKS, self.masking.options.seed, epoch, index])
        return self.masking.batch(self.text.batch(epoch, index), generator)


def iterate_masked_blocks(
    ids: np.ndarray, masking: Masking, *, batch_size: int, segment_length: int, seed: int
) -> Iterator[MaskedBatch]:
    """Yield a text once, in blocks, masked for evaluation.

    The masks depend on positions in the text and on `seed` alone: not on the size of blocks and batches.

    Args:
        ids: the text (T,).
        masking: the rule by which tokens are masked.
        batch_size: blocks of a batch.
        segment_length: tokens of a block.
        seed: of the masks.

    Yields:
        Batches of at most `batch_size` blocks.
    """
    generator = np.random.default_rng([_FIXED_MASKS, seed])
    text = Blocks(ids, batch_size=batch_size, segment_length=segment_length, start_id=int(masking.ordinary[0]))
    for index in range(text.batches_per_epoch):
        yield masking.batch(text.batch(0, index), generator)
