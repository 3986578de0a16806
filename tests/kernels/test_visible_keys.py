"""Visible keys as intervals equal the mask of the layout; shapes that fit."""

import pytest
import torch
from calls import LAYOUTS

from fullrank.kernels.native import find_visible_keys


def mask(visible, keys):
    """(B, N, M), pair by pair."""
    rows = max(
        len(visible.tokens) if visible.tokens is not None else 1, len(visible.first) if visible.first.dim() == 2 else 1
    )
    seen = torch.zeros(rows, len(visible.own), keys, dtype=torch.bool)
    first = visible.first.expand(rows, -1)
    for b in range(rows):
        tokens = None if visible.tokens is None else visible.tokens.expand(rows, -1)[b]
        for n in range(len(visible.own)):
            for k in range(keys):
                inside = int(first[b, n]) <= k < int(visible.end[n])
                seen[b, n, k] = (inside and (tokens is None or bool(tokens[k]))) or k == int(visible.own[n])
            if not seen[b, n].any():
                seen[b, n] = True
    return seen


@pytest.mark.parametrize("name", LAYOUTS)
def test_visible_keys_equal_the_mask(name):
    layout = LAYOUTS[name]
    visible = find_visible_keys(layout)
    assert visible is not None
    assert torch.equal(mask(visible, layout.shape[1]), layout.visible()[:, 0])
