"""Speed is chosen here and nowhere else. Every kernel computes what `reference` computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullrank.attention.kernels.compiled import traced
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


def blocks(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """`query_blocks`, or the reference where these do not compute; a compiler gets stages to trace. (B, H, N, D)."""
    if torch.compiler.is_compiling():
        return traced(attend, heads, layout, trace)
    pipeline = pipeline_of(attend, heads, layout)
    return query_blocks(pipeline) if blocks_compute(pipeline) else reference(attend, heads, layout, trace)


KERNELS: dict[str, Kernel] = {"reference": reference, "sdpa": sdpa, "blocks": blocks}
NAMES = ("auto", *KERNELS, "multilinear")  # the last is that of attention without weights
_forced: str | None = None  # a plain global, so that torch.compile guards on it


def kernel_for(attend: WeightedValues, tracing: bool) -> Kernel:
    """The fastest kernel that computes these stages, or the one fixed by `kernel(...)`."""
    if _forced == "reference":
        return reference
    if tracing:
        if _forced is not None:
            raise InputError(f"kernel '{_forced}' cannot give attention weights for a trace or a penalty; use 'auto'")
        return reference
    fast = _fast(attend)
    if _forced is not None and (fast is None or fast is not KERNELS.get(_forced)):
        stages = ", ".join(type(stage).__name__ for stage in (attend.score, attend.normalize, attend.mix))
        raise InputError(f"kernel '{_forced}' cannot compute {stages}; use kernel 'auto' or 'reference'")
    return fast or reference


def _fast(attend: WeightedValues) -> Kernel | None:
    """The fast kernel of exactly these types: a subclass may compute something else."""
    if (type(attend.score), type(attend.normalize), type(attend.mix)) == (DotProduct, Softmax, KeepHeads):
        return sdpa
    return blocks if expressible(attend) else None


def forced() -> str | None:
    """The kernel that is fixed by `kernel(...)`; None: the fastest."""
    return _forced


@contextlib.contextmanager
def kernel(name: str) -> Iterator[None]:
    """Fix the attention kernel inside a `with` block: `auto`, `reference`, `sdpa`, `blocks` or `multilinear`.

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
