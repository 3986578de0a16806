"""The choice of a kernel for weighted attention. Every kernel computes what the definition computes (`core/attention.py`).

    sdpa      scaled dot product, softmax, no mixing: PyTorch's fused kernel
    native    C++ on a CPU, compiled when first needed
    triton    mixed heads on a GPU

The last two are for every normaliser and mixing that engines know, and keep nothing of the size of the weights. Without a C++
compiler, and for relative scores on a GPU, the definition computes.

PyTorch multiplies by weights, except where others are faster: `native/few_rows.py` for few rows on a CPU, and oneDNN
(`vocabulary.multiply_large`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core import engine
from fullrank.core.engine import Components, Pairs, Problem, Tokens
from fullrank.core.errors import InputError, suggest
from fullrank.kernels import multilinear, native, triton, vocabulary
from fullrank.kernels.native import fits, is_plain, needs_grad
from fullrank.kernels.native.few_rows import LEAST_WEIGHTS, MOST_ROWS, attend_one_query, multiply_few_rows
from fullrank.kernels.vocabulary import is_exporting, is_transformed, leave_out_of_graphs

Reason = Callable[[Problem], str | None]  # None: the kernel computes the call
_PLAIN_ONLY = "it computes the dot product, softmax and no mixing only"


def _attend_fused(problem: Problem) -> Tensor:
    layout = problem.layout
    causal = layout.plain_causal and not layout.unrestricted and layout.distance_bias is None
    mask = None if causal or layout.unrestricted else layout.visible()
    if layout.distance_bias is not None:
        bias = layout.expand_bias().masked_fill(~layout.visible(), float("-inf"))
        mask = bias.to(problem.query.dtype)
    return F.scaled_dot_product_attention(
        problem.query,
        problem.keys,
        problem.values,
        attn_mask=mask,
        dropout_p=problem.dropout,
        is_causal=causal,
        scale=problem.scale,
    )


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the reasons for which it does not compute a call.

    refuses: a reason in the stages or the machine. Where this kernel is fixed, that is an error.
    declines: a reason in the tensors or the layout. The definition then computes the call, even where this kernel is fixed.
    """

    run: Callable[[Problem], Tensor]
    refuses: Reason
    declines: Reason = lambda problem: None

    def reason(self, problem: Problem) -> str | None:
        """Return the first reason not to run a call. `refuses` comes last, as it may compile C++."""
        return self.declines(problem) or self.refuses(problem)


KERNELS: dict[str, Kernel] = {
    "sdpa": Kernel(_attend_fused, lambda problem: None if is_plain(problem) else _PLAIN_ONLY),
    "native": Kernel(native.attend, native.refuses, native.declines),
    "triton": Kernel(triton.attend, triton.refuses, triton.declines),
}
NAMES = ("auto", "reference", *KERNELS, "multilinear")  # the last is that of attention without weights
_forced: str | None = None  # a plain global, so that torch.compile guards on it
_chosen: set[str] | None = None

# Bounds of the choice, measured on a CPU (docs/log.md): the number of queries from which ...
_NATIVE_FP32 = 48  # ... C++ is faster than PyTorch's fused kernel without dropout, in fp32
_NATIVE_HALF = 320  # ... the same in 16 bits
_NATIVE_HALF_TRAINING = 192  # ... C++ is faster than the definition, in 16 bits with gradients or dropout


def _rank(problem: Problem) -> list[str]:
    """Rank the kernels worth trying for a call, the fastest first; "reference" ends the search."""
    queries = problem.layout.shape[0]
    on_gpu = problem.values.device.type == "cuda"
    plain = is_plain(problem)
    names = ["sdpa"] if plain else []
    if is_transformed():
        return names
    if plain and not on_gpu:
        return _rank_plain(problem, queries)
    if queries > 1:
        names.append("native")
        if on_gpu:
            names.append("triton")
    return names


def _rank_plain(problem: Problem, queries: int) -> list[str]:
    """Rank the kernels worth trying for plain attention on a CPU.

    The fused kernel has no dropout there, and a slow backward pass in 16 bits.
    """
    half = problem.values.dtype in (torch.bfloat16, torch.float16)
    if problem.dropout > 0 or (half and needs_grad(problem)):
        min_queries = _NATIVE_HALF_TRAINING if half else 0
        if queries < min_queries:
            return ["reference"]
        fallback = "sdpa" if torch.compiler.is_compiling() else "reference"
        return ["native", fallback] if queries > 1 else [fallback]
    min_queries = _NATIVE_HALF if half else _NATIVE_FP32
    return ["sdpa"] if is_exporting() or queries < min_queries else ["native", "sdpa"]


def _fastest(problem: Problem) -> str:
    if fits(problem):
        for name in _rank(problem):
            if name == "reference" or KERNELS[name].reason(problem) is None:
                return name
    return "reference"


def attend(problem: Problem | str) -> Tensor | None:
    """Compute weighted attention by the fastest kernel, or by the one fixed by `kernel(...)`.

    Returns None where the definition has to compute it. A string in place of a problem is the reason why no kernel can.
    Raises InputError if the fixed kernel refuses the call.
    """
    if _forced == "reference":
        return None
    if _forced is not None:
        return _run_fixed(_forced, problem)
    if isinstance(problem, str):
        _note("reference")
        return None
    if problem.layout.shape[0] == 1 and not torch.is_grad_enabled():
        out = attend_one_query(problem)
        if out is not None:
            _note("native")
            return out
    name = _fastest(problem)
    _note(name)
    return None if name == "reference" else KERNELS[name].run(problem)


