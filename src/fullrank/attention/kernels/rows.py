"""Plain attention on a CPU, a block of query rows with all its weights at once: for short sequences and for dropout.

    A = s Q K^T,    P = softmax(A),    R = P o Z / (1 - p),    O = R V,         Z the dropout mask (all ones without dropout)
    dV = R^T dO,    dP = (dO V^T) o Z / (1 - p),    dA = P o (dP - rowsum(O o dO)),    dQ = s dA K,    dK = s dA^T Q

PyTorch's fused kernel takes no dropout on a CPU, and its bf16 backward pass is several times slower than its fp32 one for short
sequences. Scores, softmax and sums over blocks are fp32 (or fp64); the other products, and what is kept for the backward pass,
have the dtype of the heads. Causal blocks leave out the keys after their last query.
Memory: B H N M numbers (half of them if causal), twice with dropout. Limits: no double backward, no functorch transforms.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fullrank.attention.dropout import keep_mask

_BLOCK = 64  # query rows, at most


def attend_rows(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float, p: float, causal: bool
) -> Tensor:
    """query (B, H, N, D), keys and values (B, H, M, D) -> (B, H, N, D).

    visible (1 or B, 1, N, M) boolean, None where every query sees every key; causal: N = M and no key after its query is
    visible.
    """
    out: Tensor = _Rows.apply(query, keys, values, visible, scale, p, causal)
    return out


def _blocks(queries: int, keys: int, causal: bool) -> list[tuple[slice, slice]]:
    """Rows, and the keys that they may see."""
    count = max(-(-queries // _BLOCK), 1) if causal else 1
    ends = [queries * i // count for i in range(count + 1)]
    return [(slice(a, b), slice(0, b if causal else keys)) for a, b in pairwise(ends)]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor | None,
        scale: float,
        p: float,
        causal: bool,
    ) -> Tensor:
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        ctx.blocks = _blocks(query.shape[2], keys.shape[2], causal)
        ctx.scale, ctx.p = scale, p
        kept: list[Tensor | None] = []
        out, weights = torch.empty_like(query), []
        with torch.autocast(query.device.type, enabled=False):
            scaled, turned = query.to(wide) * scale, keys.to(wide).transpose(-1, -2)
            hidden = (
                None if visible is None else torch.zeros(visible.shape, dtype=wide).masked_fill_(~visible, -torch.inf)
            )
            for rows, seen in ctx.blocks:
                scores = scaled[:, :, rows] @ turned[..., seen]
                if hidden is not None:
                    scores += hidden[..., rows, seen]
                weights.append(torch.softmax(scores, dim=-1).to(values.dtype))
                kept.append(keep_mask(scores.shape, p, values) if p else None)
                dropped = weights[-1] if kept[-1] is None else weights[-1] * kept[-1]
                out[:, :, rows] = dropped @ values[:, :, seen]
            if p:
                out.div_(1 - p)
        ctx.save_for_backward(query, keys, values, out, *weights, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("this attention kernel has no second derivative; use fullrank.kernel('reference')")
        query, keys, values, out, *saved = ctx.saved_tensors
        cotangent = cotangent.contiguous()
        blocks = zip(ctx.blocks, saved[: len(ctx.blocks)], saved[len(ctx.blocks) :], strict=True)
        wide = torch.promote_types(query.dtype, torch.float32)
        d_query = torch.empty_like(query)
        d_keys, d_values = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
        with torch.autocast(query.device.type, enabled=False):
            along = (out * cotangent).sum(-1, keepdim=True)
            if ctx.p:
                cotangent = cotangent / (1 - ctx.p)
            for (rows, seen), weights, kept in blocks:
                d_out = cotangent[:, :, rows]
                d_scores = d_out @ values[:, :, seen].transpose(-1, -2)
                dropped = weights
                if kept is not None:
                    d_scores.mul_(kept)
                    dropped = weights * kept
                d_scores.sub_(along[:, :, rows]).mul_(weights)
                d_query[:, :, rows] = d_scores @ keys[:, :, seen]
                d_keys[:, :, seen] += d_scores.transpose(-1, -2) @ query[:, :, rows]
                d_values[:, :, seen] += dropped.transpose(-1, -2) @ d_out
        return (
            d_query.mul_(ctx.scale),
            d_keys.mul_(ctx.scale).to(keys.dtype),
            d_values.to(values.dtype),
            None,
            None,
            None,
            None,
        )
