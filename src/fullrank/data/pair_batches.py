"""Sentence pairs as batches of about so many tokens. Every batch is a pure function of (seed, epoch, index)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.data.prepared import Pairs


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
        """The same batch on another device. To a GPU it goes beside what that computes, from pages that stay where they are."""
        gpu = torch.device(device).type == "cuda"

        def moved(tensor: Tensor | None) -> Tensor | None:
            if tensor is not None and gpu and tensor.device.type == "cpu":
                return tensor.pin_memory().to(device, non_blocking=True)
            return None if tensor is None else tensor.to(device)

        source_ids, inputs, targets = moved(self.source_ids), moved(self.inputs), moved(self.targets)
        assert source_ids is not None
        assert inputs is not None
        assert targets is not None
        return PairBatch(source_ids, moved(self.source_mask), inputs, targets, moved(self.weights))


def pair_batch(pairs: Pairs, indices: np.ndarray) -> PairBatch:
    """The batch of these pairs, in this order."""
    sources = [pairs.source(int(i)) for i in indices]
    targets = [pairs.target(int(i)) for i in indices]
    source_ids, source_mask = _padded(sources, pairs.source_eos_id)
    outputs, weights = _padded(targets, pairs.target_eos_id)
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

    Pairs are sorted by the length of their longer side, then by that of the target and of the source (with `<eos>`). Where
    one batch ends depends on lengths alone, so an epoch always has the same number of batches. `shuffle`: pairs of equal
    lengths change places and batches come in another order, drawn anew from (seed, epoch). Every pair is in exactly one
    batch of an epoch. `max_pairs`: of a batch.
    Raises InputError for a pair that is longer than `batch_tokens`.
    """

    def __init__(
        self, pairs: Pairs, *, batch_tokens: int, seed: int, shuffle: bool = True, max_pairs: int | None = None
    ) -> None:
        if batch_tokens < 1:
            raise InputError(f"train.batch_tokens: a positive number, given {batch_tokens}")
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
        self._starts = _starts(np.sort(longer), batch_tokens, max_pairs or len(pairs))
        self.tokens_per_epoch = int(target.sum())
        self.batches_per_epoch = len(self._starts) - 1
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
        """Which pairs are in batch `index` of an epoch; IndexError if there is none."""
        if epoch < 0 or not 0 <= index < self.batches_per_epoch:
            raise IndexError(
                f"batch {index} of epoch {epoch}: an epoch has batches 0 to {self.batches_per_epoch - 1}, epochs count from 0"
            )
        pairs, batches = self._orders(epoch)
        at = batches[index]
        return pairs[self._starts[at] : self._starts[at + 1]]

    def batch(self, epoch: int, index: int) -> PairBatch:
        """Batch `index` of an epoch; IndexError if there is none."""
        return pair_batch(self._pairs, self.indices(epoch, index))

    def tokens_of_batches(self, epoch: int) -> list[int]:
        """Targets that count in each batch of an epoch."""
        pairs, batches = self._orders(epoch)
        found: list[int] = np.add.reduceat(self._lengths[1][pairs], self._starts[:-1])[batches].tolist()
        return found


def _starts(longer: np.ndarray, batch_tokens: int, max_pairs: int) -> np.ndarray:
    """Where batches of pairs in rising order of length begin, and the end: the last pair of a batch sets its width."""
    starts, first = [0], 0
    for i, width in enumerate(longer.tolist()):
        if (i - first + 1) * width > batch_tokens or i - first == max_pairs:
            starts.append(i)
            first = i
    return np.array([*starts, len(longer)])
