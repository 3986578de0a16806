"""Batches of padded rows: sentence pairs of about the same length, and encoded examples of a task.

Each is a pure function of (seed, epoch, index).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.config.finetune import FinetuneTrainConfig
from fullrank.core.errors import InputError
from fullrank.data.batches import Batch, Shared
from fullrank.data.prepared import Pairs

_EXAMPLES = 11  # keeps draws of the same seed apart from those of texts
_GROUPED = 50  # batches of examples sorted by length together: enough for little padding, few enough to stay random


@dataclass(frozen=True, kw_only=True)
class PairBatch(Batch):
    """Sentence pairs with the source beside the target.

    source_ids (B, M), inputs (B, N), targets (B, N) int64; source_mask (B, M) bool, True at tokens; weights (B, N) float32:
    1 counts, 0 is padding. Mask and weights are None where nothing is padded.

    A source ends in `<eos>`; inputs are `<eos>` y_1 .. y_n, targets y_1 .. y_n `<eos>`. Padded at the end, with `<eos>`.
    """

    source_ids: Tensor
    source_mask: Tensor | None


def pair_batch(pairs: Pairs, indices: np.ndarray) -> PairBatch:
    """Make the batch of these pairs, in this order."""
    eos_id = pairs.target.language.eos_id
    source_ids, source_mask = pad_sentences([pairs.source[i] for i in indices], pairs.source.language.eos_id)
    targets, target_mask = pad_sentences([pairs.target[i] for i in indices], eos_id)
    inputs = targets.roll(1, dims=1)  # at least one <eos> is at the end of the longest
    inputs[:, 0] = eos_id
    weights = None if target_mask is None else target_mask.float()
    return PairBatch(inputs, targets, weights, source_ids=source_ids, source_mask=source_mask)


def pad_rows(rows: Sequence[np.ndarray | Sequence[int]], padding: int) -> Tensor:
    """Pad rows at their ends to the length of the longest, (B, N) int64."""
    table = np.full((len(rows), max(map(len, rows))), padding, dtype=np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(table)


def pad_sentences(sentences: Sequence[np.ndarray | Sequence[int]], eos_id: int) -> tuple[Tensor, Tensor | None]:
    """Pad sentences to (B, N) int64, each with `<eos>`, and make their mask (B, N) bool, True at tokens, None if all are."""
    lengths = torch.tensor([len(sentence) + 1 for sentence in sentences])
    ids = F.pad(pad_rows(sentences, eos_id), (0, 1), value=eos_id)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids, None if mask.all() else mask


@dataclass(eq=False)
class PairBatches:
    """Pairs of about the same length together; batch b has at most `batch_tokens` tokens on its longer side, padding counted.

    Pairs are sorted by the length of their longer side, then by that of the target and of the source (with `<eos>`). The ends
    of batches depend on lengths alone, so an epoch always has the same number of batches. `shuffle`: pairs of equal lengths
    change places and batches come in another order, drawn anew from (seed, epoch). Every pair is in exactly one batch of an
    epoch.
    Raises InputError for a pair that is longer than `batch_tokens`.
    """

    pairs: Pairs
    _: KW_ONLY
    batch_tokens: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        pairs = self.pairs
        batch_tokens = self.batch_tokens
        source = pairs.source.lengths + 1
        target = pairs.target.lengths + 1
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
        self._borders = starts[1:]
        self.batches_per_epoch = len(starts)
        self.pairs_of_batches = lru_cache(maxsize=2)(self._draw_epoch)

    def _draw_epoch(self, epoch: int) -> list[np.ndarray]:
        """Draw the pairs of each batch of an epoch."""
        if not self.shuffle:
            return np.split(np.lexsort(self._lengths), self._borders)
        draw = np.random.default_rng([self.seed, epoch])
        ties = draw.permutation(len(self.pairs))
        batches = np.split(np.lexsort((ties, *self._lengths)), self._borders)
        return [batches[i] for i in draw.permutation(len(batches))]

    def batch(self, epoch: int, index: int) -> PairBatch:
        return pair_batch(self.pairs, self.pairs_of_batches(epoch)[index])

    def tokens_of_batches(self, epoch: int) -> list[int]:
        _, target, _ = self._lengths
        return [int(target[chosen].sum()) for chosen in self.pairs_of_batches(epoch)]


# examples of a task


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
        return np.array([len(row) for row in self.inputs["input_ids"]])

    def rows(self, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Return these examples, padded on the right to the longest of them, each input (B, N)."""
        batch = {}
        for name, values in self.inputs.items():
            batch[name] = pad_rows([values[i] for i in indices], self.padding[name])
        return batch


