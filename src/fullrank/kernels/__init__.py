"""Speed is chosen here and nowhere else. Every kernel computes what `reference` computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullrank.core.errors import InputError, suggest
from fullrank.core.mix import KeepHeads
from fullrank.core.normalize import Softmax
from fullrank.core.score import DotProduct
from fullrank.kernels import vocabulary
from fullrank.kernels.compiled import traced
from fullrank.kernels.native import native, native_computes
from fullrank.kernels.native_build import library
from fullrank.kernels.pipeline import Pipeline, expressible, pipeline_of
from fullrank.kernels.query_blocks import blocks_compute, query_blocks
from fullrank.kernels.reference import reference
from fullrank.kernels.sdpa import sdpa
from fullrank.kernels.triton_mixed import triton_computes, triton_mixed, triton_runs

if TYPE_CHECKING:
    from fullrank.core.engine import Components
    from fullrank.core.layout import Layout
    from fullrank.core.project import Heads
    from fullrank.core.trace import Trace
    from fullrank.core.weighted import WeightedValues

Kernel = Callable[["WeightedValues", "Heads", "Layout", "Trace | None"], Tensor]
_forced: str | None = None  # a plain global, so that torch.compile guards on it
_chosen: set[str] | None = None
# queries, below which plain attention is faster by PyTorch's operations than in C++, on a CPU (measured from 16 to 1024)
_SHORT, _SHORT_HALF = 48, 320


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
    return name in _OF_PIPELINES and expressible(attend)


def _plain(attend: WeightedValues) -> bool:
    return (type(attend.score), type(attend.normalize), type(attend.mix)) == (DotProduct, Softmax, KeepHeads)


def fastest(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """The kernel that is the fastest for these tensors, of stages that are `expressible`."""
    pipeline = pipeline_of(attend, heads, layout)
    name = _fastest(pipeline)
    _note(name)
    if name in _OF_PIPELINES:
        return _OF_PIPELINES[name][1](pipeline)
    return {"sdpa": sdpa, "compiled": traced, "reference": reference}[name](attend, heads, layout, trace)


def _fastest(pipeline: Pipeline) -> str:
    gpu, queries = pipeline.values.device.type == "cuda", pipeline.layout.shape[0]
    if not pipeline.fits:
        return "reference"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "sdpa" if pipeline.plain else "reference"  # kernels written by hand know no torch.func
    half = pipeline.values.dtype in (torch.bfloat16, torch.float16)
    short = queries < _SHORT_HALF if half else queries < _SHORT and not pipeline.dropout
    if pipeline.plain and (gpu or queries == 1 or short):
        return "sdpa"
    if queries > 1 and native_computes(pipeline):
        return "native"
    if pipeline.plain:
        return "sdpa"
    if queries > 1 and gpu and triton_computes(pipeline):
        return "triton"
    if torch.compiler.is_compiling():
        return "compiled"
    return "blocks" if blocks_compute(pipeline) else "reference"


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


def _fixed(name: str) -> Kernel:
    """The kernel as `kernel(name)` asks for it: the reference where a layout is not for it; refused where a machine is not."""
    computes, compute = _OF_PIPELINES[name]

    def run(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
        if name == "blocks" and torch.compiler.is_compiling():
            return traced(attend, heads, layout, trace)
        pipeline = pipeline_of(attend, heads, layout)
        if (needed := _NEEDED.get(name)) is not None and not needed[0](pipeline):
            given = f"{heads.values.dtype} on {heads.values.device}".removeprefix("torch.")
            raise InputError(f"kernel '{name}' needs {needed[1]}; given {given}; use 'auto'")
        return compute(pipeline) if computes(pipeline) else reference(attend, heads, layout, trace)

    return run


def _native_runs(pipeline: Pipeline) -> bool:
    values = pipeline.values
    return values.device.type == "cpu" and library() is not None


def _triton_runs(pipeline: Pipeline) -> bool:
    return pipeline.values.is_cuda and triton_runs(pipeline)  # its interpreter, on a CPU, is for tests


_OF_PIPELINES: dict[str, tuple[Callable[[Pipeline], bool], Callable[[Pipeline], Tensor]]] = {
    "blocks": (blocks_compute, query_blocks),
    "native": (native_computes, native),
    "triton": (triton_computes, triton_mixed),
}
_NEEDED: dict[str, tuple[Callable[[Pipeline], bool], str]] = {
    "native": (
        _native_runs,
        "a CPU, a C++ compiler, and FULLRANK_NATIVE that is not 0",
    ),
    "triton": (
        _triton_runs,
        "bf16, fp16 or fp32 on a CUDA device of compute capability 8 or more, with Triton",
    ),
}
KERNELS: dict[str, Kernel] = {"reference": reference, "sdpa": sdpa, **{name: _fixed(name) for name in _OF_PIPELINES}}
NAMES = ("auto", *KERNELS, "multilinear")  # the last is that of attention without weights


def vocabulary_nll(components: Components, ids: Tensor) -> Tensor | None:
    """See `fullrank.core.engine`."""
    return None if _forced == "reference" else vocabulary.vocabulary_nll(components, ids)


def vocabulary_loss(
    components: Components, ids: Tensor, scale: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor] | None:
    """See `fullrank.core.engine`."""
    return None if _forced == "reference" else vocabulary.vocabulary_loss(components, ids, scale, label_smoothing)


def vocabulary_log_prob(components: Components) -> Tensor | None:
    """See `fullrank.core.engine`."""
    return None if _forced == "reference" else vocabulary.vocabulary_log_prob(components)


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
