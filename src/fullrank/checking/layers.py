"""The layer that leaks: the first module whose output before a cut depends on tokens after it, though its input does not."""

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


def observe(model: nn.Module, run: Callable[[], Tensor], edit: Edit = lambda call, output: None) -> Calls:
    """Run, and write down all calls. An output is a tensor, or the first one of a tuple; `edit` may give another one."""
    calls, counts, running = Calls(), Counter[str](), list[Call]()

    def enter(name: str, module: nn.Module, args: Any, options: Any) -> None:
        call = (name, counts[name])
        counts[name] += 1
        # a residual may be added in place
        calls.inputs[call] = [tensor.clone() for tensor in filter(is_float, (*args, *options.values()))]
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
class Cut:
    """A cut before position `end` of texts (rows, length). past: positions before them, in a cache."""

    rows: int
    length: int
    end: int
    past: int = 0

    def view(self, tensor: Tensor) -> Tensor | None:
        """View of the positions before the cut; all of a tensor without positions, as every position may read it.

        None where that cannot be said: attention weights have two dimensions of that size, blocks of positions none.
        """
        shape = tensor.shape
        for past in {0, self.past}:
            dims = [dim for dim, size in enumerate(shape) if size == past + self.length]
            if dims:
                return tensor.narrow(dims[0], 0, past + self.end) if len(dims) == 1 else None
        if tensor.dim() > 2 and shape[0] in (1, self.rows) and shape[1] > self.length:  # padded to whole blocks
            return tensor[:, : self.end]
        if tensor.dim() > 1 and shape[0] == self.rows * self.length:  # (B N, ..)
            return tensor.reshape(self.rows, self.length, -1)[:, : self.end]
        has_positions = tensor.dim() > 0 and tensor.numel() > self.rows * shape[-1]
        return None if has_positions else tensor


def are_apart(tensor: Tensor | None, expected: Tensor | None) -> bool:
    """They differ by more than rounding."""
    if tensor is None or expected is None or tensor.shape != expected.shape or tensor.numel() == 0:
        return False
    size = max(float(expected.abs().max()), 1e-30)
    rounds = torch.finfo(tensor.dtype).eps * (100 if tensor.dtype.itemsize > 2 else 2)
    return float((tensor - expected).abs().max()) > rounds * size


@torch.no_grad()  # some modules give a parameter out as it is
def find_layers(
    model: nn.Module, right: Callable[[], Tensor], wrong: Callable[[], Tensor], cut: Cut, least: float
) -> tuple[str, ...]:
    """Modules by which the logits of `wrong` come to differ from those of `right` before a cut.

    A module is one of them if its output differs there, it is the first to differ, and putting back its right output changes
    the difference of logits (a later layer that leaks too may make it larger): an output that is not used is nobody's fault.
    If its input differs already, the module that calls it is the one. Then the next one is looked for with the first put
    right. least: differences of logits that count.
    """
    expected, names, mended = observe(model, right), list[str](), list[Call]()

    def differ(tensor: Tensor, other: Tensor) -> bool:
        return are_apart(cut.view(tensor), cut.view(other))

    def mend(call: Call, output: Tensor, among: list[Call]) -> Tensor | None:
        if call not in among:
            return None
        edited = output.clone(memory_format=torch.contiguous_format)
        into, source = cut.view(edited), cut.view(expected.outputs[call])
        if into is not None and source is not None and into.shape == source.shape:
            into.copy_(source)
        return edited

    def run_mended(among: list[Call]) -> tuple[Calls, float]:
        calls = observe(model, wrong, partial(mend, among=among))
        off = (calls.logits - expected.logits)[:, : cut.end].abs()
        return calls, float(off.sum()) if float(off.max()) > least else 0.0

    def has_effect(call: Call, size: float) -> bool:
        return abs(run_mended([*mended, call])[1] - size) > 1e-6 * size

    while len(names) < MOST_LAYERS:
        calls, size = run_mended(mended)
        others = [call for call in calls.outputs if size and call in expected.outputs and call not in mended]
        different = (call for call in others if differ(calls.outputs[call], expected.outputs[call]))
        first = next((call for call in different if has_effect(call, size)), None)
        if first is None:
            break
        mended.append(first)
        guilty: Call | None = first
        while guilty is not None and any(map(differ, calls.inputs[guilty], expected.inputs.get(guilty, ()))):
            first, guilty = guilty, calls.callers[guilty]
        if guilty is None:  # what the model does between its modules cannot be put right
            return (*dict.fromkeys(names), f"{OWN_FORWARD}, before {first[0]}")
        names.append(guilty[0])
    return tuple(dict.fromkeys(names)) or (OWN_FORWARD,)
