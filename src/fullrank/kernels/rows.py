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

from fullrank.core.dropout import keep_mask
from fullrank.kernels.precision import refuse_second_order

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
        weights, kept, parts = [], [], []
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
                parts.append(dropped @ values[:, :, seen])
            out = _joined(parts)
            if p:
                out.div_(1 - p)
        ctx.save_for_backward(query, keys, values, out, *weights, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("this attention kernel", "keeps the weights")
        query, keys, values, out, *saved = ctx.saved_tensors
        cotangent = cotangent.contiguous()
        count = len(ctx.blocks)
        d_query, d_keys, d_values = [], [], []
        with torch.autocast(query.device.type, enabled=False):
            along = (out * cotangent).sum(-1, keepdim=True)
            if ctx.p:
                cotangent = cotangent / (1 - ctx.p)
            for (rows, seen), weights, kept in zip(ctx.blocks, saved[:count], saved[count:], strict=True):
                d_out = cotangent[:, :, rows]
                d_scores = d_out @ values[:, :, seen].transpose(-1, -2)
                dropped = weights
                if kept is not None:
                    d_scores.mul_(kept)
                    dropped = weights * kept
                d_scores.sub_(along[:, :, rows]).mul_(weights)
                d_query.append(d_scores @ keys[:, :, seen])
                d_keys.append(d_scores.transpose(-1, -2) @ query[:, :, rows])
                d_values.append(dropped.transpose(-1, -2) @ d_out)
            of_query, of_keys = _joined(d_query).mul_(ctx.scale), _summed(d_keys).mul_(ctx.scale)
        return of_query, of_keys, _summed(d_values), None, None, None, None


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows of all blocks, (B, H, N, D)."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _summed(parts: list[Tensor]) -> Tensor:
    """(B, H, M, D), where part i is about the first keys only and the last part about all of them."""
    if len(parts) == 1:
        return parts[0]
    total = parts[-1].to(torch.promote_types(parts[-1].dtype, torch.float32))
    for part in parts[:-1]:
        total[:, :, : part.shape[2]] += part
    return total.to(parts[-1].dtype)
