"""Encoded examples of a task as batches; each is a pure function of (seed, epoch, index)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fullrank.data.batches import ALL_ROWS, Part, Share

_EXAMPLES = 11  # keeps draws of the same seed apart from those of texts
_GROUPED = 50  # batches of examples sorted by length together: enough for little padding, few enough to stay random


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

    def rows(self, indices: Sequence[int] | np.ndarray, longest: int | None = None) -> dict[str, Tensor]:
        """These examples, padded on the right to `longest` tokens (None: to the longest of them), each input (B, N)."""
        longest = longest or max(len(self.inputs["input_ids"][i]) for i in indices)
        batch: dict[str, Tensor] = {}
        for name, values in self.inputs.items():
            table = np.full((len(indices), longest), self.padding[name], dtype=np.int64)
            for row, i in enumerate(indices):
                table[row, : len(values[i])] = values[i]
            batch[name] = torch.from_numpy(table)
        return batch


@dataclass(frozen=True)
class ExampleBatch:
    """Inputs (B, N) by name, and the indices of their examples. part: as of `Tensors`; its `tokens` are examples."""

    inputs: dict[str, Tensor]
    indices: np.ndarray
    part: Part | None = None

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.inputs["attention_mask"].sum())


class ExampleBatches:
    """Training examples in batches, in another order every epoch.

    group_by_length: examples of like length share a batch. They are shuffled, sorted within groups of 50 batches, and the
    batches shuffled again. The last batch of an epoch is smaller where the examples do not come out even.
    """

    def __init__(
        self, examples: Encoded, *, batch_size: int, seed: int, group_by_length: bool = True, share: Share = ALL_ROWS
    ) -> None:
        self._share = share
        self._examples, self._size, self._seed, self._grouped = examples, batch_size, seed, group_by_length
        self._lengths = examples.lengths
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self.tokens_per_epoch = int(self._lengths.sum())
        self._batches = lru_cache(maxsize=1)(self._draw_epoch)

    def tokens_of_batches(self, epoch: int) -> None:
        """None: the counts are unknown before a batch is made, so a budget in tokens is planned with their mean."""

    def batch(self, epoch: int, index: int) -> ExampleBatch:
        """Batch `index` of an epoch; IndexError if there is none."""
        chosen = self._batches(epoch)[index]
        part = self._share.part(len(chosen), len(chosen), int(self._lengths[chosen].sum()))
        if part is None:
            return ExampleBatch(self._examples.rows(chosen), chosen)
        rows = chosen[part.slice]
        return ExampleBatch(self._examples.rows(rows, int(self._lengths[chosen].max())), rows, part)

    def _draw_epoch(self, epoch: int) -> list[np.ndarray]:
        """The examples of each batch of an epoch."""
        generator = np.random.default_rng([_EXAMPLES, self._seed % (1 << 64), epoch])
        order = generator.permutation(len(self._examples))
        if not self._grouped:
            return _cut(order, self._size)
        groups = _cut(order, self._size * _GROUPED)
        by_length = [group[np.argsort(-self._lengths[group], kind="stable")] for group in groups]
        batches = _cut(np.concatenate(by_length), self._size)
        return [batches[i] for i in generator.permutation(len(batches))]


def _cut(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Parts of `size` entries; the last one may be smaller."""
    return [order[i : i + size] for i in range(0, len(order), size)]


def iterate_by_length(examples: Encoded, batch_size: int) -> Iterator[ExampleBatch]:
    """All examples once, the longest first, so that there is little padding; for evaluation."""
    for indices in _cut(np.argsort(-examples.lengths, kind="stable"), batch_size):
        yield ExampleBatch(examples.rows(indices), indices)


def choose_subset(count: int, most: int | None, seed: int) -> np.ndarray:
    """The fixed subset of `most` of `count` examples, drawn by `seed`, in their order; all of them for None."""
    if most is None or most >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng([_EXAMPLES, seed]).permutation(count)[:most])
