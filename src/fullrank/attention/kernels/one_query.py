"""One query over all keys, as decoding asks: few and small products, so that it is their number that takes time.

P_j = normalize(s q_j K_j^T),   O_i = (sum_j M_ji P_j) V_i
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullrank.attention.kernels.pipeline import pipeline_of
from fullrank.attention.layout import Layout
from fullrank.attention.project import Heads
from fullrank.attention.score import DotProduct

if TYPE_CHECKING:
    from fullrank.attention.weighted import WeightedValues

_DTYPES = (torch.float32, torch.float64)


def one_query_computes(attend: WeightedValues, heads: Heads, layout: Layout) -> bool:
    """Of stages that are `expressible`: dot products in fp32 or fp64 that nothing is hidden from, without dropout."""
    values, dropped = heads.values, attend.training and attend.dropout
    if layout.shape[0] != 1 or not layout.unrestricted or dropped or type(attend.score) is not DotProduct:
        return False
    return values.dtype in _DTYPES and values.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def one_query(attend: WeightedValues, heads: Heads, layout: Layout) -> Tensor:
    """(B, H, 1, D)."""
    pipeline = pipeline_of(attend, heads, layout)
    query, keys, values = pipeline.query, pipeline.keys, pipeline.values
    scores = torch.bmm((query * pipeline.scale).flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    weights: Tensor = attend.normalize(scores).view(*query.shape[:2], -1)  # (B, H, M)
    if pipeline.mixing is not None:
        matrix = pipeline.mixing if pipeline.mixing.dim() == 2 else pipeline.mixing[:, 0]
        weights = matrix.to(weights.dtype).transpose(-1, -2) @ weights
    return torch.bmm(weights.flatten(0, 1)[:, None], values.flatten(0, 1)).view(*query.shape[:2], 1, -1)
