"""Causal multi-linear attention of short texts: T itself is built, and only the half of it that can be seen is multiplied.

    T_ijm = q_i . (K_j o V_m), 0 for j or m after i;      O_i = sum over slabs of keys j, those that are not after i, T_i W

A slab is some keys with all values, so that its rows of W lie together and are not copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullrank.kernels.multilinear_plan import slabs
from fullrank.kernels.multilinear_steps import later
from fullrank.kernels.precision import KEEPS_TENSORS, refuse_second_order


def small_causal(query: Tensor, keys: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """O (B, N, E) of query (B, N, R), keys and values (B, M, R) and weight (M, M, E), all of one dtype.

    The queries are the last N of the M tokens.
    """
    apply = operator if torch.compiler.is_compiling() else _SmallCausal.apply
    out: Tensor = apply(query, keys, values, weight)[0]
    return out


def _hidden(query: Tensor, keys: Tensor) -> Tensor:
    """(1, N, M^2), True where a pair is later than a query."""
    length = keys.shape[1]
    return later(((0, length, 0, length),), length - query.shape[1], length, query.device)


def _computed(query: Tensor, keys: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """O, T (B, N, M^2) and Q_i o K_j (B, N M, R)."""
    both = (query[:, :, None] * keys[:, None]).flatten(1, 2)
    tensor = torch.bmm(both, values.transpose(1, 2)).view(*query.shape[:2], -1)
    tensor.masked_fill_(_hidden(query, keys), 0.0)
    out = None
    for rows, pairs, part in _slabs(query.shape[1], weight):
        found = tensor[:, rows, pairs] @ part
        if out is None:
            out = found
        else:
            out[:, rows] += found
    assert out is not None
    return out, tensor, both


def _differentiated(
    given: Tensor, tensor: Tensor, both: Tensor, wants_weight: bool, query: Tensor, keys: Tensor, values: Tensor, weight: Tensor
) -> list[Tensor]:  # fmt: skip
    """The gradients of query, keys, values and weight; of a weight that wants none, something empty."""
    with torch.autocast(query.device.type, enabled=False):
        d_weight = torch.empty_like(weight) if wants_weight else weight.new_empty(0)
        d_tensor = torch.empty_like(tensor)
        for rows, pairs, part in _slabs(query.shape[1], weight):
            above = given[:, rows]
            d_tensor[:, rows, pairs] = above @ part.t()
            if wants_weight:
                seen = tensor[:, rows, pairs].flatten(0, 1)
                torch.mm(seen.t(), above.flatten(0, 1), out=d_weight.view(-1, weight.shape[2])[pairs])
        # what was not written is masked, too
        d_pairs = d_tensor.masked_fill_(_hidden(query, keys), 0.0).view(query.shape[0], -1, keys.shape[1])
        d_values = torch.bmm(d_pairs.transpose(1, 2), both)
        d_both = torch.bmm(d_pairs, values).view(*query.shape[:2], *keys.shape[1:])
        d_query = (d_both * keys[:, None]).sum(2)
        d_keys = (d_both * query[:, :, None]).sum(1)
    return [d_query, d_keys, d_values, d_weight]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.set_materialize_grads(False)


class _SmallCausal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _computed(*inputs)
        _keep(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])
        return output

    @staticmethod
    def backward(ctx: Any, given: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("multi-linear attention", "builds the tensor of all pairs")
        return _gradients(ctx, given, _differentiated)


def _gradients(ctx: Any, given: Tensor | None, compute: Any) -> tuple[Tensor | None, ...]:
    if given is None:
        return (None,) * 4
    *inputs, tensor, both = ctx.saved_tensors
    *found, d_weight = compute(given, tensor, both, ctx.needs_input_grad[3], *inputs)
    return *found, d_weight if ctx.needs_input_grad[3] else None


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


# What a compiler sees: one operator each way.
_ARGUMENTS = "Tensor query, Tensor keys, Tensor values, Tensor weight"
operator = torch.library.custom_op(
    "fullrank::multilinear_small",
    _computed,
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    **KEEPS_TENSORS,
)
_backward_operator = torch.library.custom_op(
    "fullrank::multilinear_small_backward",
    _differentiated,
    mutates_args=(),
    schema=f"(Tensor given, Tensor tensor, Tensor both, bool wants_weight, {_ARGUMENTS}) -> Tensor[]",
    **KEEPS_TENSORS,
)


@operator.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (batch, queries, rank), length = query.shape, keys.shape[1]
    return (
        query.new_empty(batch, queries, weight.shape[2]),
        query.new_empty(batch, queries, length * length),
        query.new_empty(batch, queries * length, rank),
    )


@_backward_operator.register_fake
def _(given: Tensor, tensor: Tensor, both: Tensor, wants_weight: bool, *inputs: Tensor) -> list[Tensor]:
    *found, weight = (tensor.new_empty(tensor.shape) for tensor in inputs)
    return [*found, weight if wants_weight else weight.new_empty(0)]


operator.register_autograd(
    lambda ctx, given, *_: _gradients(ctx, given, _backward_operator),
    setup_context=lambda ctx, inputs, output: _keep(ctx, inputs, output),
)