@dataclass(frozen=True)
class ExampleBatch(Shared):
    """A batch of examples: inputs (B, N) by name; indices (B,): the numbers of the examples, each of which has one loss."""

    inputs: dict[str, Tensor]
    indices: Tensor

    @property
    def rows(self) -> int:
        return len(self.indices)

    @property
    def tokens(self) -> int:
        """Examples that count."""
        return self.rows if self.part is None else self.part.rows

    @property
    def read(self) -> int:
        """Tokens without padding."""
        return int(self.inputs["attention_mask"].sum())


@dataclass(eq=False)
class ExampleBatches:
    """Training examples in batches, in another order every epoch.

    train.group_by_length: examples of like length share a batch. They are shuffled, sorted within groups of 50 batches, and the
    batches shuffled again. The last batch of an epoch is smaller where the examples do not come out even.
    """

    examples: Encoded
    options: FinetuneTrainConfig

    def __post_init__(self) -> None:
        self._lengths = self.examples.lengths
        self.batches_per_epoch = -(-len(self.examples) // self.options.batch_size)
        self._batches = lru_cache(maxsize=1)(self._draw_epoch)

    def tokens_of_batches(self, epoch: int) -> list[int]:
        return [int(self._lengths[chosen].sum()) for chosen in self._batches(epoch)]

    def batch(self, epoch: int, index: int) -> ExampleBatch:
        chosen = self._batches(epoch)[index]
        return ExampleBatch(self.examples.rows(chosen), torch.from_numpy(chosen))

    def _draw_epoch(self, epoch: int) -> list[np.ndarray]:
        """Draw the examples of each batch of an epoch."""
        size = self.options.batch_size
        generator = np.random.default_rng([_EXAMPLES, self.options.seed, epoch])
        order = generator.permutation(len(self.examples))
        if not self.options.group_by_length:
            return _cut(order, size)
        groups = _cut(order, size * _GROUPED)
        by_length = [group[np.argsort(-self._lengths[group], kind="stable")] for group in groups]
        batches = _cut(np.concatenate(by_length), size)
        return [batches[i] for i in generator.permutation(len(batches))]


def _cut(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut an order into parts of `size` entries; the last one may be smaller."""
    return np.split(order, range(size, len(order), size))


def batches_by_length(lengths: Sequence[int], batch_size: int, *, usual: int | None = None) -> Iterator[list[int]]:
    """Group texts of like lengths, the longest first, so that there is little padding.

    Args:
        lengths: tokens of each text.
        batch_size: the most texts of a batch.
        usual: length of a usual text; a batch of longer texts has fewer of them. None: all batches may be full.

    Yields:
        Indices of the texts of a batch.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        most = batch_size
        if usual is not None:
            most = max(1, min(batch_size, batch_size * usual // lengths[order[0]]))
        yield order[:most]
        order = order[most:]


def choose_subset(count: int, most: int | None, seed: int) -> np.ndarray:
    """Choose a fixed subset of examples.

    Args:
        count: examples that there are.
        most: size of the subset; None for all.
        seed: of the draw.

    Returns:
        Indices of the examples, ascending.
    """
    return np.sort(np.random.default_rng([_EXAMPLES, seed]).permutation(count)[:most])
