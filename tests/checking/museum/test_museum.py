"""Every leak of the museum shows on its path, with the layer named; its control, the same without the fault, passes."""

from __future__ import annotations

import pytest

from museum import caches, learnt, masks, mixtures, norms, packed, paths, summaries
from museum.exhibit import Exhibit

EXHIBITS = [e for module in (masks, paths, summaries, mixtures, norms, caches, packed, learnt) for e in module.EXHIBITS]
each = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)


@each
def test_leak_is_there_and_its_control_has_none(exhibit: Exhibit) -> None:
    """With torch alone: neither depends on what the check finds."""
    assert exhibit.moved(exhibit.leaking()) > 1e-5
    assert exhibit.moved(exhibit.control()) < 1e-6
