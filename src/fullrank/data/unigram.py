"""The simplest language model there is, as a yardstick."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fullrank.data.corpus import Corpus

_CHUNK = 1 << 22


def _counts(ids: np.ndarray, entries: int) -> np.ndarray:
    """How often each id occurs; (V,) int64."""
    counts = np.zeros(entries, dtype=np.int64)
    for start in range(0, len(ids), _CHUNK):
        counts += np.bincount(ids[start : start + _CHUNK], minlength=entries)
    return counts


def unigram_nats(corpus: Corpus, without: Sequence[int] = ()) -> np.ndarray:
    """-log p(w) of each entry w, in nats, under the add-one-smoothed unigram of the training split; (V,).

    p(w) = (count of w in train + 1) / (tokens of train + V), both without the entries `without`, which have no p: infinity.
    """
    counts = _counts(corpus.ids("train"), len(corpus.tokenizer)) + 1.0
    counts[list(without)] = 0
    with np.errstate(divide="ignore"):
        nats: np.ndarray = math.log(counts.sum()) - np.log(counts)
    return nats


def unigram_perplexity(corpus: Corpus, split: str) -> float:
    """Perplexity per token of the add-one-smoothed unigram of the training split, on the same vocabulary."""
    here = _counts(corpus.ids(split), len(corpus.tokenizer))
    return math.exp(float(here @ unigram_nats(corpus)) / int(here.sum()))
