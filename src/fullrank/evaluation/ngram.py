"""Perplexity of an n-gram model of the same text and vocabulary: what counting alone predicts (Kneser & Ney 1995).

With c_n(h w) the count of an n-gram, and for the orders below the highest the number of words that it follows,

    p_n(w | h) = (max(c_n(h w) - D, 0) + gamma(h) p_{n-1}(w | h')) / c_n(h),      p_0(w) = 1 / V

h' is h without its first word, c_n(h) the sum of c_n(h w) over w, and gamma(h) the sum of what was discounted after h. The
discount D of an order is n_1 / (n_1 + 2 n_2), with n_k the number of n-grams of count k. Where no n-gram occurs once, it is
0.5, as in KenLM's fallback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def discount_evenly(counts: np.ndarray) -> np.ndarray:
    """Compute D of every n-gram that occurs, by the counts of all of one order (G,)."""
    once = (counts == 1).sum()
    twice = (counts == 2).sum()
    share = once / (once + 2 * twice) if once else 0.5
    return np.where(counts > 0, share, 0.0)


def measure_ngrams(
    train: np.ndarray,
    texts: Sequence[np.ndarray],
    *,
    vocab_size: int,
    start_id: int,
    order: int = 5,
    discount: Callable[[np.ndarray], np.ndarray] = discount_evenly,
) -> list[list[float]]:
    """Measure perplexities per token of each text under the n-gram models of a training text, n = 1 .. order.

    Args:
        train: training text, token ids (T,).
        texts: texts to measure, token ids (T,) each. Each is read as one stream.
        vocab_size: V.
        start_id: token that precedes each text.
        order: highest n.
        discount: gives what is taken from each of the counts of an order.

    Returns:
        For each text its perplexities, by n.
    """
    lengths = np.array([len(ids) for ids in (train, *texts)])
    ends = np.cumsum(lengths + order)
    places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    tokens = np.full(ends[-1], start_id, np.int32)  # half the memory of int64, as the numbers of n-grams below
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
        highest = _predict(history, grams, trained, scored, lower, discount)
        for figures, probabilities in zip(perplexities, np.split(highest, borders), strict=True):
            nll = -np.log(probabilities).mean()
            figures.append(math.exp(nll))
        if n < order:
            shorter = grams
            next_history = np.zeros_like(grams)
            next_history[1:] = grams[:-1]
            grams = _number_pairs(next_history, tokens, vocab_size)
            _, firsts = np.unique(grams[trained], return_index=True)
            lower = _predict(history, shorter, trained.start + firsts, scored, lower, discount)
            history = next_history
    return perplexities


def _number_pairs(history: np.ndarray, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Assign numbers from 0 to the pairs, in the order of their values.

    This takes less memory than `np.unique` with `return_inverse`.
    """
    pairs = history.astype(np.int64) * vocab_size + tokens  # NumPy 1 would keep 32 bits
    order = np.argsort(pairs)
    ordered = pairs[order]
    is_other = np.zeros(len(pairs), bool)
    is_other[1:] = ordered[1:] != ordered[:-1]
    numbers = np.empty_like(tokens)
    numbers[order] = np.cumsum(is_other, dtype=np.int32)
    return numbers


def _predict(
    history: np.ndarray,
    grams: np.ndarray,
    counted: np.ndarray | slice,
    scored: np.ndarray,
    lower: np.ndarray,
    discount: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Compute probabilities of the tokens at `scored`, from the n-grams that end at the tokens `counted`."""
    number = grams.max() + 1
    counts = np.bincount(grams[counted], minlength=number)
    taken = discount(counts)
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
