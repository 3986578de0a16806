"""Batches of text with some tokens masked, for a model that predicts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.data.batches import (
    ALL_ROWS,
    Batch,
    Blocks,
    Part,
    Share,
    Streams,
    Tensors,
)
from fullrank.data.tokenizers import Tokenizer

# numbers that keep draws of the same seed apart: of masks in training and in evaluation
_TRAINING, _EVALUATION = 0x6D61736B, 0x65766163


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
    def of(cls, tokenizer: Tokenizer, mask_id: int, *, probability: float, replaced: float, drawn: float) -> Masking:
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
        masked = self._masking.batch(text, np.random.default_rng([_TRAINING, self._seed % (1 << 64), epoch, index]))
        part = self._share.part(len(masked.inputs), masked.tokens, masked.read)
        return masked if part is None else masked.rows(part)


def iterate_masked_blocks(
    ids: np.ndarray, masking: Masking, *, batch_size: int, segment_length: int, seed: int
) -> Iterator[MaskedBatch]:
    """The text `ids` once, in blocks of `segment_length` tokens, masked for evaluation.

    The masks depend on positions in the text and on `seed` alone: not on the size of blocks and batches.
    """
    generator = np.random.default_rng([_EVALUATION, seed % (1 << 64)])
    text = Blocks(ids, batch_size=batch_size, segment_length=segment_length, start_id=int(masking.ordinary[0]))
    for index in range(text.batches_per_epoch):
        yield masking.batch(text.batch(0, index), generator)
