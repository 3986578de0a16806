"""What a compiler is given: attention stage by stage, without the gather that would keep it from fusing relative scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fullrank.core.layout import Layout
from fullrank.core.project import Heads
from fullrank.core.relative import shifted_scores
from fullrank.core.score import XLRelative
from fullrank.core.trace import Trace
from fullrank.kernels.reference import reference, weigh

if TYPE_CHECKING:
    from fullrank.core.weighted import WeightedValues


def traced(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """Stages that are `expressible`, (B, H, N, D). Relative scores of causal keys in runs are shifted, all rows at once."""
    if type(attend.score) is not XLRelative or layout.runs is None or not layout.causal:
        return reference(attend, heads, layout, trace)
    query, keys, distances = heads.scored, heads.keys, heads.relative
    assert query is not None
    assert keys is not None
    assert distances is not None
    return weigh(attend, shifted_scores(attend.score, query, keys, distances, layout), heads, layout, trace)
