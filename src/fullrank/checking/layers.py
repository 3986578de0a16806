"""The layers that leak, by what the modules of a model are given and give in two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from fullrank.checking.report import divide_by_size, largest

MOST_LAYERS = 16  # that a finding names
OWN_FORWARD = "the model's own forward"
ModuleCall = tuple[str, int]  # a module's name, and which of its calls
Side = Literal["in", "out"]
Place = tuple[str, int, Side]  # what a call of a module is given, or gives
Tensors = dict[int, Tensor]  # by their number among all arguments, or all outputs
Edit = Callable[[Place, Tensors], Tensors]


@dataclass(frozen=True)
class Reading:
    """Logits of texts, how to read the texts again, and the part of rows and positions that is looked at.

    Attributes:
        all_logits: logits (rows, length, V) of all texts.
        read: reads the texts again.
        before: gives the arguments of `read`, such as a cache of earlier tokens. What runs there is not looked at.
        past: tokens in that cache.
        start: the first position of the part.
        end: the position after the last one; None: the end of the texts.
        chosen: the rows of the part; None: all.
    """

    all_logits: Tensor
    read: Callable[..., Tensor]
    before: Callable[[], tuple[Any, ...]] = tuple
    past: int = 0
    start: int = 0
    end: int | None = None
    chosen: slice | list[int] | None = None

    @property
    def logits(self) -> Tensor:
        rows = self.all_logits if self.chosen is None else self.all_logits[self.chosen]
        return rows[:, self.start : self.end]

    @property
    def length(self) -> int:
        return self.all_logits.shape[1]

    def repeat(self) -> Reading:
        return replace(self, all_logits=self.read(*self.before()))

    def observe(self, model: nn.Module, edit: Edit = lambda place, tensors: tensors) -> Trace:
        return observe(model, partial(self.read, *self.before()), edit)

    def view(self, tensor: Tensor) -> Tensor | None:
        """Select the part in a tensor; all of a tensor without rows or positions, as all may read it.

        None for attention weights, which have two dimensions of positions, and blocks of positions, which have none.
        """
        rows = len(self.all_logits)
        if tensor.dim() > 1 and self.length > 1 and len(tensor) == rows * self.length:  # (B N, ..)
            tensor = tensor.unflatten(0, (rows, self.length))
        view: Tensor | None = tensor
        is_whole = self.chosen is not None and self.start == 0 and self.end in (None, self.length)
        if self.length > 1 and not is_whole:
            view = self.narrow(tensor)
        if self.chosen is None or view is None or view.dim() == 0 or len(view) % rows:
            return view
        by_row = view.unflatten(0, (rows, -1))  # also of (B H, ..)
        return by_row[self.chosen].flatten(0, 1)

    def narrow(self, tensor: Tensor) -> Tensor | None:
        """Select the positions in all rows; None as for `view`."""
        rows = len(self.all_logits)
        end = self.length if self.end is None else self.end
        for past in {0, self.past}:
            dims = [dim for dim, size in enumerate(tensor.shape) if size == past + self.length]
            if len(dims) == 1:
                return tensor.narrow(dims[0], self.start, past + end - self.start)
            if dims:
                return None
        fewest = 2 if tensor.is_floating_point() else 1  # a float (B, E) may be a summary of a text, token ids are none
        if (
            tensor.dim() > fewest and len(tensor) in (1, rows) and tensor.shape[1] > self.length
        ):  # padded to whole blocks
            return tensor[:, self.start : end]
        has_positions = tensor.dim() > 0 and (fewest == 1 or tensor.numel() > rows * tensor.shape[-1])
        return None if has_positions else tensor


@dataclass
class Trace:
    """Tensors that the modules of a model are given and give in one run, by place, and the logits."""

    tensors: dict[Place, Tensors] = field(default_factory=dict)
    callers: dict[ModuleCall, ModuleCall] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))

    def find_embeddings(self, ids: Tensor) -> list[Tensor]:
        """Find the outputs (B, N, E) of the innermost modules that are given ids (B, N), or transposed ones."""
        embeddings = {}
        for call in self.callers:
            inputs, outputs = (list(self.tensors[*call, side].values()) for side in ("in", "out"))
            for read, output in zip(inputs[:1], outputs, strict=False):
                is_text = torch.equal(read, ids) or torch.equal(read, ids.mT)
                if is_text and output.requires_grad and output.dim() == 3 and output.shape[:2] == read.shape:
                    embeddings[call] = output
        return [embeddings[call] for call in select_innermost(embeddings)]


def select_innermost(calls: Iterable[ModuleCall]) -> list[ModuleCall]:
    """Select the calls of modules inside which none of the others is."""
    names = [name for name, _ in calls]
    innermost = []
    for call in calls:
        prefix = f"{call[0]}."
        if not any(name.startswith(prefix) for name in names):
            innermost.append(call)
    return innermost


def observe(model: nn.Module, run: Callable[[], Tensor], edit: Edit = lambda place, tensors: tensors) -> Trace:
    """Run a model, and write down what its modules are given and give.

    Args:
        model: the model, whose modules get hooks.
        run: runs it, and gives logits.
        edit: is called with each place and its tensors, and returns them, or others to use instead.
    """
    trace = Trace()
    counts = Counter[str]()
    running = [("", 0)]

    def note(place: Place, value: Any) -> Any:
        leaves, tree = _pytree.tree_flatten(value)
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        edited = edit(place, tensors)
        trace.tensors[place] = edited
        if not torch.is_grad_enabled():  # a residual may be added in place
            trace.tensors[place] = {i: tensor.clone() for i, tensor in edited.items()}
        if edited is tensors:
            return None
        return _pytree.tree_unflatten([edited.get(i, leaf) for i, leaf in enumerate(leaves)], tree)

    def enter(name: str, module: nn.Module, args: Any, options: Any) -> Any:
        call = (name, counts[name])
        counts[name] += 1
        trace.callers[call] = running[-1]
        running.append(call)
        edited = note((*call, "in"), (args, options))
        keeps = any(isinstance(value, list | dict) for value in (*args, *options.values()))  # it may change them
        return None if keeps else edited

    def leave(name: str, module: nn.Module, args: Any, out: Any) -> Any:
        return note((*running.pop(), "out"), out)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        trace.logits = run()
    return trace


def are_apart(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether tensors of one shape differ by more than rounding."""
    if tensor.shape != expected.shape or torch.equal(tensor, expected):
        return False
    if not tensor.is_floating_point():
        return True
    rounds = torch.finfo(tensor.dtype).eps * (100 if tensor.dtype.itemsize > 2 else 2)
    return largest(tensor, expected) > rounds * max(float(expected.abs().max()), 1e-30)


