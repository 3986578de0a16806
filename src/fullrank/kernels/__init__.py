"""The choice of a kernel for weighted attention. Every kernel computes what the definition computes (`core/weighted.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.core.engine import Components, Problem
from fullrank.core.errors import InputError, suggest
from fullrank.kernels import compiled, native, query_blocks, sdpa, triton_mixed, vocabulary
from fullrank.kernels.problem import fits, is_plain

Reason = Callable[[Problem], str | None]  # None: the kernel computes the call


def _never(problem: Problem) -> None:
    return None


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the reasons for which it does not compute a call.

    declines: because of the tensors or the layout; the definition computes such a call even if this kernel is fixed.
    refuses: because of the stages or the machine; it is an error to fix this kernel then.
    """

    run: Callable[[Problem], Tensor]
    declines: Reason = _never
    refuses: Reason = _never

    def reason(self, problem: Problem) -> str | None:
        """Either of them; a machine is looked at last, since that may compile C++."""
        return self.declines(problem) or self.refuses(problem)


KERNELS: dict[str, Kernel] = {
    "sdpa": Kernel(sdpa.attend, refuses=sdpa.refuses),
    "blocks": Kernel(query_blocks.attend, query_blocks.declines),
    "native": Kernel(native.attend, native.declines, native.refuses),
    "triton": Kernel(triton_mixed.attend, triton_mixed.declines, triton_mixed.refuses),
}
NAMES = ("auto", "reference", *KERNELS, "multilinear")  # the last is that of attention without weights
_COMPILED = Kernel(compiled.attend, compiled.declines)
_forced: str | None = None  # a plain global, so that torch.compile guards on it
_chosen: set[str] | None = None
# queries, below which plain attention is faster by PyTorch's operations than in C++, on a CPU (measured from 16 to 1024)
_SHORT, _SHORT_HALF = 48, 320


def attend(problem: Problem | str) -> Tensor | None:
    """Weighted attention by the fastest kernel, or the one fixed by `kernel(...)`; None: the definition has to compute it.

    A string is the reason for which no kernel can. Raises InputError if the fixed kernel refuses the call.
    """
    if _forced == "reference":
        return None
    if _forced is not None:
        return _fixed(_forced, problem)
    name = "reference" if isinstance(problem, str) else _fastest(problem)
    if _chosen is not None:
        _chosen.add(name)
    if isinstance(problem, str) or name == "reference":
        return None
    return _COMPILED.run(problem) if name == "compiled" else KERNELS[name].run(problem)


def _fastest(problem: Problem) -> str:
    gpu, queries = problem.values.device.type == "cuda", problem.layout.shape[0]
    plain, compiling = is_plain(problem), torch.compiler.is_compiling()
    if not fits(problem):
        return "reference"
    if not compiling and torch._C._are_functorch_transforms_active():
        return "sdpa" if plain else "reference"  # kernels written by hand know no torch.func
    half = problem.values.dtype in (torch.bfloat16, torch.float16)
    short = queries < _SHORT_HALF if half else queries < _SHORT and not problem.dropout
    if plain and (gpu or queries == 1 or short):
        return "sdpa"
    if queries > 1 and KERNELS["native"].reason(problem) is None:
        return "native"
    if plain:
        return "sdpa"
    if queries > 1 and gpu and KERNELS["triton"].reason(problem) is None:
        return "triton"
    if compiling:
        return "compiled" if _COMPILED.reason(problem) is None else "reference"
    return "blocks" if KERNELS["blocks"].reason(problem) is None else "reference"


def _fixed(name: str, problem: Problem | str) -> Tensor | None:
    refused: str | None
    if name not in KERNELS:
        refused = "it computes attention without weights"
    else:
        refused = problem if isinstance(problem, str) else KERNELS[name].refuses(problem)
    if refused is not None:
        raise InputError(f"kernel '{name}' cannot compute this attention: {refused}; use 'auto' or 'reference'")
    assert not isinstance(problem, str)
    kernel = _COMPILED if name == "blocks" and torch.compiler.is_compiling() else KERNELS[name]
    return kernel.run(problem) if kernel.declines(problem) is None else None


@contextlib.contextmanager
def chosen() -> Iterator[set[str]]:
    """The names of the kernels that "auto" takes inside a `with` block, as they are taken."""
    global _chosen
    before, names = _chosen, set[str]()
    _chosen = names
    try:
        yield names
    finally:
        _chosen = before


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
