"""Batches of encoded examples: which ones go together, and how they are padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ORDER = 11  # keeps these draws apart from others of the same seed
_GROUPED = 50  # batches that are sorted by length together: enough for little padding, few enough to stay random


@dataclass(frozen=True)
class Encoded:
    """Examples as token ids: for every input of the model (`input_ids`, `token_type_ids` ...) a list of each example's.

    padding: what fills the end of a shorter row, by input.
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
        found: dict[str, Tensor] = {}
        for name, values in self.inputs.items():
            table = np.full((len(indices), longest), self.padding[name], dtype=np.int64)
            for row, i in enumerate(indices):
                table[row, : len(values[i])] = values[i]
            found[name] = torch.from_numpy(table)
        return found


@dataclass(frozen=True)
class ExampleBatch:
    """Inputs (B, N) by name, and which examples they are of."""

    inputs: dict[str, Tensor]
    indices: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.inputs["attention_mask"].sum())


class ExampleBatches:
    """Training examples in batches, in another order every epoch: a pure function of (seed, epoch, index).

    group_by_length: examples of like length share a batch. They are shuffled, sorted within groups of 50 batches, and the
    batches shuffled again. The last batch of an epoch is smaller where the examples do not come out even.
    """

    def __init__(self, examples: Encoded, *, batch_size: int, seed: int, group_by_length: bool = True) -> None:
        self._examples, self._size, self._seed, self._grouped = examples, batch_size, seed, group_by_length
        self._lengths = examples.lengths
        self._order: tuple[int, list[np.ndarray]] | None = None
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self.tokens_per_epoch = int(self._lengths.sum())

    def tokens_of_batches(self, epoch: int) -> None:
        """Not known: a budget in tokens is planned with the mean."""

    def batch(self, epoch: int, index: int) -> ExampleBatch:
        """Batch `index` of an epoch; IndexError if there is none."""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._batches(epoch)
        chosen = self._order[1][index]
        return ExampleBatch(self._examples.rows(chosen), chosen)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        generator = np.random.default_rng([_ORDER, self._seed % (1 << 64), epoch])
        order = generator.permutation(len(self._examples))
        if not self._grouped:
            return [order[i : i + self._size] for i in range(0, len(order), self._size)]
        several = self._size * _GROUPED
        parts = [order[i : i + several] for i in range(0, len(order), several)]
        order = np.concatenate([part[np.argsort(-self._lengths[part], kind="stable")] for part in parts])
        batches = [order[i : i + self._size] for i in range(0, len(order), self._size)]
        return [batches[i] for i in generator.permutation(len(batches))]


def by_length(examples: Encoded, batch_size: int) -> Iterator[ExampleBatch]:
    """All examples once, the longest first, so that there is little padding; for evaluation."""
    order = np.argsort(-examples.lengths, kind="stable")
    for i in range(0, len(order), batch_size):
        yield ExampleBatch(examples.rows(order[i : i + batch_size]), order[i : i + batch_size])


def subset(count: int, most: int | None, seed: int) -> np.ndarray:
    """Which of `count` examples make the fixed subset of `most`, drawn by `seed`, in their order; all of them for None."""
    if most is None or most >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng([_ORDER, seed]).permutation(count)[:most])