@torch.no_grad()  # some modules give a parameter out as it is
def find_layers(model: nn.Module, right: Reading, wrong: Reading, tolerance: float) -> tuple[str, ...]:
    """Name the modules whose code makes the logits of `wrong` differ from those of `right`; none where they do not differ.

    1. Run `wrong`, and replace each input and output of a module by that of `right`, in the part. A tensor that differs before
       it is replaced was made wrong by the code just before: an output by its module, an input by the caller of its module.
    2. Run `wrong` again for each such tensor, in order, with it and those named before it replaced. It counts if the logits
       come to differ by more or by less: a tensor that is not used changes nothing.

    Args:
        model: the model that both readings run.
        right: the reading that is expected.
        wrong: the reading that differs.
        tolerance: the largest difference of logits that does not count.
    """
    expected = right.observe(model)
    divide = divide_by_size(right.logits)
    differing = dict[Place, None]()  # in the order in which they run

    def mend(among: Container[Place], place: Place, tensors: Tensors) -> Tensors:
        """Replace tensors of the places `among` by those of `right`, and note which of them differ."""
        mended = dict(tensors)
        replacements = expected.tensors.get(place, {}) if place in among else {}
        for i in tensors.keys() & replacements.keys():
            source = right.view(replacements[i])
            copied = tensors[i].clone()  # not made contiguous: dropout follows the order in memory
            target = wrong.view(copied)
            if target is not None and source is not None and are_apart(target, source):
                target.copy_(source)
                mended[i] = copied
                differing[place] = None
        return mended if place in differing else tensors

    def measure(logits: Tensor) -> float:
        """Sum all differences; 0 where none counts."""
        differences = (divide(logits) - divide(right.logits)).abs()
        return float(differences.sum()) if float(differences.max()) > tolerance else 0.0

    wrong.observe(model, partial(mend, expected.tensors))
    size = measure(wrong.logits)
    owners = dict[str, str]()
    mended = list[Place]()
    for place in list(differing):
        if not size or len(owners) == MOST_LAYERS:
            break
        trace = wrong.observe(model, partial(mend, [*mended, place]))
        remaining = measure(replace(wrong, all_logits=trace.logits).logits)
        if abs(remaining - size) > 1e-6 * size:
            name, number, side = place
            owner = name if side == "out" else expected.callers[name, number][0]
            owners.setdefault(owner, owner or f"{OWN_FORWARD}, before {name}")
            mended.append(place)
            size = remaining
    return tuple(owners.values()) or ((OWN_FORWARD,) if size > 0 else ())


def find_layers_by_gradient(trace: Trace, value: Tensor, later: Reading, tolerance: float) -> tuple[str, ...]:
    """Name the innermost modules whose later inputs a number depends on by gradient, though not on their later outputs.

    Args:
        trace: a run of the model with gradients.
        value: the number.
        later: has the part of inputs and outputs that is later.
        tolerance: the largest gradient that does not count.
    """
    tensors = []
    for values in trace.tensors.values():
        tensors += [tensor for tensor in values.values() if tensor.requires_grad]
    reached = set()
    for tensor, gradient in zip(tensors, torch.autograd.grad(value, tensors, allow_unused=True), strict=True):
        part = None if gradient is None else later.view(gradient)
        if part is not None and part.numel() and float(part.abs().max()) > tolerance:
            reached.add(id(tensor))

    def is_reached(call: ModuleCall, side: Side) -> bool:
        return not reached.isdisjoint(map(id, trace.tensors[*call, side].values()))

    guilty = [call for call in trace.callers if is_reached(call, "in") and not is_reached(call, "out")]
    names = [name for name, _ in select_innermost(guilty)]
    return tuple(dict.fromkeys(names[:MOST_LAYERS])) or (OWN_FORWARD,)


def find_layer_by_compiler(model: nn.Module, right: Reading, wrong: Reading, tolerance: float) -> tuple[str, ...]:
    """Name the innermost module by which the readings differ where it alone is compiled.

    Args:
        model: the model that both readings run.
        right: the reading that is expected.
        wrong: the reading that differs.
        tolerance: the largest difference of logits that does not count.
    """
    innermost = ""
    divide = divide_by_size(right.logits)
    for name, module in model.named_modules():
        if name.startswith(innermost and f"{innermost}.") and name:
            module.compile(backend="aot_eager")
            try:
                logits = (divide(reading.repeat().logits) for reading in (right, wrong))
                if largest(*logits) > tolerance:
                    innermost = name
            finally:
                module._compiled_call_impl = None
    return (innermost or OWN_FORWARD,)
