"""Speed is chosen here and nowhere else. Every kernel computes what `reference` computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullrank.attention.kernels.compiled import traced
from fullrank.attention.kernels.native import native, native_computes
from fullrank.attention.kernels.native_build import library
from fullrank.attention.kernels.pipeline import expressible, pipeline_of
from fullrank.attention.kernels.query_blocks import blocks_compute, query_blocks
from fullrank.attention.kernels.reference import reference
from fullrank.attention.kernels.sdpa import sdpa
from fullrank.attention.mix import KeepHeads
from fullrank.attention.normalize import Softmax
from fullrank.attention.score import DotProduct
from fullrank.errors import InputError, suggest

if TYPE_CHECKING:
    from fullrank.attention.layout import Layout
    from fullrank.attention.project import Heads
    from fullrank.attention.trace import Trace
    from fullrank.attention.weighted import WeightedValues

Kernel = Callable[["WeightedValues", "Heads", "Layout", "Trace | None"], Tensor]
_forced: str | None = None  # a plain global, so that torch.compile guards on it
_chosen: set[str] | None = None
_SHORT = 48  # queries, below which PyTorch's own kernel is faster for plain attention without dropout (measured)


def kernel_for(attend: WeightedValues, tracing: bool) -> Kernel:
    """The fastest kernel that computes these stages, or the one fixed by `kernel(...)`."""
    if _forced == "reference":
        return reference
    if tracing:
        if _forced is not None:
            raise InputError(f"kernel '{_forced}' cannot give attention weights for a trace or a penalty; use 'auto'")
        return reference
    if _forced is None:
        return fastest if expressible(attend) else reference
    if not _computes(_forced, attend):
        stages = ", ".join(type(stage).__name__ for stage in (attend.score, attend.normalize, attend.mix))
        raise InputError(f"kernel '{_forced}' cannot compute {stages}; use kernel 'auto' or 'reference'")
    return KERNELS[_forced]


def _computes(name: str, attend: WeightedValues) -> bool:
    """By the stages alone; a call of some layout or dtype may still go to another kernel, or be refused."""
    if name == "sdpa":
        return _plain(attend)
    return name in ("blocks", "native") and expressible(attend)


def _plain(attend: WeightedValues) -> bool:
    return (type(attend.score), type(attend.normalize), type(attend.mix)) == (DotProduct, Softmax, KeepHeads)


def fastest(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """The kernel that is the fastest for these tensors, of stages that are `expressible`."""
    if layout.shape[0] > 1:
        pipeline = pipeline_of(attend, heads, layout)
        short = pipeline.plain and not pipeline.dropout and layout.shape[0] < _SHORT
        if not short and native_computes(pipeline):
            _note("native")
            return native(pipeline)
    name = "sdpa" if _plain(attend) else "blocks"
    _note(name)
    return KERNELS[name](attend, heads, layout, trace)


def _note(name: str) -> None:
    if _chosen is not None:
        _chosen.add(name)


@contextlib.contextmanager
def chosen() -> Iterator[set[str]]:
    """The names of the kernels that "auto" takes inside a `with` block, as they are taken."""
    global _chosen
    before, found = _chosen, set[str]()
    _chosen = found
    try:
        yield found
    finally:
        _chosen = before


def blocks(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """`query_blocks`, or the reference where these do not compute; a compiler gets stages to trace."""
    if torch.compiler.is_compiling():
        return traced(attend, heads, layout, trace)
    pipeline = pipeline_of(attend, heads, layout)
    return query_blocks(pipeline) if blocks_compute(pipeline) else reference(attend, heads, layout, trace)


def only_native(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """The C++ kernel; the reference where a relative score meets padding or queries that see later keys."""
    pipeline = pipeline_of(attend, heads, layout)
    if native_computes(pipeline):
        return native(pipeline)
    if (
        library() is None
        or heads.values.device.type != "cpu"
        or heads.values.dtype not in (torch.float32, torch.float64)
    ):
        given = f"{heads.values.dtype} on {heads.values.device}".removeprefix("torch.")
        raise InputError(
            "kernel 'native' computes fp32 and fp64 on a CPU, where a C++ compiler is installed and FULLRANK_NATIVE is not 0; "
            f"given {given}, {'no compiled library' if library() is None else 'with a compiled library'}; use 'auto'"
        )
    return reference(attend, heads, layout, trace)


KERNELS: dict[str, Kernel] = {"reference": reference, "sdpa": sdpa, "blocks": blocks, "native": only_native}
NAMES = ("auto", *KERNELS, "multilinear")  # the last is that of attention without weights


def forced() -> str | None:
    """The kernel that is fixed by `kernel(...)`; None: the fastest."""
    return _forced


@contextlib.contextmanager
def kernel(name: str) -> Iterator[None]:
    """Fix the attention kernel inside a `with` block: one of `NAMES`.

    `reference` also has vocabulary layers computed as their equations read: twice differentiable, with all logits in memory.

    Raises InputError for an unknown name, and in a forward pass if the kernel cannot compute the model's stages.
    """
    global _forced
    if name not in NAMES:
        raise InputError(f"kernel: '{name}' is not available; {suggest(name, NAMES)}")
    before, _forced = _forced, None if name == "auto" else name
    try:
        yield
    finally:
        _forced = before
