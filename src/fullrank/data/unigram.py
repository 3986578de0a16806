"""The simplest language model there is, as a yardstick."""

from __future__ import annotations

import math

import numpy as np

from fullrank.data.corpus import Corpus

_CHUNK = 1 << 22


def _counts(ids: np.ndarray, entries: int) -> np.ndarray:
    """How often each id occurs; (V,) int64."""
    counts = np.zeros(entries, dtype=np.int64)
    for start in range(0, len(ids), _CHUNK):
        counts += np.bincount(ids[start : start + _CHUNK], minlength=entries)
    return counts


def unigram_perplexity(corpus: Corpus, split: str) -> float:
    """Perplexity per token of the add-one-smoothed unigram of the training split, on the same vocabulary.

    p(w) = (count of w in train + 1) / (tokens of train + V)
    """
    entries = len(corpus.tokenizer)
    train = _counts(corpus.ids("train"), entries)
    here = _counts(corpus.ids(split), entries)
    nll = math.log(train.sum() + entries) - np.log(train + 1.0)  # nats, of each entry
    return math.exp(float(here @ nll) / int(here.sum()))
