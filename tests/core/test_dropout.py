"""Dropout drops each entry with its probability and independently of the others, from torch's seed."""

from __future__ import annotations

import math

import pytest
import torch

from fullrank.core.dropout import dropout, keep_mask


@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_every_entry_is_dropped_with_probability_p(p: float) -> None:
    torch.manual_seed(0)
    count, masks = 100_001, 20
    dropped = sum(int((dropout(torch.ones(count), p) == 0).sum()) for _ in range(masks))
    tolerance = 5 * math.sqrt(p * (1 - p) * count * masks) + 2**-16 * count * math.sqrt(masks)
    assert abs(dropped - p * count * masks) < tolerance


def test_a_probability_below_the_resolution_of_a_draw_is_kept_on_average() -> None:
    torch.manual_seed(0)
    p, count, masks = 2.0**-18, 2**16, 400
    dropped = sum(int((dropout(torch.ones(count), p) == 0).sum()) for _ in range(masks))
    assert 40 < dropped < 180  # 100 are expected: a quarter of the masks drop about one entry each


def test_entries_of_a_mask_are_unrelated() -> None:
    torch.manual_seed(0)
    dropped = 1 - keep_mask(torch.Size((400_000,)), 0.25, torch.empty(0))
    for lag in (1, 2, 3, 4, 8, 624):
        together = (dropped[lag:] * dropped[:-lag]).mean().item()
        assert abs(together - dropped.mean().item() ** 2) < 5 * 0.25 / math.sqrt(400_000), lag


def test_a_mask_is_a_function_of_the_seed_and_advances_it() -> None:
    torch.manual_seed(3)
    first, second = dropout(torch.ones(99), 0.5), dropout(torch.ones(99), 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(torch.ones(99), 0.5), first)
    assert not torch.equal(first, second)


def test_certain_and_impossible_dropout() -> None:
    assert dropout(torch.ones(9), 1.0).tolist() == [0.0] * 9
    assert dropout(torch.ones(9), 0.0).tolist() == [1.0] * 9
