"""Activation memory of a training step, from a forward pass on torch's meta device: nothing is allocated or computed.

Every tensor that autograd saves is counted, storage by storage. Kernels need numbers, so attention and the loss of the
vocabulary layer are stand-ins here, which save what the kernels save (`kernels/`): nothing of the size of the attention
weights or the logits. Where the definition computes (synthesizers, penalties), the attention weights are counted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullrank.config.run import RunConfig
from fullrank.core import engine
from fullrank.core.attention import Trace
from fullrank.core.memory import Memory
from fullrank.core.output import projected
from fullrank.kernels import multilinear
from fullrank.kernels.problem import is_plain


@dataclass(frozen=True)
class ForwardPass:
    """Bytes that autograd saves beside parameters, bytes of the memory of the next segment, and kernels that are launched."""

    activations: int
    memory: int
    launches: int


def forward_pass(run: RunConfig, model: nn.Module, rows: int, length: int, *, autocast: bool) -> ForwardPass:
    """The forward pass of `model`, on the meta device, over `rows` rows of `length` tokens.

    autocast: products are bf16; the bf16 copies of parameters that they save count as activations.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    launches = _Launches()
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with torch.device("meta"), _engines(_Stored), launches, _Gpu(autocast), hooks:
        ids, memory = torch.zeros(rows, length, dtype=torch.int64), None
        if run.model.memory_length and not run.masks and not run.translates:
            hidden = torch.zeros(1, run.model.hidden_size, dtype=next(model.parameters()).dtype)
            memory = Memory.zeros(run.model.num_hidden_layers, rows, run.model.memory_length, hidden)
            own |= {layer.hidden.untyped_storage()._cdata for layer in memory.layers if layer.hidden is not None}
        parts = _loss(run, model, ids, memory)
    saved = sum(storage.nbytes() for storage in storages.values())
    return ForwardPass(saved, 0 if parts.memory is None else _bytes(parts.memory), launches.count)


def _bytes(memory: Memory) -> int:
    return sum(layer.hidden.nbytes for layer in memory.layers if layer.hidden is not None)


def _loss(run: RunConfig, model: Any, ids: Tensor, memory: Memory | None) -> Any:
    train = run.train
    trace = Trace() if train.orthogonality or train.overlap else None
    options: dict[str, Any] = {"label_smoothing": train.label_smoothing, "trace": trace}
    if run.translates:
        return model.loss_parts(ids, ids, ids, **options)
    if run.masks:
        at = torch.arange(max(1, round(train.mlm_probability * ids.numel())))
        return model.loss_parts(ids, at, at=at, **options)
    return model.loss_parts(ids, ids, None, memory, **options)


@contextlib.contextmanager
def _engines(engines: Callable[[], engine.Engines]) -> Iterator[None]:
    before, engine.load = engine.load, engines
    try:
        yield
    finally:
        engine.load = before


class _Stored(engine.Engines):
    """Engines that compute nothing and save what the kernels save; None where the definition computes."""

    def attend(self, problem: engine.Problem | str) -> Tensor | None:
        """Saves the operands and a number for each query and head; PyTorch's fused kernel saves its output, too."""
        if isinstance(problem, str) or problem.layout.strided:
            return None
        far, query = problem.distances, problem.query
        operands = (query, problem.keys, problem.values, problem.mixing, *((far.keys, far.u, far.v) if far else ()))
        of_output = [query.shape] if is_plain(problem) else []
        output: Tensor = _Operation.apply(query, [query.shape[:-1], *of_output], True, *operands)
        return output

    def multilinear_pairs(self, problem: engine.Pairs) -> Tensor | None:
        return multilinear.pairs(problem) if multilinear.declines(problem) is None else None

    def decayed_sums(self, problem: engine.Tokens | str) -> Tensor | None:
        return None if isinstance(problem, str) or multilinear.declines(problem) else multilinear.decayed_sums(problem)

    def vocabulary_loss(
        self, components: engine.Components, ids: Tensor, scale: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Saves the gradients of states, prior and matrices, which are formed in the forward pass.

        A tail meets its own tokens, by Zipf's law; with label smoothing it meets all of them.
        """
        prior, total, start = components.log_prior, scale.sum(), 0
        sizes = [len(cluster.weight) for cluster in components.clusters]
        sizes[0] -= len(sizes) - 1
        for cluster, size in zip(components.clusters, sizes, strict=True):
            end, states = start + size, components.states
            if start and not label_smoothing:
                share = (math.log(2 * end + 1) - math.log(2 * start + 1)) / math.log(2 * sum(sizes) + 1)
                states = states[: math.ceil(share * len(ids))].clone()
            operands = (projected(cluster, states), cluster.weight, cluster.bias, None if start else prior)
            tensors = [tensor for tensor in operands if tensor is not None]
            total, start = total + _Operation.apply(scale.sum(), [x.shape for x in tensors], False, *tensors), end
        return total, total.detach()


class _Operation(torch.autograd.Function):
    """A kernel that returns a tensor like `like`, and saves tensors of `shapes` in its dtype, and the operands if asked."""

    @staticmethod
    def forward(
        ctx: Any, like: Tensor, shapes: list[torch.Size], saves_operands: bool, *operands: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*(like.new_empty(shape) for shape in shapes), *(operands if saves_operands else ()))
        return torch.empty_like(like)


class _Launches(TorchDispatchMode):
    """Count operations that a GPU would launch a kernel for: all that are no views."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not operation.is_view
        return operation(*args, **(kwargs or {}))


class _Gpu(TorchFunctionMode):
    """GPU behaviour that the meta device lacks: dropout saves a byte for each entry, autocast makes products bf16."""

    PRODUCTS = ("linear", "matmul", "__matmul__", "bmm", "mm", "einsum", "addmm", "baddbmm")

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.autocast = autocast
        self.copies: dict[int, Tensor] = {}  # of parameters: each is made once

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.dropout:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        if self.autocast and getattr(function, "__name__", "") in self.PRODUCTS:
            args = tuple(self._narrow(x) if isinstance(x, Tensor) else x for x in args)
        return function(*args, **(kwargs or {}))

    def _narrow(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        if not x.is_leaf:
            return x.bfloat16()
        return self.copies.setdefault(id(x), x.bfloat16())
