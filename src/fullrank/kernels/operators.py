"""What engines share: operators that a compiler does not look into, the dtype of products, and words to a compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])

# An operator that keeps tensors for later calls, so that a CUDA graph must not hold it. torch has the tag from 2.9 on.
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
_TENSORS: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?"}
_SCHEMA = _TENSORS | {bool: "bool", int: "int", float: "float", list[int]: "int[]", torch.dtype: "ScalarType"}


def define_operator(
    name: str,
    arguments: Callable[..., Any],
    operands: int,
    forward: Callable[[Any], tuple[Tensor, Tensor]],
    backward: Callable[[Any, Tensor, Tensor, Sequence[bool]], list[Tensor]],
    fake: Callable[[Any], tuple[Tensor, Tensor]],
    what: str,
) -> Callable[[Any], Tensor]:
    """Define the operator `fullrank::name`, once differentiable, as a function of `arguments`.

    arguments: a NamedTuple that begins with tensors, the first `operands` of which have gradients.
    forward(given) -> the output, and what the backward pass reads of it; fake: the same without numbers.
    backward(given, cotangent, kept, wanted) -> gradients of the operands, as `make_gradients` has them.
    what: the operator in the words of an error.
    """
    kinds = get_type_hints(arguments)
    schema = ", ".join(f"{_SCHEMA[kind]} {field}" for field, kind in kinds.items())
    tensors = sum(kind in _TENSORS for kind in kinds.values())

    def run(*values: Any) -> tuple[Tensor, Tensor]:
        return forward(arguments(*values))

    def run_backward(cotangent: Tensor, kept: Tensor, wanted: Sequence[bool], *values: Any) -> list[Tensor]:
        return backward(arguments(*values), cotangent, kept, wanted)

    def fake_backward(cotangent: Tensor, kept: Tensor, wanted: Sequence[bool], *values: Any) -> list[Tensor]:
        return make_gradients(wanted, values[:operands], cotangent)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.choices = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def differentiate(run: Callable[..., Any], ctx: Any, cotangent: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        if not torch.compiler.is_compiling():
            refuse_second_order(what)
        if cotangent is None:
            return (None,) * len(kinds)
        *inputs, kept = ctx.saved_tensors  # read once: under activation checkpointing they are gone then
        wanted = list(ctx.needs_input_grad[:operands])
        found = run(cotangent, kept, wanted, *inputs, *ctx.choices)
        gradients = [gradient if want else None for gradient, want in zip(found, wanted, strict=True)]
        return *gradients, *(None,) * (len(kinds) - operands)

    define: Any = partial(torch.library.custom_op, mutates_args=(), **_TAGS)
    operator = define(f"fullrank::{name}", run, schema=f"({schema}) -> (Tensor, Tensor)")
    operator.register_fake(lambda *values: fake(arguments(*values)))
    schema = f"(Tensor cotangent, Tensor kept, bool[] wanted, {schema}) -> Tensor[]"
    backward_operator = define(f"fullrank::{name}_backward", run_backward, schema=schema)
    backward_operator.register_fake(fake_backward)
    operator.register_autograd(partial(differentiate, backward_operator), setup_context=save)

    class Eager(torch.autograd.Function):
        """The same without the operator, which costs more."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
            return differentiate(run_backward, ctx, *cotangents)

    def call(given: Any) -> Tensor:
        # the operator is taken where somebody looks at operators, or operands have no addresses
        watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        ordinary = all(tensor is None or type(tensor) in (Tensor, nn.Parameter) for tensor in given[:operands])
        chosen = Eager.apply if ordinary and not watched else operator
        output: Tensor = chosen(*given)[0]
        return output

    return call


def make_gradients(wanted: Sequence[bool], operands: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Room for the gradients of operands, whose last dimension is dense; no numbers for one that is not wanted."""
    rooms = []
    for want, x in zip(wanted, operands, strict=True):
        if x is None or not want:
            rooms.append(like.new_empty(0))
        else:
            rooms.append(torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape))
    return rooms


def refuse_second_order(what: str) -> None:
    """Called in a backward pass: RuntimeError where it is to be differentiated again.

    Autograd would take the gradients for constants where their cotangent is one, and say nothing.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"no second derivative (create_graph=True) of {what}: compute it inside "
            '`with fullrank.kernel("reference"):`, which keeps all numbers'
        )


# -- the dtype of products -----------------------------------------------------------------------------------------------


def device_kind(tensor: Tensor) -> str:
    """The device as autocast knows it; it does not know `meta`."""
    return "cpu" if tensor.device.type == "meta" else tensor.device.type


def product_dtype(operand: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that autocast asks matrix products to have."""
    kind = device_kind(operand)
    is_narrow = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_narrow else weight.dtype


# -- words to a compiler -------------------------------------------------------------------------------------------------


def is_transformed() -> bool:
    """True inside a transform of torch.func, which operators written by hand do not know."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def mark_constant(function: Function) -> Function:
    """Let a compiler call the function while it traces, and take the answer for a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but imports the compiler: two seconds at each start.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


_disabled: dict[Callable[..., Any], Any] = {}


@mark_constant
def leave_out_of_graphs(function: Function) -> Function:
    """The function, which a compiler leaves out of its graphs. Where no compiler is imported there is none."""
    if "torch._dynamo" not in sys.modules:
        return function
    if function not in _disabled:
        _disabled[function] = torch.compiler.disable(function)
    return cast("Function", _disabled[function])
