"""Perplexity of an n-gram model of the same text and vocabulary: what counting alone predicts (Kneser & Ney 1995).

With c_n(h w) the count of an n-gram, and for the orders below the highest the number of words that it follows,

    p_n(w | h) = (max(c_n(h w) - D, 0) + gamma(h) p_{n-1}(w | h')) / c_n(h),      p_0(w) = 1 / V

h' is h without its first word, c_n(h) the sum of c_n(h w) over w, and gamma(h) the sum of what was discounted after h. The
discount D of an order is Y = n_1 / (n_1 + 2 n_2), with n_k the number of n-grams of count k. `modified`: it is that of Chen
and Goodman (1999), D_k = k - (k + 1) Y n_{k+1} / n_k for the counts 1, 2, and 3 or more; where that is not positive, it is Y,
so that every word keeps a probability. Where no n-gram occurs once, Y is 0.5, as in KenLM's fallback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Grams = NDArray[np.int32]  # numbers of n-grams, fewer than tokens: half the memory

LARGEST_COUNT = 3  # counts above it have its discount


def measure_ngrams(
    train: Ids,
    texts: Sequence[Ids],
    *,
    vocab_size: int,
    start_id: int,
    order: int = 5,
    modified: bool = False,
) -> list[list[float]]:
    """Perplexities per token of each text under the n-gram models of `train` with n = 1 .. order; ids (T,) each.

    Texts are read as one stream each, which `start_id` precedes.
    """
    lengths = np.array([len(ids) for ids in (train, *texts)])
    ends = np.cumsum(lengths + order)
    places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    tokens = np.full(ends[-1], start_id, np.int32)
    for ids, place in zip((train, *texts), places, strict=True):
        tokens[place] = ids
    trained, *parts = places
    scored = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    borders = np.cumsum(lengths[1:-1])
    history = np.zeros_like(tokens)
    grams = _number_pairs(history, tokens, vocab_size)  # the n-gram that ends at each token, of the order n so far
    lower = np.full(len(scored), 1 / vocab_size)
    perplexities: list[list[float]] = [[] for _ in texts]
    for n in range(1, order + 1):
        highest = _predict(history, grams, trained, scored, lower, modified)
        for figures, probabilities in zip(perplexities, np.split(highest, borders), strict=True):
            nll = -np.log(probabilities).mean()
            figures.append(math.exp(nll))
        if n < order:
            shorter = grams
            next_history = np.zeros_like(grams)
            next_history[1:] = grams[:-1]
            grams = _number_pairs(next_history, tokens, vocab_size)
            _, firsts = np.unique(grams[trained], return_index=True)
            lower = _predict(history, shorter, trained.start + firsts, scored, lower, modified)
            history = next_history
    return perplexities


def _number_pairs(history: Grams, tokens: Grams, vocab_size: int) -> Grams:
    """Numbers from 0 of the pairs, in the order of their values: less memory than `np.unique` with `return_inverse`."""
    pairs = history.astype(np.int64) * vocab_size + tokens  # NumPy 1 would keep 32 bits
    order = np.argsort(pairs)
    ordered = pairs[order]
    is_other = np.zeros(len(pairs), bool)
    is_other[1:] = ordered[1:] != ordered[:-1]
    numbers = np.empty_like(tokens)
    numbers[order] = np.cumsum(is_other, dtype=np.int32)
    return numbers


def _predict(
    history: Grams,
    grams: Grams,
    counted: Ids | slice,
    scored: Ids,
    lower: NDArray[np.float64],
    modified: bool,
) -> NDArray[np.float64]:
    """Probabilities of the tokens at `scored`, from the n-grams that end at the tokens `counted`."""
    number = grams.max() + 1
    counts = np.bincount(grams[counted], minlength=number)
    discounts = _choose_discounts(counts, modified)
    taken = discounts[np.minimum(counts, LARGEST_COUNT)]
    different, firsts = np.unique(grams[counted], return_index=True)
    after = history[counted][firsts]
    length = history.max() + 1
    totals = np.bincount(after, counts[different], length)
    left = np.bincount(after, taken[different], length)
    before = history[scored]
    total = totals[before]
    discounted = counts - taken
    mixed = discounted[grams[scored]] + left[before] * lower
    shares = mixed / np.maximum(total, 1)
    return np.where(total > 0, shares, lower)


def _choose_discounts(counts: Ids, modified: bool) -> NDArray[np.float64]:
    number = [int((counts == k).sum()) for k in range(LARGEST_COUNT + 2)]
    once, twice = number[1:3]
    share = once / (once + 2 * twice) if once else 0.5
    discounts = [0.0] + [share] * LARGEST_COUNT
    for k in range(1, LARGEST_COUNT + 1):
        if modified and number[k]:
            discount = k - (k + 1) * share * number[k + 1] / number[k]
            if discount > 0:
                discounts[k] = min(discount, k)
    return np.array(discounts)