def _run_fixed(name: str, problem: Problem | str) -> Tensor | None:
    reason = "it computes attention without weights" if name not in KERNELS else None
    if reason is None:
        reason = problem if isinstance(problem, str) else KERNELS[name].refuses(problem)
    if reason is not None:
        raise InputError(f"kernel '{name}' cannot compute this attention: {reason}; use 'auto' or 'reference'")
    assert not isinstance(problem, str)
    return KERNELS[name].run(problem) if KERNELS[name].declines(problem) is None else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply by a weight, x W' + b, where a kernel is faster than PyTorch.

    Args:
        x: (.., E).
        weight: (V, E).
        bias: (V,); None for none.

    Returns:
        (.., V); None where PyTorch is the faster library.
    """
    are_few = x.numel() <= MOST_ROWS * x.shape[-1] and weight.numel() >= LEAST_WEIGHTS
    takes_native = are_few and not torch.is_grad_enabled() and _forced != "reference"
    product = multiply_few_rows(x, weight, bias) if takes_native else None
    if product is None:
        product = vocabulary.multiply_large(x, weight, bias)
        if product is not None:
            _note("onednn")
    return product


def multilinear_pairs(problem: Pairs) -> Tensor | None:
    """Compute multi-linear attention over pairs of positions; None where the definition has to compute it."""
    return _run_multilinear(multilinear.multiply_pairs, problem)


def compute_decayed_sums(problem: Tokens | str) -> Tensor | None:
    """Compute decayed sums; None where the definition has to compute them."""
    return _run_multilinear(multilinear.compute_decayed_sums, problem)


def _run_multilinear(run: Callable[[Any], Tensor], problem: Pairs | Tokens | str) -> Tensor | None:
    """Run the kernel of multi-linear attention; None where the definition computes a call.

    Raises InputError if a kernel for attention with weights is fixed.
    """
    if _forced in KERNELS:
        raise InputError(
            f"kernel '{_forced}' cannot compute multi-linear attention; use kernel 'auto', 'multilinear' or 'reference'"
        )
    takes = _forced != "reference" and not isinstance(problem, str)
    if _forced is None:
        takes = not isinstance(problem, str) and multilinear.declines(problem) is None
        _note("multilinear" if takes else "reference")
    return run(problem) if takes else None


def _note(name: str) -> None:
    if _chosen is not None and not torch.compiler.is_compiling():
        _chosen.add(name)


@contextlib.contextmanager
def chosen() -> Iterator[set[str]]:
    """Run the block with a set that collects the names of the kernels that "auto" takes; compiled code adds none."""
    global _chosen
    outer = _chosen
    names: set[str] = set()
    _chosen = names
    try:
        yield names
    finally:
        _chosen = outer


def vocabulary_nll(components: Components, ids: Tensor) -> Tensor | None:
    """Compute the nll (T,) of ids (T,) without the matrix of logits; None where the definition has to compute it."""
    few = not torch.is_grad_enabled() and components.states.shape[:-1].numel() <= MOST_ROWS
    if few or _is_left_to_definition(components, ids):  # the definition has `linear` for few rows
        return None
    return leave_out_of_graphs(vocabulary.vocabulary_nll)(components, ids)


def vocabulary_loss(
    components: Components, ids: Tensor, scale: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor] | None:
    """Compute weighted sums of loss and nll without the matrix of logits, with gradients formed in the forward pass.

    Args:
        components: the softmaxes of the vocabulary layer.
        ids: targets (T,).
        scale: weights of the tokens (T,).
        label_smoothing: share of the target that is spread over all words; 0 for none.

    Returns:
        sum_t scale_t loss_t and, without gradient, sum_t scale_t nll_t; None where the definition has to compute them.
    """
    if _is_left_to_definition(components, ids):
        return None
    return leave_out_of_graphs(vocabulary.vocabulary_loss)(components, ids, scale, label_smoothing)


def _is_left_to_definition(components: Components, ids: Tensor) -> bool:
    """Return whether the definition is fixed, or the kernels cannot run.

    They cannot inside a transform of torch.func, nor with clusters on the meta device, where ids have no values.
    """
    is_unknown = ids.is_meta and len(components.clusters) > 1
    return _forced == "reference" or is_unknown or is_transformed()


def get_forced() -> str | None:
    """Return the kernel that is fixed by `kernel(...)`; None for the fastest."""
    return _forced


@contextlib.contextmanager
def kernel(name: str) -> Iterator[None]:
    """Run the block with a fixed attention kernel, one of `NAMES`.

    With `reference`, vocabulary layers are computed as their equations read, too. They are then twice differentiable, and
    all logits are in memory.

    Raises InputError for an unknown name, and in a forward pass if the kernel cannot compute the model's stages.
    """
    global _forced
    if name not in NAMES:
        raise InputError(f"kernel: '{name}' is not available; {suggest(str(name), NAMES)}")
    outer = _forced
    _forced = None if name == "auto" else name
    try:
        yield
    finally:
        _forced = outer


def _load() -> Any:
    """Return this module, which the definition asks directly from now on."""
    return sys.modules[__name__]


engine.load = _load
