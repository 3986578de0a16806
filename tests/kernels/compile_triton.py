"""Compiles the Triton kernels of mixed heads for an H200, without one: `python compile_triton.py`; a line for each."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fullrank.kernels.triton.launch import KERNELS, choices

HEADS, WIDTH, SHARED = 2, 16, 232_448
POINTERS = {
    **dict.fromkeys(("Q", "K", "V", "OUT", "D_OUT", "D_Q", "D_K", "D_V"), "*bf16"),
    **dict.fromkeys(("TOTAL", "DELTA", "MIXING", "D_MIXING"), "*fp32"),
    **dict.fromkeys(("FIRST", "END", "OWN", "LOOKS", "LOOKED"), "*i32"),
    "TOKENS": "*u8",
    "SEED": "*i64",
}
NUMBERS = {**dict.fromkeys(("N", "M", "least", "LONG"), "i32"), **dict.fromkeys(("scale", "unit", "kept"), "fp32")}
CONSTANTS = {"H": HEADS, "D": WIDTH, "BD": WIDTH, "MIX": 2, "SIGMOID": True, "PADDED": True, "PACKED": 1, "DROP": True,
             "PRECISION": "ieee", "EACH": 1}  # fmt: skip

for name, kernel in KERNELS.items():
    sizes, warps, stages = choices(name, HEADS, WIDTH, 2, "ieee", SHARED)[0]
    types = {**POINTERS, **NUMBERS}
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    constants = {argument: value for argument, value in {**CONSTANTS, **sizes}.items() if argument in kernel.arg_names}
    made = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED, f"{name}: {made.metadata.shared} bytes of shared memory"
    print(name, made.metadata.shared)
