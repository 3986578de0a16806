"""Which block sizes the Triton kernels try, and their launch. Under the interpreter there is nothing to try."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fullrank.attention.kernels import triton_backward, triton_forward

if TYPE_CHECKING:
    from fullrank.attention.kernels.triton_mixed import Call

KERNELS: dict[str, Any] = {
    "totals": triton_forward.totals,
    "outputs": triton_forward.outputs,
    "of_mixing": triton_backward.of_mixing,
    "of_values": triton_backward.of_values,
    "of_queries": triton_backward.of_queries,
    "of_keys": triton_backward.of_keys,
}
INTERPRETED = isinstance(triton_forward.totals, InterpretedFunction)


def launch(name: str, call: Call, query: Tensor, tensors: dict[str, Tensor]) -> None:
    """Run a kernel over its whole grid; `query` (B, H, N, D) for the number of texts."""
    kernel, heads, texts = KERNELS[name], call.H, query.shape[0]

    def grid(sizes: dict[str, Any]) -> tuple[int, int, int]:
        over_keys = name in ("of_values", "of_keys")
        tiles = triton.cdiv(call.M, sizes["BN"]) if over_keys else triton.cdiv(call.N, sizes["BM"])
        groups = triton.cdiv(heads, sizes.get("G", 1)) * triton.cdiv(heads, sizes["GJ"]) if "GJ" in sizes else (
            heads if name == "totals" else triton.cdiv(heads, sizes["G"])
        )
        return tiles, groups, texts

    common = {key: getattr(call, key) for key in kernel.arg_names if hasattr(call, key)}
    sizes = {key: size for key, size in SMALL.items() if key in kernel.arg_names}
    kernel[grid](**tensors, **common, **sizes)


SMALL = {"G": 3, "GJ": 2, "BM": 16, "BN": 32}
