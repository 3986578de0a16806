"""The rank of a model's log-probabilities over many contexts: the softmax bottleneck, measured (Transformer-MoS §3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fullrank.analysis.softmax_bound import OutputLayer
from fullrank.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_BYTES = 1 << 30  # of the matrix, beyond which a part of the vocabulary is looked at ...
LARGEST_SQUARE = 1 << 32  # ... but never fewer words than contexts, up to this


@dataclass(frozen=True, eq=False)
class LogProbRank:
    """The spectrum of A (contexts T, columns C), log p of the words at C columns after each of T contexts.

    singular_values (min(T, C),), largest first; eps: the rounding of A's entries (double precision: 2.2e-16).
    vocab_size V: C is smaller where not all words were looked at. wanted: the contexts that were asked for, T where the
    text had as many. repeats: contexts left out, as they stood there before.
    """

    layer: OutputLayer
    singular_values: np.ndarray
    contexts: int
    columns: int
    vocab_size: int
    eps: float
    wanted: int
    repeats: int

    @property
    def tolerance(self) -> float:
        """What a singular value must exceed to count: s_max max(T, C) eps, as in `numpy.linalg.matrix_rank`."""
        return float(self.singular_values[0]) * max(self.contexts, self.columns) * self.eps

    @property
    def rank(self) -> int:
        """The numerical rank: how many singular values are above `tolerance`."""
        return int((self.singular_values > self.tolerance).sum())

    @property
    def effective_rank(self) -> float:
        """exp(-sum_i q_i log q_i), q_i = s_i / sum(s): the number of equal singular values of the same entropy."""
        q = self.singular_values[self.singular_values > 0]
        q = q / q.sum()
        return float(np.exp(-(q * np.log(q)).sum()))

    @property
    def full(self) -> bool:
        """Whether the rank is as large as a matrix of this shape can have."""
        return self.rank == min(self.contexts, self.columns)

    @property
    def conclusive(self) -> bool:
        """Whether the matrix is large enough to have a rank above the bound."""
        return min(self.contexts, self.columns) > self.layer.bound


def rank(
    model: nn.Module,
    input_ids: Tensor | Iterable[Tensor],
    *,
    contexts: int | None = None,
    most_bytes: int = MOST_BYTES,
    seed: int = 0,
) -> LogProbRank:
    """The rank of the log-probabilities of `model` after many contexts, and the bound that its output layer has.

        A = log p(v | context),  T contexts by V words        a plain softmax:  A = H W' + 1 b' - log Z 1'

    so that its rank is at most d + 1, and d + 2 with an output bias, however many contexts are read.
    model: a `LanguageModel` or any causal model of Hugging Face. Read in double precision and evaluation mode, on a copy.
    input_ids (B, N) int64, or several of them, read until there are enough: every row on its own, without memory. A context
    is a token and all before it in its row; contexts that repeat an earlier one are left out.
    contexts T: 2 (d + 2) + 32 if not given, and at most what input_ids hold.
    most_bytes: a larger matrix is made of fewer words, drawn with `seed`, but not of fewer words than contexts.
    Raises InputError for another kind of model, ids it does not know, or too few or too many contexts; RunError for
    log-probabilities that are not finite.
    """
    import torch

    from fullrank.analysis.log_probs import choose_contexts, collect, reader_of, singular_values

    if contexts is not None and contexts < 2:
        raise InputError(f"contexts: two or more, given {contexts}")
    with torch.no_grad():
        reader = reader_of(model)
    wanted = contexts or 2 * (reader.layer.hidden_size + 2) + 32
    batches = [input_ids] if isinstance(input_ids, torch.Tensor) else input_ids
    chosen = choose_contexts(batches, wanted, reader.known_ids)
    if chosen.count < 2:
        raise InputError(f"the text has {chosen.count} different contexts; a rank needs two or more")
    if 8 * chosen.count**2 > (allowed := max(most_bytes, LARGEST_SQUARE)):
        raise InputError(
            f"contexts: {chosen.count:,} of them need as many words, a matrix of {8 * chosen.count**2 / 2**30:.1f} GiB; give "
            f"fewer, at most {math.isqrt(allowed // 8):,}, or allow more (most_bytes)"
        )
    columns = None
    most = max(most_bytes // (8 * chosen.count), chosen.count)
    if most < reader.vocab_size:
        drawn = torch.randperm(reader.vocab_size, generator=torch.Generator().manual_seed(seed))
        columns = drawn[:most].sort().values
    matrix = collect(reader, chosen, columns)
    if not bool(matrix.any()):
        raise InputError("every log-probability is zero: the vocabulary has one word only")
    values = singular_values(matrix.to(reader.device))
    return LogProbRank(
        layer=reader.layer,
        singular_values=values,
        contexts=chosen.count,
        columns=matrix.shape[1],
        vocab_size=reader.vocab_size,
        eps=reader.eps,
        wanted=wanted,
        repeats=chosen.repeats,
    )
