"""Causal multi-linear attention of short texts: T itself is built, and only the half of it that can be seen is multiplied.

    T_ijm = q_i . (K_j o V_m), 0 for j or m after i;      O_i = sum over slabs of keys j, those that are not after i, T_i W

A slab is some keys with all values, so that its rows of W lie together and are not copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullrank.attention.kernels.multilinear_plan import slabs
from fullrank.attention.kernels.precision import refuse_second_order


class SmallCausal(torch.autograd.Function):
    """O (B, N, E) of query (B, N, R), keys and values (B, M, R), weight (M, M, E) and later (1, N, M^2), all of one dtype.

    The queries are the last N of the M tokens; `later` is True where a pair is later than a query.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, weight: Tensor, later: Tensor) -> Tensor:
        both = _both(query, keys)
        tensor = torch.bmm(both, values.transpose(1, 2)).view(*query.shape[:2], -1).masked_fill_(later, 0.0)
        out = None
        for rows, pairs, part in _slabs(query.shape[1], weight):
            found = tensor[:, rows, pairs] @ part
            if out is None:
                out = found
            else:
                out[:, rows] += found
        ctx.save_for_backward(query, keys, values, weight, later, tensor, both)
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("multi-linear attention", "builds the tensor of all pairs")
        query, keys, values, weight, later, tensor, both = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            d_weight = torch.empty_like(weight) if ctx.needs_input_grad[3] else None
            d_tensor = torch.empty_like(tensor)
            for rows, pairs, part in _slabs(query.shape[1], weight):
                above = given[:, rows]
                d_tensor[:, rows, pairs] = above @ part.t()
                if d_weight is not None:
                    seen = tensor[:, rows, pairs].flatten(0, 1)
                    torch.mm(seen.t(), above.flatten(0, 1), out=d_weight.view(-1, weight.shape[2])[pairs])
            # what was not written is masked, too
            d_pairs = d_tensor.masked_fill_(later, 0.0).view(query.shape[0], -1, keys.shape[1])
            d_values = torch.bmm(d_pairs.transpose(1, 2), both)
            d_both = torch.bmm(d_pairs, values).view(*query.shape[:2], *keys.shape[1:])
            d_query = (d_both * keys[:, None]).sum(2)
            d_keys = (d_both * query[:, :, None]).sum(1)
        return d_query, d_keys, d_values, d_weight, None


def _both(query: Tensor, keys: Tensor) -> Tensor:
    """Q_i o K_j, (B, N M, R)."""
    return (query[:, :, None] * keys[:, None]).flatten(1, 2)


def _slabs(queries: int, weight: Tensor) -> list[tuple[slice, slice, Tensor]]:
    """(queries, pairs, their rows of W) of each slab, the queries being those that see some of its keys."""
    keys = weight.shape[0]
    return [
        (
            slice(slab.first, queries),
            slice(slab.begin * keys, slab.end * keys),
            weight[slab.begin : slab.end].flatten(0, 1),
        )
        for slab in slabs(queries, keys)
    ]
