"""The layer that leaks: the first module whose output at earlier positions depends on later tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MOST_LAYERS = 16  # that are named
OWN_FORWARD = "the model's own forward"
Call = tuple[str, int]  # a module's name, and which of its calls
Given = dict[Call, tuple[Call | None, list[Tensor]]]  # of each call: the one that made it, and its inputs
Shape = tuple[int, int, int]  # rows and positions of the ids, and positions before them in a cache
NOTHING: Mapping[Call, Tensor] = {}


@torch.no_grad()  # some modules give a parameter out as it is
def leaking_layers(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    clean: Tensor,
    changed: Tensor,
    position: int,
    least: float,
    past: int = 0,
) -> tuple[str, ...]:
    """Modules in which tokens from `position` on reach earlier outputs of `run`; clean, changed (B, N) differ at `position`.

    A module is one of them if its output before `position` differs, it is the first to differ, and putting back its output
    on the clean tokens changes the leak (a later layer that leaks too may make it larger): an output that is not used is
    nobody's fault. If its input differs already, the module that calls it is the one. Then the next one is looked for with
    the first put right. `least`: differences of outputs that count. past: tokens in a cache before them.
    """
    shape, inputs, names = (*clean.shape[:2], past), Given(), list[str]()
    known, expected = observe(model, lambda: run(clean), clean, inputs=inputs)
    put_back: dict[Call, Tensor] = {}

    def leak(put_back: Mapping[Call, Tensor]) -> tuple[dict[Call, Tensor], Given, float]:
        given = Given()
        outputs, logits = observe(model, lambda: run(changed), clean, put_back, position, past, given)
        off = (logits - expected)[:, :position].abs()
        return outputs, given, float(off.sum()) if float(off.max()) > least else 0.0

    def inputs_differ(given: Given, one: Call) -> bool:
        pairs = zip(given[one][1], inputs[one][1] if one in inputs else (), strict=False)
        return any(_differs(*pair, shape, position, True) for pair in pairs)

    while len(put_back) < MOST_LAYERS:
        outputs, given, size = leak(put_back)
        if size == 0.0:
            break
        for called, output in outputs.items():
            fresh = called not in put_back and called in known
            if not fresh or not _differs(output, known[called], shape, position):
                continue
            if abs(leak({**put_back, called: known[called]})[2] - size) > 1e-6 * size:
                put_back[called] = known[called]
                names.append(guilty(called, given, partial(inputs_differ, given)))
                break
        else:
            break
        if names[-1].startswith(OWN_FORWARD):
            break  # what the model does between its modules cannot be put right
    return tuple(dict.fromkeys(names)) or (OWN_FORWARD,)


@torch.no_grad()
def first_of_length(model: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor, end: int) -> str:
    """The first module whose output for the first `end` tokens of `ids` (B, N) is another one in the whole text."""
    given, inputs, rows = Given(), Given(), len(ids)
    whole, _ = observe(model, lambda: run(ids), ids, inputs=given)
    known, _ = observe(model, lambda: run(ids[:, :end].contiguous()), ids, inputs=inputs)

    def differs(tensor: Tensor, expected: Tensor) -> bool:
        before = _earlier(tensor, (rows, ids.shape[1], 0), end)
        if before is None or before.shape != expected.shape or (before is tensor and _has_positions(tensor, ids.shape)):
            return False
        return _apart(before, expected)

    pairs = ((called, output) for called, output in whole.items() if called in known)
    first = next((called for called, output in pairs if differs(output, known[called])), None)
    if first is None:
        return OWN_FORWARD

    def inputs_differ(called: Call) -> bool:
        return called in inputs and any(map(differs, given[called][1], inputs[called][1]))

    return guilty(first, given, inputs_differ)


def guilty(called: Call, given: Given, differs: Callable[[Call], bool]) -> str:
    """The name of the call, or of the innermost one around it whose input is right still."""
    while called in given and differs(called):
        caller = given[called][0]
        if caller is None:
            return f"{OWN_FORWARD}, before {called[0]}"
        called = caller
    return called[0]


def first_by_gradient(
    outputs: Mapping[Call, Tensor], given: Given, leaves: list[Tensor], later: Tensor, shape: Shape, position: int,
    least: float,
) -> str:  # fmt: skip
    """The first module through whose output before `position` the gradient of `later` comes from embeddings after it.

    If it comes through its input already, the module that calls it is the one.
    """

    def leads(output: Tensor, positions_known: bool = False) -> bool:
        if not output.requires_grad or any(output is leaf for leaf in leaves):
            return False
        (gradient,) = torch.autograd.grad(later, output, retain_graph=True, allow_unused=True)
        if gradient is None:
            return False
        gradient = gradient.contiguous()
        kept = torch.zeros_like(gradient)
        into, earlier = _earlier(kept, shape, position), _earlier(gradient, shape, position)
        if into is None or earlier is None or (positions_known and into is kept and _has_positions(kept, shape)):
            return False
        into.copy_(earlier)
        gradients = torch.autograd.grad(output, leaves, kept, retain_graph=True, allow_unused=True)
        return any(g is not None and float(g[:, position:].abs().max()) > least for g in gradients)

    first = next((called for called, output in outputs.items() if leads(output)), None)
    return (
        OWN_FORWARD
        if first is None
        else guilty(first, given, lambda one: any(leads(tensor, True) for tensor in given[one][1]))
    )


def observe(model: nn.Module, run: Callable[[], Tensor], ids: Tensor, put_back: Mapping[Call, Tensor] = NOTHING,
             position: int = 0, past: int = 0, inputs: Given | None = None) -> tuple[dict[Call, Tensor], Tensor]:  # fmt: skip
    """Run and give the outputs of all modules by call, in the order in which they end, and the logits.

    Outputs are tensors, or the first ones of tuples. Those of the calls in `put_back` are replaced by it before `position`.
    inputs: is filled with what each call was given.
    """
    outputs: dict[Call, Tensor] = {}
    calls: Counter[str] = Counter()
    running: list[Call] = []

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def seen(module: nn.Module, args: Any, options: Any) -> None:
            called = (name, calls[name])
            calls[name] += 1
            tensors = [one for one in (*args, *options.values()) if isinstance(one, Tensor) and one.is_floating_point()]
            if inputs is not None:  # a residual may be added in place
                kept = [one if one.requires_grad else one.clone() for one in tensors]
                inputs[called] = (running[-1] if running else None, kept)
            running.append(called)

        return seen

    def hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def seen(module: nn.Module, args: Any, out: Any) -> Any:
            called = running.pop()
            output = out[0] if isinstance(out, tuple | list) and out else out
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            outputs[called] = output
            if called not in put_back or put_back[called].shape != output.shape:
                return None
            outputs[called] = output.clone(memory_format=torch.contiguous_format)
            into, kept = (
                _earlier(tensor, (*ids.shape[:2], past), position) for tensor in (outputs[called], put_back[called])
            )
            assert into is not None
            assert kept is not None
            into.copy_(kept)
            if output is out:
                return outputs[called]
            parts = (outputs[called], *out[1:])
            return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)

        return seen

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(hook(name)).remove)
        return outputs, run()


def _earlier(tensor: Tensor, shape: Shape, position: int) -> Tensor | None:
    """View of what stands before `position`; all of a tensor without positions, as every position may read it.

    None where that cannot be said: attention weights have two dimensions of that size. shape: (B, N) of the ids.
    """
    rows, length, past = shape
    dims = [i for i, size in enumerate(tensor.shape) if size == length]
    if len(dims) > 1:
        return None
    if dims:
        return tensor.narrow(dims[0], 0, position)
    if past and (dims := [i for i, size in enumerate(tensor.shape) if size == past + length]):
        return tensor.narrow(dims[0], 0, past + position) if len(dims) == 1 else None
    if tensor.dim() > 2 and tensor.shape[0] in (1, rows) and tensor.shape[1] > length:  # a text padded to whole blocks
        return tensor[:, :position]
    if tensor.dim() > 1 and tensor.shape[0] == rows * length:  # (B N, ..)
        return tensor.reshape(rows, length, -1)[:, :position]
    return tensor


def _has_positions(tensor: Tensor, shape: Sequence[int]) -> bool:
    """It has more than one vector for a row: positions, perhaps, in whatever form, such as blocks of them."""
    return tensor.dim() > 0 and tensor.numel() > shape[0] * tensor.shape[-1]


def _differs(output: Tensor, known: Tensor, shape: Shape, position: int, positions_known: bool = False) -> bool:
    """Outputs before `position` differ by more than rounding. positions_known: only where it can be said which these are."""
    before, expected = _earlier(output, shape, position), _earlier(known, shape, position)
    if before is None or expected is None or before.shape != expected.shape or before.numel() == 0:
        return False
    if positions_known and before is output and _has_positions(output, shape):
        return False
    return _apart(before, expected)


def _apart(output: Tensor, expected: Tensor) -> bool:
    """They differ by more than rounding."""
    size = max(float(expected.abs().max()), 1e-30)
    rounds = torch.finfo(output.dtype).eps * (100 if output.dtype.itemsize > 2 else 2)
    return output.numel() > 0 and float((output - expected).abs().max()) > rounds * size
