"""The call of the C++ kernel: its arguments, its autograd function, and the operator that a compiler sees."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullrank.kernels.native_build import library
from fullrank.kernels.precision import refuse_second_order


class Operands(NamedTuple):
    """What is differentiated: query, position (B, H, N, D), keys, values (B, H, M, D), table (H, T, D), without gaps.

    mixing is (H, H), (B, N, H, H) or None; position and table (the query that meets the keys of distances, and those) are
    None where the score has no distances. D is a multiple of 16, of fp64 of 8.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mixing: Tensor | None
    position: Tensor | None
    table: Tensor | None


class Geometry(NamedTuple):
    """Who sees whom (`Sight`), tokens as bytes (B, M); base (M,): n plus this is the row of the table; the seed of dropout."""

    first: Tensor
    end: Tensor
    own: Tensor
    base: Tensor | None
    tokens: Tensor | None
    seed: Tensor | None


class _Call(ctypes.Structure):
    """`Call` of cpp/call.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "N", "M", "D", "T", "threads", "narrow", "mixing_kind")),
        *((name, ctypes.c_int64) for name in ("sigsoftmax", "dropped")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("scale", "kept_scale")),
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "mixing", "position", "table")),
        *((name, ctypes.c_void_p) for name in ("first", "end", "own", "base", "tokens", "out", "lse", "d_out")),
        *((name, ctypes.c_void_p) for name in ("d_query", "d_keys", "d_values", "d_mixing", "d_position", "d_table")),
    )


def _run(
    operands: Operands,
    geometry: Geometry,
    others: dict[str, Tensor | None],
    scale: float,
    sigsoftmax: bool,
    dropout: float,
    backward: bool,
) -> None:
    loaded = library()
    assert loaded is not None
    query, mixing, table = operands.query, operands.mixing, operands.table
    (texts, heads, queries, width), seed = query.shape, geometry.seed
    arrays = {**operands._asdict(), **geometry._asdict(), **others}
    del arrays["seed"]
    assert all(array is None or array.is_contiguous() for array in arrays.values())
    call = _Call(
        B=texts, H=heads, N=queries, M=operands.keys.shape[2], D=width, T=0 if table is None else table.shape[1],
        threads=torch.get_num_threads(), narrow=int(_narrow(queries)),
        mixing_kind=0 if mixing is None else 1 if mixing.dim() == 2 else 2,
        sigsoftmax=int(sigsoftmax), dropped=min(round(dropout * 2**32), 2**32 - 1), seed=0 if seed is None else int(seed),
        scale=scale, kept_scale=1 / (1 - dropout) if dropout < 1 else 0.0,
        **{name: None if array is None else array.data_ptr() for name, array in arrays.items()},
    )  # fmt: skip
    if loaded.fullrank_mixed(ctypes.byref(call), int(query.dtype == torch.float64), int(backward)):
        raise MemoryError(
            f"attention of {texts} x {heads} x {queries} x {call.M}, {call.threads} threads: not enough memory"
        )


def _narrow(queries: int) -> bool:
    """Whether blocks of 16 rows, of which each costs a little more, do so much less idle work than blocks of 32."""
    return queries <= 16 or 32 < queries <= 48


def _split(arguments: tuple[Any, ...]) -> tuple[Operands, Geometry, tuple[float, bool, float]]:
    return Operands(*arguments[:6]), Geometry(*arguments[6:12]), arguments[12:15]


def _computed(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The output and the logarithms of the sums, (B, H, N)."""
    operands, geometry, choices = _split(arguments)
    dtype, operands = operands.query.dtype, _wide(operands)
    out, lse = torch.empty_like(operands.query), operands.query.new_empty(operands.query.shape[:3])
    _run(operands, geometry, {"out": out, "lse": lse}, *choices, backward=False)
    return out.to(dtype), lse


def _differentiated(cotangent: Tensor, lse: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of the operands; of those that are not there, something empty."""
    operands, geometry, choices = _split(arguments)
    dtypes = [None if tensor is None else tensor.dtype for tensor in operands]
    operands = _wide(operands)
    found = [None if tensor is None else torch.empty_like(tensor) for tensor in operands]
    names = (f"d_{name}" for name in Operands._fields)
    others = {**dict(zip(names, found, strict=True)), "lse": lse, "d_out": cotangent.to(lse.dtype).contiguous()}
    _run(operands, geometry, others, *choices, backward=True)
    nothing = operands.query.new_empty(0)
    return [
        nothing.clone() if tensor is None else tensor.to(dtype) for tensor, dtype in zip(found, dtypes, strict=True)
    ]


def _wide(operands: Operands) -> Operands:
    """In fp32 at least: the kernel has no products of halves, and is faster than those of PyTorch even so."""
    return Operands._make(x if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in operands)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.choices = inputs[12:]
    ctx.save_for_backward(*inputs[:12], output[1])
    ctx.set_materialize_grads(False)


def _gradients(inputs: list[Tensor | None], found: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Those of the inputs that are there. Saved tensors are read once: under activation checkpointing they are gone then."""
    given = zip(found, inputs[:6], strict=True)
    return *(None if tensor is None else gradient for gradient, tensor in given), *(None,) * 9


class Native(torch.autograd.Function):
    """`operands, geometry, scale, sigsoftmax, dropout` -> output (B, H, N, D) and the logarithms of the sums."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        output = _computed(*arguments)
        _keep(ctx, arguments, output)
        ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("this attention kernel", "keeps the weights")
        if cotangent is None:
            return (None,) * 15
        *inputs, lse = ctx.saved_tensors
        return _gradients(inputs, _differentiated(cotangent, lse, *inputs, *ctx.choices))


_ARGUMENTS = (
    "Tensor query, Tensor keys, Tensor values, Tensor? mixing, Tensor? position, Tensor? table, Tensor first, Tensor end, "
    "Tensor own, Tensor? base, Tensor? tokens, Tensor? seed, float scale, bool sigsoftmax, float dropout"
)
operator = torch.library.custom_op(
    "fullrank::mixed_attention", _computed, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
_backward_operator = torch.library.custom_op(
    "fullrank::mixed_attention_backward",
    _differentiated,
    mutates_args=(),
    schema=f"(Tensor cotangent, Tensor lse, {_ARGUMENTS}) -> Tensor[]",
)


@operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments[0]
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


@_backward_operator.register_fake
def _(cotangent: Tensor, lse: Tensor, *arguments: Any) -> list[Tensor]:
    return [cotangent.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in arguments[:6]]


def _operator_backward(ctx: Any, cotangent: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if cotangent is None:
        return (None,) * 15
    *inputs, lse = ctx.saved_tensors
    return _gradients(inputs, _backward_operator(cotangent, lse, *inputs, *ctx.choices))


operator.register_autograd(_operator_backward, setup_context=lambda ctx, inputs, output: _keep(ctx, inputs, output))


def attention(operands: Operands, geometry: Geometry, choices: tuple[float, bool, float]) -> Tensor:
    """(B, H, N, D). An operator costs more than a function, and is taken where somebody looks at operators."""
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not _ordinary(operands)
    out: Tensor = (operator if watched else Native.apply)(*operands, *geometry, *choices)[0]
    return out


def _ordinary(operands: Operands) -> bool:
    """Whether tensors have addresses; those that only pretend to be there have not."""
    return all(tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) for tensor in operands)
