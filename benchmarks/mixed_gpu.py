"""Attention with mixed heads on a GPU: the Triton kernel against flash attention and the formula.

    python benchmarks/mixed_gpu.py [--rounds 9] [--minutes 7] [--lengths 512 8192] [--json FILE]

    ours A, ours B      our Triton kernel with one matrix for all positions, and with one for each query
    flash               scaled_dot_product_attention, which mixes nothing: its flash kernel, for fp32 its memory-efficient one
    FlexAttention       compiled, causal block mask, mixes nothing
    naive A, naive B    the formula in eager mode: all weights of all heads in memory
    compiled naive A    the same through torch.compile

Causal, 32,768 tokens a call, heads as they come from a projection; the gradient of the mixing matrix is part of the backward
pass, how B's matrix is made from the query is not. All candidates run once a round, in rotating order, timed with CUDA events;
ratio = median over rounds of the ratio to flash in the same round. Memory: the peak of one forward and backward pass above
what was there. Kernels are compiled first, in several processes. No new shape begins after `--minutes`; those left out are
named. Needs a CUDA device: without one the script says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fullrank as fr
from closer import parse, save
from fullrank.core.engine import Problem
from fullrank.kernels import KERNELS
from machine import cuda_growth_mib
from mixing import formula
from timing import Ratio, cuda_seconds, times_of

TOKENS = 32_768  # so many that the GPU is busy, not the launch of kernels
AT_LEAST = 0.01  # seconds; what is shorter runs several times in a row
REFERENCE = "flash"
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {"bf16": 3e-2, "fp16": 4e-3, "fp32": 2e-5}


@dataclass(frozen=True)
class Shape:
    """Heads, size of a head, tokens of a text, dtype; compiled: whether peers that take long to compile run too."""

    heads: int
    size: int
    length: int
    dtype: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"H {self.heads}, D {self.size}, N {self.length}, B {self.batch}, {self.dtype}"

    @property
    def batch(self) -> int:
        return max(TOKENS // self.length, 1)


SHAPES = [
    *(Shape(8, 64, length, "bf16", compiled=True) for length in (1024, 2048, 4096, 8192, 512)),
    *(Shape(8, 64, length, "fp32") for length in (2048, 8192, 512)),
    Shape(16, 64, 2048, "bf16"),
    Shape(32, 16, 2048, "bf16"),
    Shape(32, 32, 2048, "bf16"),
    Shape(8, 64, 2048, "fp16"),
    Shape(8, 128, 2048, "bf16"),
    *(Shape(8, 64, length, "fp16") for length in (1024, 4096, 8192)),
    Shape(32, 16, 8192, "bf16"),
    Shape(32, 32, 8192, "bf16"),
    Shape(16, 64, 8192, "bf16"),
]


def operands(shape: Shape, mixing: str, device: str) -> list[Tensor | None]:
    """query, keys, values (B, H, N, D) and M, near the identity; all need gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*dims: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(dims, generator=generator, device=device).to(dtype)

    dims = (shape.batch, shape.heads, shape.length, shape.size)
    heads: list[Tensor | None] = [drawn(*dims, dtype=DTYPES[shape.dtype]).requires_grad_() for _ in range(3)]
    lead = {"none": None, "A": (), "B": (shape.batch, shape.length)}[mixing]
    if lead is None:
        return [*heads, None]
    matrix = torch.eye(shape.heads, device=device) + 0.1 * drawn(*lead, shape.heads, shape.heads)
    return [*heads, matrix.requires_grad_()]


def ours(query: Tensor, keys: Tensor, values: Tensor, mixing: Tensor | None) -> Tensor:
    layout = fr.Layout.of(query.shape[2])
    wanted = Problem(query, keys, values, mixing, None, layout, query.shape[-1] ** -0.5, "softmax", 0.0)
    assert KERNELS["triton"].reason(wanted) is None
    return KERNELS["triton"].run(wanted)


def naive(query: Tensor, keys: Tensor, values: Tensor, mixing: Tensor | None) -> Tensor:
    """The formula of `mixing`, in the dtype of the heads."""
    assert mixing is not None
    future = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).triu(1)
    return formula(query, keys, values, mixing.to(query.dtype), future)


def flash(query: Tensor, keys: Tensor, values: Tensor, mixing: Tensor | None) -> Tensor:
    if query.device.type == "cpu":
        backend = SDPBackend.FLASH_ATTENTION
    else:
        backend = SDPBackend.EFFICIENT_ATTENTION if query.dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True)


@functools.cache
def _flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), create_block_mask


def flex(query: Tensor, keys: Tensor, values: Tensor, mixing: Tensor | None) -> Tensor:
    attend, _ = _flex()
    out: Tensor = attend(query, keys, values, block_mask=_causal(query.shape[2], str(query.device)))
    return out


@functools.lru_cache(maxsize=1)
def _causal(length: int, device: str) -> Any:
    return _flex()[1](lambda b, h, n, m: m <= n, None, None, length, length, device=device)


def candidates(shape: Shape) -> dict[str, tuple[Attend, str]]:
    """By name: what to run, and on which mixing."""
    made: dict[str, tuple[Attend, str]] = {REFERENCE: (flash, "none")}
    for mixing in ("A", "B"):
        made |= {f"ours {mixing}": (ours, mixing), f"naive {mixing}": (naive, mixing)}
        if shape.compiled:
            made[f"compiled naive {mixing}"] = (torch.compile(naive, dynamic=False), mixing)
    if shape.compiled:
        made["FlexAttention"] = (flex, "none")
    return made


