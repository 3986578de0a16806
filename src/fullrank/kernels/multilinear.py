"""Multi-linear attention without anything of size N^3, exact, forward and backward.

    q_i = mean_c g_c o Q_i,    P_jm = K_j o V_m,    O_i = sum_jm (q_i . P_jm) W_jm    over the pairs that query i sees

Queries, keys and values are shared by the cores, so C cores are one core with their mean. A step takes the pairs p of some
shell, X = [q_i . P_p ; P_p] (rows: queries that meet them directly, then the R rows of the state), Y = X W, and adds

    O_i += Y_i,  C += Y_state;          dX = [dO ; G] W^T,  dW = X^T [dO ; G],  dP = dX_state + q^T dX_i,  dq_i += dX_i P^T

with G = dC the sum of q_i^T dO_i over later queries. Which pairs go where is chosen by cost (`multilinear_plan`).
Operands have the dtype that autocast asks for; sums over steps are fp32 (or fp64). The state before each stage is kept for
the backward pass, (B, R, E) numbers each; everything else is computed again. Only a T of at most 2^17 numbers is built.
Limits: no double backward, no functorch transforms; `fullrank.kernel("reference")` has them.
docs/derivations/multilinear.md
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fullrank.core import multilinear_reference as reference
from fullrank.core.errors import InputError
from fullrank.kernels import forced
from fullrank.kernels.multilinear_plan import TINY, Shape, Stage, plan
from fullrank.kernels.multilinear_small import small_causal
from fullrank.kernels.multilinear_steps import Call, gradients, output, readers
from fullrank.kernels.precision import KEEPS_TENSORS, product_dtype, refuse_second_order


def multilinear(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cores: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """O (B, N, E) of query (B, N, R), keys and values (B, M, R), cores (C, R) and weight (L, L, E), M <= L.

    causal: query i is position M - N + i and meets pairs whose key and value are not after it; otherwise all pairs.
    key_mask (B, M): False where a position is padding. visible (1 or B, N, M): instead of `causal`, any other choice of
    the positions that a query sees, as keys and as values. A query that sees nothing gets 0.
    Raises InputError for more positions than the weight has, and for causal queries that are more than the keys.
    """
    queries, length = query.shape[1], keys.shape[1]
    if visible is None and causal and queries > length:
        raise InputError(f"{queries} causal queries over {length} keys: they are the last ones of the keys")
    reference.leading(weight, length)
    if visible is not None:
        visible = visible.expand(-1, queries, length)
    if forced() == "reference" or weight.is_meta or query.numel() == 0:
        return reference.multilinear(
            query, keys, values, cores, weight, _visible(query, keys, causal, key_mask, visible)
        )
    if key_mask is not None:  # a pair with a zero in it is nothing
        keys, values = (tensor.masked_fill(~key_mask[..., None], 0.0) for tensor in (keys, values))
    kind, wide, dtype = query.device.type, torch.promote_types(query.dtype, torch.float32), product_dtype(query, weight)
    with torch.autocast(kind, enabled=False):
        scaled = query.to(wide) * cores.to(wide).mean(0)
        if query.shape[0] * queries * length**2 <= TINY:
            return _tiny(scaled, keys, values, weight, visible, causal and visible is None, dtype)
        pairs = operator if torch.compiler.is_compiling() else _Pairs.apply
        out: Tensor = pairs(scaled, keys, values, weight, visible, causal and visible is None, dtype)[0]
    return out


def _tiny(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    weight: Tensor,
    visible: Tensor | None,
    causal: bool,
    dtype: torch.dtype,
) -> Tensor:
    """T itself, where it is so small that cutting it up takes longer."""
    query, keys, values = (tensor.to(dtype) for tensor in (query, keys, values))
    queries, length = query.shape[1], keys.shape[1]
    if causal:
        return small_causal(query, keys, values, reference.leading(weight, length).to(dtype).contiguous())
    split = (query[:, :, None] * keys[:, None]).flatten(1, 2) @ values.transpose(1, 2)  # (B, N M, M)
    split = split.view(-1, queries, length**2)
    if visible is not None:
        split = split.masked_fill(~(visible[..., :, None] & visible[..., None, :]).flatten(2), 0.0)
    return split @ reference.leading(weight, length).flatten(0, 1).to(dtype)


def _visible(
    query: Tensor, keys: Tensor, causal: bool, key_mask: Tensor | None, visible: Tensor | None
) -> Tensor | None:
    if visible is None and causal:
        visible = reference.causal(query.shape[1], keys.shape[1], query.device)
    if key_mask is None:
        return visible
    return key_mask[:, None] if visible is None else visible & key_mask[:, None]


def _call(arguments: tuple[Any, ...]) -> tuple[Call, tuple[Stage, ...]]:
    query, keys, values, weight, visible, _, dtype = arguments
    return Call(query, keys, values, weight, visible, dtype), _stages(*arguments)


def _stages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    weight: Tensor,
    visible: Tensor | None,
    causal: bool,
    dtype: torch.dtype,
) -> tuple[Stage, ...]:
    sizes = (*query.shape[:2], keys.shape[1], query.shape[2], weight.shape[2])
    batch, queries, length, rank, width = (int(size) for size in sizes)  # a compiler has a graph for each length
    on_cpu = query.device.type == "cpu"
    return plan(Shape(batch, queries, length, rank, width, causal, visible is not None, on_cpu, dtype.itemsize == 2))


def _computed(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The output, and the states that its gradients need."""
    return output(*_call(arguments))


