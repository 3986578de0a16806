"""The definition: attention stage by stage, as the equations say. Everything faster is tested against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fullrank.core.dropout import dropout
from fullrank.core.layout import Layout
from fullrank.core.project import Heads
from fullrank.core.trace import LayerTrace, Trace

if TYPE_CHECKING:
    from fullrank.core.weighted import WeightedValues


def reference(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """score -> mask -> normalize -> mix -> dropout -> weighted values; (B, H, N, D)."""
    return weigh(attend, attend.scores(heads, layout), heads, layout, trace)


def weigh(attend: WeightedValues, scores: Tensor, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """Everything after the score."""
    if not layout.unrestricted:
        scores = scores.masked_fill(~layout.visible(), float("-inf"))
    weights = attend.normalize(scores)
    mixed = attend.mix(weights, heads.query)
    if trace is not None:
        trace.layers.append(LayerTrace(weights, mixed, attend.mix.matrix(heads.query)))
    dropped = dropout(mixed, attend.dropout) if attend.training else mixed
    return dropped.to(heads.values.dtype) @ heads.values
