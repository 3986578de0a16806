"""Sight as intervals equals the mask of the layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.kernels.sight import Sight, sight_of

MASK = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0], [0] * 9]).bool()
LAYOUTS = {
    "causal": fr.Layout.of(7),
    "past": fr.Layout.of(4, 9),
    "one new token": fr.Layout.of(1, 9),
    "padding": fr.Layout.of(9, key_mask=MASK),
    "past and padding": fr.Layout.of(4, 9, key_mask=MASK),
    "window": fr.Layout.of(5, 9, window=3),
    "window of one": fr.Layout.of(5, 9, window=1),
    "window and padding": fr.Layout.of(5, 9, window=3, key_mask=MASK),
    "gaps": fr.Layout.of_runs(4, ((0, 2), (5, 7))),
    "gaps and window": fr.Layout.of_runs(4, ((0, 2), (4, 1), (7, 6)), window=6),
    "cross": fr.Layout.of(5, 9, causal=False),
    "cross, more queries": fr.Layout.of(9, 3, causal=False),
    "cross and padding": fr.Layout.of(5, 9, causal=False, key_mask=MASK),
}


def seen(sight: Sight, keys: int) -> Tensor:
    """(B, N, M), pair by pair."""
    texts = [None] if sight.tokens is None else list(sight.tokens)
    found = torch.zeros(len(texts), len(sight.own), keys, dtype=torch.bool)
    for b, tokens in enumerate(texts):
        for n in range(len(sight.own)):
            for k in range(keys):
                inside = int(sight.first[n]) <= k < int(sight.end[n])
                found[b, n, k] = (inside and (tokens is None or bool(tokens[k]))) or k == int(sight.own[n])
            if not found[b, n].any():
                found[b, n] = True
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_mask(name: str) -> None:
    layout = LAYOUTS[name]
    sight = sight_of(layout)
    assert sight is not None
    assert torch.equal(seen(sight, layout.shape[1]), layout.visible()[:, 0])


def test_what_is_no_interval() -> None:
    assert sight_of(fr.Layout.of(5, 9, causal=False, window=3)) is None
    rows = torch.arange(9).expand(2, 9)
    assert sight_of(fr.Layout(rows[:, 4:], rows, window=3)) is None
