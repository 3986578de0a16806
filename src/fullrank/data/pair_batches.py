"""Batches of sentence pairs, of about the same length together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.data.batches import (
    ALL_ROWS,
    Batch,
    Share,
    check_index,
    check_positive,
)
from fullrank.data.prepared import Pairs


@dataclass(frozen=True, kw_only=True)
class PairBatch(Batch):
    """source_ids (B, M), inputs (B, N), targets (B, N) int64; source_mask (B, M) bool, True at tokens; weights (B, N)
    float32: 1 counts, 0 is padding. Mask and weights are None where nothing is padded.

    A source ends in `<eos>`; inputs are `<eos>` y_1 .. y_n, targets y_1 .. y_n `<eos>`. Padded at the end, with `<eos>`.
    """

    source_ids: Tensor
    source_mask: Tensor | None


def pair_batch(pairs: Pairs, indices: np.ndarray, share: Share = ALL_ROWS) -> PairBatch:
    """The batch of these pairs, in this order; of a share its rows, as wide as the whole batch."""
    source_lengths, target_lengths = pairs.source_lengths[indices] + 1, pairs.target_lengths[indices] + 1
    part = share.part(len(indices), int(target_lengths.sum()))
    rows = indices if part is None else indices[part.slice]
    source_ids, source_mask = pad_sentences(
        [pairs.source(int(i)) for i in rows], pairs.source_eos_id, int(source_lengths.max())
    )
    targets, target_mask = pad_sentences(
        [pairs.target(int(i)) for i in rows], pairs.target_eos_id, int(target_lengths.max())
    )
    inputs = targets.roll(1, dims=1)  # at least one <eos> is at the end of the longest
    inputs[:, 0] = pairs.target_eos_id
    weights = None if target_mask is None else target_mask.float()
    if part is not None and not part.rows:
        weights = torch.zeros(targets.shape)
    return PairBatch(inputs, targets, weights, source_ids=source_ids, source_mask=source_mask, part=part)


def pad_sentences(
    sentences: Sequence[np.ndarray | Sequence[int]], eos_id: int, width: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """(B, N) int64: sentences with `<eos>` and padding; (B, N) bool: True at tokens, None if all are. width: N."""
    lengths = torch.tensor([len(sentence) + 1 for sentence in sentences])
    ids = np.full((len(sentences), width or int(lengths.max())), eos_id, dtype=np.int64)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return torch.from_numpy(ids), None if mask.all() else mask


class PairBatches:
    """Pairs of about the same length together; batch b has at most `batch_tokens` tokens on its longer side, padding counted.

    Pairs are sorted by the length of their longer side, then by that of the target and of the source (with `<eos>`). The ends
    of batches depend on lengths alone, so an epoch always has the same number of batches. `shuffle`: pairs of equal lengths
    change places and batches come in another order, drawn anew from (seed, epoch). Every pair is in exactly one batch of an
    epoch.
    Raises InputError for a pair that is longer than `batch_tokens`.
    """

    def __init__(
        self, pairs: Pairs, *, batch_tokens: int, seed: int, shuffle: bool = True, share: Share = ALL_ROWS
    ) -> None:
        check_positive(batch_tokens=batch_tokens)
        self._share = share
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
            if (i - starts[-1] + 1) * width > batch_tokens:
                starts.append(i)
        self._starts = np.array([*starts, len(pairs)])
        self.tokens_per_epoch = int(target.sum())
        self.batches_per_epoch = len(starts)
        self._orders = lru_cache(maxsize=2)(self._draw_order)

    def _draw_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs in the order of their lengths, and the numbers of the batches in the order in which they come."""
        source, target, longer = self._lengths
        if not self._shuffle:
            return np.lexsort((source, target, longer)), np.arange(self.batches_per_epoch)
        draw = np.random.default_rng([self._seed % (1 << 64), epoch])
        ties = draw.permutation(len(self._pairs))
        return np.lexsort((ties, source, target, longer)), draw.permutation(self.batches_per_epoch)

    def indices(self, epoch: int, index: int) -> np.ndarray:
        """Pairs of batch `index` of an epoch; IndexError if there is none."""
        check_index(epoch, index, self.batches_per_epoch)
        pairs, batches = self._orders(epoch)
        return pairs[self._starts[batches[index]] : self._starts[batches[index] + 1]]

    def batch(self, epoch: int, index: int) -> PairBatch:
        """Batch `index` of an epoch; IndexError if there is none."""
        return pair_batch(self._pairs, self.indices(epoch, index), self._share)

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Targets that count in each batch of an epoch."""
        pairs, batches = self._orders(epoch)
        tokens: list[int] = np.add.reduceat(self._lengths[1][pairs], self._starts[:-1])[batches].tolist()
        return tokens
