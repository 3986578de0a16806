"""Which block sizes the Triton kernels try, and their launch. Under the interpreter there is nothing to try."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fullrank.attention.kernels import triton_backward, triton_forward

KERNELS: dict[str, Any] = {
    "totals": triton_forward.totals,
    "outputs": triton_forward.outputs,
    "of_mixing": triton_backward.of_mixing,
    "of_values": triton_backward.of_values,
    "of_queries": triton_backward.of_queries,
    "of_keys": triton_backward.of_keys,
}
SMALL = {"G": 3, "GJ": 2, "BM": 16, "BN": 32}


def launch(name: str, common: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    kernel, heads = KERNELS[name], common["H"]

    def grid(sizes: dict[str, Any]) -> tuple[int, int, int]:
        over_keys = name in ("of_values", "of_keys")
        tiles = triton.cdiv(common["M"], sizes["BN"]) if over_keys else triton.cdiv(common["N"], sizes["BM"])
        groups = triton.cdiv(heads, sizes.get("G", 1)) * triton.cdiv(heads, sizes.get("GJ", heads))
        return tiles, groups, common["B"]

    told = {key: value for key, value in common.items() if key in kernel.arg_names}
    sizes = {key: size for key, size in SMALL.items() if key in kernel.arg_names}
    kernel[grid](**tensors, **told, **sizes)
