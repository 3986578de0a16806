"""Pairwise coverage: few rows in which every pair of choices occurs that occurs in any row."""

import itertools


def covering(rows):
    """Few of `rows` {slot: choice} that hold every pair of choices of two slots; choices of one str() are the same."""
    rows = list(rows)
    pairs = [_pairs_of(row) for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        chosen.append(rows[best])
    return chosen


def _pairs_of(row):
    return set(itertools.combinations([(slot, str(choice)) for slot, choice in row.items()], 2))


def product(**slots):
    """Every combination."""
    return [dict(zip(slots, choices, strict=True)) for choices in itertools.product(*slots.values())]
