"""The layer that leaks: the first module whose output at earlier positions depends on later tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MOST_LAYERS = 16  # that are named
OWN_FORWARD = "the model's own forward"
Call = tuple[str, int]  # a module's name, and which of its calls
Edit = Callable[[Call, Tensor], Tensor | None]


@dataclass
class Calls:
    """What the modules of a model were given and gave in one run, by call; outputs in the order in which calls end."""

    outputs: dict[Call, Tensor] = field(default_factory=dict)
    inputs: dict[Call, list[Tensor]] = field(default_factory=dict)
    callers: dict[Call, Call | None] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))

    def find_guilty(self, call: Call, is_wrong: Callable[[Call], bool]) -> str:
        """The name of the call, or of the innermost one around it whose input is right still."""
        while call in self.inputs and is_wrong(call):
            caller = self.callers[call]
            if caller is None:
                return f"{OWN_FORWARD}, before {call[0]}"
            call = caller
        return call[0]


def observe(model: nn.Module, run: Callable[[], Tensor], edit: Edit = lambda call, output: None) -> Calls:
    """Run, and write down all calls. An output is a tensor, or the first one of a tuple; `edit` may give another one."""
    calls, counts, running = Calls(), Counter[str](), list[Call]()

    def enter(name: str, module: nn.Module, args: Any, options: Any) -> None:
        call = (name, counts[name])
        counts[name] += 1
        tensors = filter(is_float, (*args, *options.values()))
        # a residual may be added in place
        calls.inputs[call] = [tensor if tensor.requires_grad else tensor.clone() for tensor in tensors]
        calls.callers[call] = running[-1] if running else None
        running.append(call)

    def leave(name: str, module: nn.Module, args: Any, out: Any) -> Any:
        call = running.pop()
        output = out[0] if isinstance(out, tuple | list) and out else out
        if not is_float(output):
            return None
        edited = edit(call, output)
        calls.outputs[call] = output if edited is None else edited
        if edited is None or output is out:
            return edited
        parts = (edited, *out[1:])
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        calls.logits = run()
    return calls


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@dataclass(frozen=True)
class Before:
    """The positions before `end` of texts (rows, length), in whatever tensor. past: positions before them, in a cache."""

    rows: int
    length: int
    end: int
    past: int = 0

    def view(self, tensor: Tensor) -> Tensor | None:
        """View of these positions; all of a tensor without positions, as every position may read it.

        None where that cannot be said: attention weights have two dimensions of that size.
        """
        shape = tensor.shape
        dims = [dim for dim, size in enumerate(shape) if size == self.length]
        if dims:
            return tensor.narrow(dims[0], 0, self.end) if len(dims) == 1 else None
        dims = [dim for dim, size in enumerate(shape) if self.past and size == self.past + self.length]
        if dims:
            return tensor.narrow(dims[0], 0, self.past + self.end) if len(dims) == 1 else None
        if tensor.dim() > 2 and shape[0] in (1, self.rows) and shape[1] > self.length:  # padded to whole blocks
            return tensor[:, : self.end]
        if tensor.dim() > 1 and shape[0] == self.rows * self.length:  # (B N, ..)
            return tensor.reshape(self.rows, self.length, -1)[:, : self.end]
        return tensor

    def is_unclear(self, tensor: Tensor) -> bool:
        """It has more than one vector for a row: positions, perhaps, in another form, such as blocks of them."""
        has_positions = tensor.dim() > 0 and tensor.numel() > self.rows * tensor.shape[-1]
        return has_positions and self.view(tensor) is tensor

    def differ(self, tensor: Tensor, expected: Tensor) -> bool:
        """The two differ there by more than rounding."""
        before, known = self.view(tensor), self.view(expected)
        return before is not None and known is not None and are_apart(before, known)

    def differ_surely(self, tensor: Tensor, expected: Tensor) -> bool:
        """`differ`, where it can be said which positions these are."""
        return not self.is_unclear(tensor) and self.differ(tensor, expected)


def are_apart(tensor: Tensor, expected: Tensor) -> bool:
    """They differ by more than rounding."""
    if tensor.shape != expected.shape or tensor.numel() == 0:
        return False
    size = max(float(expected.abs().max()), 1e-30)
    rounds = torch.finfo(tensor.dtype).eps * (100 if tensor.dtype.itemsize > 2 else 2)
    return float((tensor - expected).abs().max()) > rounds * size


@torch.no_grad()  # some modules give a parameter out as it is
def find_leaking_layers(
    model: nn.Module, run: Callable[[Tensor], Tensor], clean: Tensor, changed: Tensor, before: Before, least: float
) -> tuple[str, ...]:
    """Modules in which tokens after `before` reach outputs of `run` there; clean and changed (B, N) differ after it.

    A module is one of them if its output there differs, it is the first to differ, and putting back its output on the clean
    tokens changes the leak (a later layer that leaks too may make it larger): an output that is not used is nobody's fault.
    If its input differs already, the module that calls it is the one. Then the next one is looked for with the first put
    right. least: differences of outputs that count.
    """
    known, names = observe(model, lambda: run(clean)), list[str]()
    mended: list[Call] = []

    def mend(call: Call, output: Tensor, among: list[Call]) -> Tensor | None:
        if call not in among or known.outputs[call].shape != output.shape:
            return None
        edited = output.clone(memory_format=torch.contiguous_format)
        into, right = before.view(edited), before.view(known.outputs[call])
        if into is not None and right is not None:
            into.copy_(right)
        return edited

    def leak(among: list[Call]) -> tuple[Calls, float]:
        calls = observe(model, lambda: run(changed), partial(mend, among=among))
        off = (calls.logits - known.logits)[:, : before.end].abs()
        return calls, float(off.sum()) if float(off.max()) > least else 0.0

    def is_wrong(calls: Calls, call: Call) -> bool:
        pairs = zip(calls.inputs[call], known.inputs.get(call, ()), strict=False)
        return any(before.differ_surely(*pair) for pair in pairs)

    while len(mended) < MOST_LAYERS:
        calls, size = leak(mended)
        guilty = ""
        for call, output in calls.outputs.items() if size else ():
            if call in mended or call not in known.outputs or not before.differ(output, known.outputs[call]):
                continue
            if abs(leak([*mended, call])[1] - size) > 1e-6 * size:
                mended.append(call)
                guilty = calls.find_guilty(call, partial(is_wrong, calls))
                break
        if guilty:
            names.append(guilty)
        if not guilty or guilty.startswith(OWN_FORWARD):
            break  # what the model does between its modules cannot be put right
    return tuple(dict.fromkeys(names)) or (OWN_FORWARD,)


@torch.no_grad()
def find_first_layer(
    model: nn.Module, right: Callable[[], Tensor], wrong: Callable[[], Tensor], differ: Callable[[Tensor, Tensor], bool]
) -> str:
    """The first module whose output differs between two runs, or that calls it where its input differs already."""
    expected, calls = observe(model, right), observe(model, wrong)

    def is_wrong(call: Call) -> bool:
        return call in expected.inputs and any(map(differ, calls.inputs[call], expected.inputs[call]))

    for call, output in calls.outputs.items():
        if call in expected.outputs and differ(output, expected.outputs[call]):
            return calls.find_guilty(call, is_wrong)
    return OWN_FORWARD


def find_layer_of_length(model: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor, rows: int, end: int) -> str:
    """The first module whose output for the first `rows` and `end` tokens of `ids` (B, N) is another one in all of it."""
    before = Before(len(ids), ids.shape[1], end)

    def differ(tensor: Tensor, expected: Tensor) -> bool:
        view = before.view(tensor)
        if view is None or before.is_unclear(tensor):
            return False
        return are_apart(view[:rows] if len(view) == len(ids) else view, expected)

    return find_first_layer(model, lambda: run(ids[:rows, :end].contiguous()), lambda: run(ids), differ)


def find_layer_of_rows(
    model: nn.Module, run: Callable[[Tensor], Tensor], clean: Tensor, changed: Tensor, row: int
) -> str:
    """The first module whose output for other rows than `row` differs."""
    others = torch.arange(len(clean)) != row

    def differ(tensor: Tensor, expected: Tensor) -> bool:
        is_batch = tensor.shape == expected.shape and tensor.dim() > 0 and len(tensor) == len(clean)
        return is_batch and are_apart(tensor[others], expected[others])

    return find_first_layer(model, lambda: run(clean), lambda: run(changed), differ)


def find_layer_by_gradient(calls: Calls, leaves: list[Tensor], later: Tensor, before: Before, least: float) -> str:
    """The first module through whose earlier output the gradient of `later` comes from embeddings after `before`.

    If it comes through its input already, the module that calls it is the one.
    """

    def leads(output: Tensor) -> bool:
        if not output.requires_grad or any(output is leaf for leaf in leaves):
            return False
        (gradient,) = torch.autograd.grad(later, output, retain_graph=True, allow_unused=True)
        if gradient is None:
            return False
        gradient = gradient.contiguous()
        earlier = torch.zeros_like(gradient)
        into, source = before.view(earlier), before.view(gradient)
        if into is None or source is None:
            return False
        into.copy_(source)
        gradients = torch.autograd.grad(output, leaves, earlier, retain_graph=True, allow_unused=True)
        return any(one is not None and float(one[:, before.end :].abs().max()) > least for one in gradients)

    def is_wrong(call: Call) -> bool:
        return any(not before.is_unclear(tensor) and leads(tensor) for tensor in calls.inputs[call])

    for call, output in calls.outputs.items():
        if leads(output):
            return calls.find_guilty(call, is_wrong)
    return OWN_FORWARD