def pass_of(attend: Attend, inputs: list[Tensor | None], backward: bool) -> Callable[[], None]:
    asked = [tensor for tensor in inputs if tensor is not None]
    first = asked[0]
    cotangent = torch.randn(first.shape, generator=torch.Generator(first.device).manual_seed(1), device=first.device)
    cotangent = cotangent.to(first.dtype)

    def run() -> None:
        with contextlib.nullcontext() if backward else torch.no_grad():
            out = attend(*inputs)  # type: ignore[arg-type]
        if backward:
            torch.autograd.grad(out, asked, cotangent)

    return run


def error(shape: Shape, mixing: str, device: str) -> float:
    """The greatest error of the output and all gradients against the formula in fp32, as a share of the largest number."""
    given = operands(dataclasses.replace(shape, length=min(shape.length, 512)), mixing, device)
    given = [None if x is None else x.detach()[:1].requires_grad_() if x.dim() == 4 else x for x in given]
    asked = [x for x in given if x is not None]
    wide = [x.detach().float().requires_grad_() for x in asked]
    with _full_precision():
        outs = (ours(*given), naive(*(wide if len(wide) == 4 else [*wide, None])))  # type: ignore[arg-type]
        cotangent = torch.randn_like(outs[0])
        found, right = (
            [out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))]
            for out, inputs in zip(outs, (asked, wide), strict=True)
        )
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(found, right, strict=True))


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """A row for each candidate that could run; the others are named with their reason."""
    made, rows = candidates(shape), []
    inputs = {mixing: operands(shape, mixing, "cuda") for mixing in ("none", "A", "B")}
    print(f"\n{shape}", flush=True)
    for mixing in ("A", "B"):
        off = error(shape, mixing, "cuda")
        wrong = "" if off < TOLERANCE[shape.dtype] else "   WRONG"
        print(f"  ours {mixing} is off by {off:.1e} of the largest number{wrong}", flush=True)
        rows.append({"candidate": f"ours {mixing}", "error": off})
    for backward in (False, True):
        runs = {name: pass_of(attend, inputs[mixing], backward) for name, (attend, mixing) in made.items()}
        memory: dict[str, float] = {}
        for name in list(runs):
            try:
                runs[name]()  # compiles
                memory[name] = cuda_growth_mib(runs[name], torch.device("cuda"))
            except Exception as failure:  # a peer that cannot run here must not end the table
                print(f"  {name}: {type(failure).__name__}: {str(failure).splitlines()[0][:100]}", flush=True)
                del runs[name]
                torch.cuda.empty_cache()
        found = times_of(runs, rounds=rounds, clock=cuda_seconds, at_least=AT_LEAST)
        print(
            f"  {'forward and backward' if backward else 'forward':28} {'ms':>9} {'ratio':>7} {'quartiles':>15} {'MiB':>9}"
        )
        for name, own in found.items():
            row = {"candidate": name, "backward": backward, "ms": 1e3 * statistics.median(own), "mib": memory[name]}
            text = f"  {name:28} {row['ms']:9.3f}"
            if REFERENCE in found:
                ratio = Ratio.of(own, found[REFERENCE])
                row |= {"ratio": ratio.middle, "low": ratio.low, "high": ratio.high}
                text += f" {ratio.middle:6.2f}x   [{ratio.low:5.2f}, {ratio.high:5.2f}]"
            print(f"{text} {memory[name]:9.0f}", flush=True)
            rows.append(row)
    return rows


def compile_all(shapes: list[Shape]) -> None:
    """Fill Triton's cache of machine code, a process for each kind of heads."""
    kinds = sorted({(shape.heads, shape.size, shape.dtype) for shape in shapes})
    begin = time.monotonic()
    command = [sys.executable, __file__, "--compile"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([*command, *map(str, kind)], env=environment) for kind in kinds]
    for kind, process in zip(kinds, running, strict=True):
        if process.wait():
            print(f"compiling for {kind} ended with status {process.returncode}")
    print(f"compiled for {len(kinds)} kinds of heads in {time.monotonic() - begin:.0f} s", flush=True)


def compile_one(heads: str, size: str, dtype: str) -> None:
    for length in (128, 2048):
        for mixing in ("A", "B"):
            shape = Shape(int(heads), int(size), length, dtype)
            given = [None if x is None else x.detach()[:1].requires_grad_() if x.dim() == 4 else x
                     for x in operands(shape, mixing, "cuda")]  # fmt: skip
            pass_of(ours, given, True)()
            torch.cuda.synchronize()


def main() -> int:
    given = parse(
        __doc__,
        minutes={"type": float, "default": 7.0},
        lengths={"type": int, "nargs": "*"},
        compile={"nargs": 3, "help": argparse.SUPPRESS},
    )
    if not torch.cuda.is_available():
        print("benchmarks/mixed_gpu.py needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    if given.compile:
        compile_one(*given.compile)
        return 0
    begin = time.monotonic()
    shapes = [shape for shape in SHAPES if not given.lengths or shape.length in given.lengths]
    compile_all(shapes)
    results: dict[str, Any] = {}
    for shape in shapes:
        if time.monotonic() - begin > 60 * given.minutes:
            print(f"left out, {given.minutes:g} minutes are over: {shape}")
            continue
        results[str(shape)] = measure(shape, given.rounds)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        more = {"gpu": torch.cuda.get_device_name(), "timing": "CUDA events, interleaved; ratio to flash"}
        save(given.json, "mixed heads on a GPU", given.rounds, results, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
