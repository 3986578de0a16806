"""Few rows that hold all that any row holds, and every pair of choices above all."""

import itertools


def covering(rows, find=None):
    """Few of `rows` that hold all that `find(row)`, a set, has for any of them.

    find: by default every pair of choices of two slots, of rows {slot: choice}; choices of one str() are the same.
    """
    rows = list(rows)
    held = [(find or _pairs_of)(row) for row in rows]
    missing = set().union(*held)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(held[i] & missing))
        missing -= held[best]
        chosen.append(rows[best])
    return chosen


def _pairs_of(row):
    return set(itertools.combinations([(slot, str(choice)) for slot, choice in row.items()], 2))


def product(**slots):
    """Every combination."""
    return [dict(zip(slots, choices, strict=True)) for choices in itertools.product(*slots.values())]
