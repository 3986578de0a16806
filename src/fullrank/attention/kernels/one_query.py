"""One query over all keys, as decoding asks: few and small products, so that it is their number that takes time.

P_j = normalize(s q_j K_j^T),   O_i = (sum_j M_ji P_j) V_i
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.attention.kernels.pipeline import Pipeline

_DTYPES = (torch.float32, torch.float64)


def one_query_computes(pipeline: Pipeline) -> bool:
    """Dot products of one query in fp32 or fp64 on a CPU that nothing is hidden from, without dropout and autocast."""
    layout, values = pipeline.layout, pipeline.values
    if layout.shape[0] != 1 or not layout.unrestricted or pipeline.distances is not None or pipeline.dropout:
        return False
    same = pipeline.query.dtype == pipeline.keys.dtype == values.dtype and values.dtype in _DTYPES
    return same and values.device.type == "cpu" and values.numel() > 0 and not torch.is_autocast_enabled("cpu")


def one_query(pipeline: Pipeline) -> Tensor:
    """(B, H, 1, D)."""
    query, keys, values = pipeline.query, pipeline.keys, pipeline.values
    scores = torch.bmm((query * pipeline.scale).flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    if pipeline.normalize == "sigsoftmax":
        scores = scores + F.logsigmoid(scores)
    weights = torch.softmax(scores, -1).view(*query.shape[:2], -1)  # (B, H, M)
    if pipeline.mixing is not None:
        matrix = pipeline.mixing if pipeline.mixing.dim() == 2 else pipeline.mixing[:, 0]
        weights = matrix.to(weights.dtype).transpose(-1, -2) @ weights
    return torch.bmm(weights.flatten(0, 1)[:, None], values.flatten(0, 1)).view(*query.shape[:2], 1, -1)