def _differentiated(cotangent: Tensor, states: Tensor, wants_weight: bool, *arguments: Any) -> list[Tensor]:
    """The gradients of query, keys, values and weight; of a weight that wants none, something empty."""
    with torch.autocast(cotangent.device.type, enabled=False):
        call, stages = _call(arguments)
        *found, d_weight = gradients(call, stages, states, cotangent, wants_weight)
    tensors = [tensor.to(given.dtype) for tensor, given in zip(found, arguments[:3], strict=True)]
    return [*tensors, cotangent.new_empty(0) if d_weight is None else d_weight]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.choices = inputs[5:]
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.set_materialize_grads(False)


class _Pairs(torch.autograd.Function):
    """query, keys, values, weight, visible, causal, dtype -> the output (B, N, E) and the states."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        output = _computed(*arguments)
        _keep(ctx, arguments, output)
        ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("multi-linear attention", "builds the tensor of all pairs")
        return _gradients(ctx, cotangent, _differentiated)


def _gradients(ctx: Any, cotangent: Tensor | None, compute: Any) -> tuple[Tensor | None, ...]:
    if cotangent is None:
        return (None,) * 7
    *inputs, states = ctx.saved_tensors
    *found, d_weight = compute(cotangent, states, ctx.needs_input_grad[3], *inputs, *ctx.choices)
    return *found, d_weight if ctx.needs_input_grad[3] else None, None, None, None


# What a compiler sees: one operator each way, whose insides it does not look into.
_ARGUMENTS = "Tensor query, Tensor keys, Tensor values, Tensor weight, Tensor? visible, bool causal, ScalarType dtype"


def _without_gaps(*arguments: Any) -> list[Tensor]:
    return [tensor.contiguous() for tensor in _differentiated(*arguments)]


operator = torch.library.custom_op(
    "fullrank::multilinear",
    _computed,
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)",
    **KEEPS_TENSORS,
)
_backward_operator = torch.library.custom_op(
    "fullrank::multilinear_backward",
    _without_gaps,
    mutates_args=(),
    schema=f"(Tensor cotangent, Tensor states, bool wants_weight, {_ARGUMENTS}) -> Tensor[]",
    **KEEPS_TENSORS,
)


@operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, weight, dtype = arguments[0], arguments[3], arguments[6]
    (batch, queries, rank), width = query.shape, weight.shape[2]
    states = query.new_empty(readers(_stages(*arguments)), batch, rank, width, dtype=dtype)
    return query.new_empty(batch, queries, width, dtype=dtype), states


@_backward_operator.register_fake
def _(cotangent: Tensor, states: Tensor, wants_weight: bool, *arguments: Any) -> list[Tensor]:
    given = arguments[: 4 if wants_weight else 3]
    return [tensor.new_empty(tensor.shape) for tensor in given] + [cotangent.new_empty(0)] * (not wants_weight)


operator.register_autograd(
    lambda ctx, cotangent, _: _gradients(ctx, cotangent, _backward_operator),
    setup_context=lambda ctx, inputs, output: _keep(ctx, inputs, output),
)
