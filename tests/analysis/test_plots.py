"""Figures of analyses: what their axes cover."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from fullrank.analysis import plots
from fullrank.analysis.plots import _rank_figure
from fullrank.analysis.rank import LogProbRank, OutputLayer
from fullrank.core.errors import InputError


@pytest.mark.parametrize("rank", [129, 700])
def test_the_rank_figure_covers_the_values_that_count(rank: int) -> None:
    """No decade without a value between those that count and the edge, and little to the right of the last one."""
    values = np.geomspace(1e4, 0.1, 700)
    values[rank:] = 1e-11  # rounding
    spectrum = LogProbRank(OutputLayer("softmax", 128, bias=True), values, 700, 7_000, 7_000, 2.2e-16, 700, 0)
    assert spectrum.rank == rank
    (axes,) = _rank_figure({"plain": spectrum}).axes
    low, high = axes.get_ylim()
    assert values[rank - 1] / 100 < low < values[rank - 1]
    assert values[0] < high < 100 * values[0]
    assert rank < axes.get_xlim()[1] < 1.3 * rank


def test_only_a_figure_of_ours_is_replaced(tmp_path: Path) -> None:
    def draw() -> Figure:
        return Figure(figsize=(1, 1))

    for _ in range(2):
        written = plots.write(draw, tmp_path, "mine")
    for file in written:
        for content in (b"", b"<svg/>", b"\x89PNG"):
            file.write_bytes(content)
            with pytest.raises(InputError, match=f"{file.name}: exists and is not a figure of fullrank"):
                plots.write(draw, tmp_path, "mine")
            assert file.read_bytes() == content
        file.unlink()
