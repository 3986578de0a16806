"""Pairwise coverage: few rows in which every pair of choices occurs that occurs in any row."""

import itertools


def covering(rows):
    """Some of `rows` {slot: choice}, so that no pair of choices of two slots is lost; a choice is known by its str()."""
    left = [(row, set(itertools.combinations(((k, str(v)) for k, v in row.items()), 2))) for row in rows]
    missing = set().union(*(pairs for _, pairs in left))
    chosen = []
    while missing:
        row, pairs = max(left, key=lambda one: len(one[1] & missing))
        missing -= pairs
        chosen.append(row)
    return chosen


def product(**slots):
    """Every combination."""
    return [dict(zip(slots, choices, strict=True)) for choices in itertools.product(*slots.values())]
