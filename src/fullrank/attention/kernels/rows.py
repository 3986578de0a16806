"""Plain attention on a CPU, all weights of a call at once: for short sequences and for dropout.

    A = s Q K^T,    P = softmax(A),    R = P o Z / (1 - p),    O = R V,         Z the dropout mask (all ones without dropout)
    dV = R^T dO,    dP = (dO V^T) o Z / (1 - p),    dA = P o (dP - rowsum(O o dO)),    dQ = s dA K,    dK = s dA^T Q

PyTorch's fused kernel takes no dropout on a CPU, and its bf16 backward pass is several times slower than its fp32 one for short
sequences. Scores and softmax are fp32 (or fp64); the other products, and what is kept for the backward pass, have the dtype
of the heads. Memory: B H N M numbers, twice with dropout. Limits: no double backward, no functorch transforms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullrank.attention.dropout import keep_mask


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float, p: float) -> Tensor:
    """query (B, H, N, D), keys and values (B, H, M, D), visible (1 or B, 1, N, M) boolean or None for all -> (B, H, N, D)."""
    out: Tensor = _Rows.apply(query, keys, values, visible, scale, p)
    return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float, p: float
    ) -> Tensor:
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            scores = (query.to(wide) * scale) @ keys.to(wide).transpose(-1, -2)
            if visible is not None:
                scores += torch.zeros(visible.shape, dtype=wide).masked_fill_(~visible, float("-inf"))
            weights = torch.softmax(scores, dim=-1).to(values.dtype)
            kept = keep_mask(weights.shape, p, weights) if p else None
            out = weights @ values if kept is None else ((weights * kept) @ values).div_(1 - p)
        ctx.save_for_backward(query, keys, values, weights, kept, out)
        ctx.scale, ctx.p = scale, p
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("this attention kernel has no second derivative; use fullrank.kernel('reference')")
        query, keys, values, weights, kept, out = ctx.saved_tensors
        cotangent = cotangent.contiguous()
        with torch.autocast(query.device.type, enabled=False):
            along = (out * cotangent).sum(-1, keepdim=True)
            dropped = weights
            if kept is not None:
                cotangent, dropped = cotangent / (1 - ctx.p), weights * kept
            d_values = dropped.transpose(-1, -2) @ cotangent
            d_scores = cotangent @ values.transpose(-1, -2)
            if kept is not None:
                d_scores.mul_(kept)
            d_scores.sub_(along).mul_(weights)
            d_query = (d_scores @ keys).mul_(ctx.scale)
            d_keys = (d_scores.transpose(-1, -2) @ query).mul_(ctx.scale)
        return d_query, d_keys, d_values, None, None, None
