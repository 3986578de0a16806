"""The layers that leak, by what the modules of a model are given and give in two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from fullrank.checking.report import divide_by_size, largest

MOST_LAYERS = 16  # that are named
OWN_FORWARD = "the model's own forward"
ModuleCall = tuple[str, int]  # a module's name, and which of its calls
Edit = Callable[[ModuleCall, list[Tensor]], list[Tensor] | None]


@dataclass(frozen=True)
class Part:
    """Positions from `start` to `end` of the chosen rows of texts (rows, length). past: tokens before them, in a cache."""

    rows: int
    length: int
    start: int = 0
    end: int | None = None
    past: int = 0
    chosen: slice | list[int] | None = None

    def select(self, logits: Tensor) -> Tensor:
        rows = logits if self.chosen is None else logits[self.chosen]
        return rows[:, self.start : self.end]

    def view(self, tensor: Tensor) -> Tensor | None:
        """This part of what a module is given or gives; all of a tensor without rows or positions, as all may read it.

        None for attention weights, which have two dimensions of positions, and blocks of positions, which have none.
        """
        shape, is_one = tensor.shape, self.length == 1
        if tensor.dim() > 1 and shape[0] == self.rows * self.length and not is_one:  # (B N, ..)
            tensor = tensor.unflatten(0, (self.rows, self.length))
        is_whole = self.start == 0 and self.end in (None, self.length)
        view = tensor if is_one or (is_whole and self.chosen is not None) else self.narrow(tensor)
        if self.chosen is None or view is None or view.dim() == 0 or view.shape[0] % self.rows:
            return view
        return view.unflatten(0, (self.rows, -1))[self.chosen].flatten(0, 1)  # also of (B H, ..)

    def narrow(self, tensor: Tensor) -> Tensor | None:
        """All rows of the positions."""
        shape, end = tensor.shape, self.length if self.end is None else self.end
        for past in {0, self.past}:
            dims = [dim for dim, size in enumerate(shape) if size == past + self.length]
            if dims:
                return tensor.narrow(dims[0], self.start, past + end - self.start) if len(dims) == 1 else None
        if tensor.dim() > 2 and shape[0] in (1, self.rows) and shape[1] > self.length:  # padded to whole blocks
            return tensor[:, self.start : end]
        has_positions = tensor.dim() > 0 and tensor.numel() > self.rows * shape[-1]
        return None if has_positions else tensor


@dataclass(frozen=True)
class Reading:
    """Logits of a part of texts, and how to read them again: read() gives the logits of all."""

    logits: Tensor
    part: Part
    read: Callable[[], Tensor]

    @classmethod
    def from_run(cls, read: Callable[[], Tensor], part: Part) -> Reading:
        return cls(part.select(read()), part, read)


@dataclass
class ModuleCalls:
    """What the modules of a model were given and gave in one run, by call; outputs in the order in which calls end."""

    outputs: dict[ModuleCall, list[Tensor]] = field(default_factory=dict)
    inputs: dict[ModuleCall, list[Tensor]] = field(default_factory=dict)
    callers: dict[ModuleCall, ModuleCall | None] = field(default_factory=dict)
    result: Tensor = field(default_factory=lambda: torch.zeros(0))


def observe(model: nn.Module, run: Callable[[], Tensor], edit: Edit = lambda call, tensors: None) -> ModuleCalls:
    """Run, and write down all calls. Inputs and outputs are the tensors in them; `edit` may give other outputs."""
    calls, counts, running = ModuleCalls(), Counter[str](), list[ModuleCall]()

    def enter(name: str, module: nn.Module, args: Any, options: Any) -> Any:
        call = (name, counts[name])
        counts[name] += 1
        calls.callers[call] = running[-1] if running else None
        running.append(call)
        if torch.is_grad_enabled():  # what comes through a view has a gradient of its own
            args, options = _pytree.tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), (args, options))
        tensors = find_tensors((args, options))
        # a residual may be added in place
        calls.inputs[call] = tensors if torch.is_grad_enabled() else [tensor.clone() for tensor in tensors]
        return args, options

    def leave(name: str, module: nn.Module, args: Any, out: Any) -> Any:
        call = running.pop()
        leaves, tree = _pytree.tree_flatten(out)
        places = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
        tensors = [leaves[i] for i in places]
        edited = edit(call, tensors) if tensors else None
        if tensors:
            calls.outputs[call] = edited or tensors
        if edited is None:
            return None
        for i, tensor in zip(places, edited, strict=True):
            leaves[i] = tensor
        return _pytree.tree_unflatten(leaves, tree)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        calls.result = run()
    return calls


def find_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def are_apart(tensor: Tensor | None, expected: Tensor | None) -> bool:
    """They differ by more than rounding."""
    if tensor is None or expected is None or tensor.shape != expected.shape or tensor.numel() == 0:
        return False
    if not is_float(tensor):
        return not torch.equal(tensor, expected)
    size = max(float(expected.abs().max()), 1e-30)
    rounds = torch.finfo(tensor.dtype).eps * (100 if tensor.dtype.itemsize > 2 else 2)
    return float((tensor - expected).abs().max()) > rounds * size


@torch.no_grad()  # some modules give a parameter out as it is
def find_layers(model: nn.Module, right: Reading, wrong: Reading, least: float) -> tuple[str, ...]:
    """Modules by which the logits of `wrong` come to differ from those of `right`; none where they do not.

    A module is one of them if its output differs in the part, it is the first to differ, and putting back its right output
    changes the difference of logits (a later layer that leaks too may make it larger): an output that is not used is nobody's
    fault. If its input differs already, the module that calls it is the one. Then the next one is looked for with the first
    put right. least: the difference that counts, as a share of logits.
    """
    expected, names, mended = observe(model, right.read), list[str](), list[ModuleCall]()
    logits = right.part.select(expected.result)
    divide = divide_by_size(logits)

    def differ(tensors: list[Tensor], others: list[Tensor]) -> bool:
        pairs = zip(map(wrong.part.view, tensors), map(right.part.view, others), strict=False)
        return any(are_apart(tensor, other) for tensor, other in pairs)

    def mend(call: ModuleCall, tensors: list[Tensor], among: list[ModuleCall]) -> list[Tensor] | None:
        if call not in among:
            return None
        edited = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        for tensor, other in zip(edited, expected.outputs[call], strict=False):
            into, source = wrong.part.view(tensor), right.part.view(other)
            if into is not None and source is not None and into.shape == source.shape:
                into.copy_(source)
        return edited

    def run_mended(among: list[ModuleCall]) -> tuple[ModuleCalls, float]:
        calls = observe(model, wrong.read, partial(mend, among=among))
        off = (divide(wrong.part.select(calls.result)) - divide(logits)).abs()
        return calls, float(off.sum()) if float(off.max()) > least else 0.0

    size = 0.0
    while len(names) < MOST_LAYERS:
        calls, size = run_mended(mended)
        first = None
        for call in calls.outputs if size else ():
            if call in mended or not differ(calls.outputs[call], expected.outputs.get(call, [])):
                continue
            if abs(run_mended([*mended, call])[1] - size) > 1e-6 * size:
                first = call
                break
        if first is None:
            break
        mended.append(first)
        guilty: ModuleCall | None = first
        while guilty is not None and differ(calls.inputs[guilty], expected.inputs.get(guilty, [])):
            first, guilty = guilty, calls.callers[guilty]
        if guilty is None:  # what the model does between its modules cannot be put right
            return (*dict.fromkeys(names), f"{OWN_FORWARD}, before {first[0]}")
        names.append(guilty[0])
    return tuple(dict.fromkeys(names)) or (OWN_FORWARD,) * (size > 0)


def find_layers_by_gradient(model: nn.Module, run: Callable[[], Tensor], later: Part, least: float) -> tuple[str, ...]:
    """Innermost modules whose later inputs have a gradient of `run()`, a number, though their later outputs have none."""
    calls = observe(model, run)
    tensors = [
        one for part in (calls.inputs, calls.outputs) for some in part.values() for one in some if one.requires_grad
    ]
    gradients = torch.autograd.grad(calls.result, tensors, allow_unused=True)
    reached = set[int]()
    for tensor, gradient in zip(tensors, gradients, strict=True):
        part = None if gradient is None else later.view(gradient)
        if part is not None and part.numel() and float(part.abs().max()) > least:
            reached.add(id(tensor))
    guilty = [
        call[0]
        for call, inputs in calls.inputs.items()
        if any(id(one) in reached for one in inputs)
        and not any(id(one) in reached for one in calls.outputs.get(call, ()))
    ]
    names = [name for name in guilty if not any(other.startswith(f"{name}.") for other in guilty)]
    return tuple(dict.fromkeys(names[:MOST_LAYERS])) or (OWN_FORWARD,)


def find_layer_by_compiler(model: nn.Module, right: Reading, wrong: Reading, least: float) -> tuple[str, ...]:
    """The innermost module by which the readings differ where it alone is compiled."""
    innermost, divide = "", divide_by_size(right.logits)
    for name, module in model.named_modules():
        if name.startswith(innermost and f"{innermost}.") and name:
            module.compile(backend="aot_eager")
            try:
                logits = (divide(one.part.select(one.read())) for one in (right, wrong))
                innermost = name if largest(*logits) > least else innermost
            finally:
                module._compiled_call_impl = None
    return (innermost or OWN_FORWARD,)
