"""Causal multi-linear attention against the masked tensor of all pairs of every query.

multilinear     ours
naive           T = (Q g o K) V^T (B, N, N, N), masked, times W (N^2, E), with autograd
einsum          the same by torch.einsum, as the equation reads
length-free     ours, with W(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr: no N^2 parameters, another function

`fullrank bench multilinear` compares them. As a script this file looks closer, at more sizes, in fp32 and under bf16 autocast:

    python benchmarks/multilinear.py [--rounds 9] [--threads 1] [--tokens N ..] [--json FILE]

Sizes: B texts of N tokens, rank R, width E, two cores. Memory is the growth of the resident high-water mark in a fresh process,
over inputs and parameters, gradients included (4 N^2 E bytes for W alone). The largest naive form needs about 2 GiB.
`gflop_per_second`: products only, two for a multiply-add, those of what the backward pass computes again included.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from candidates import BOTH, Candidate, Comparison, Pass, Settings
from closer import memory_mib, parse, save, table
from fullrank.core.engine import Pairs
from fullrank.core.layout import Layout
from fullrank.core.multilinear import compute_decayed_sums, multilinear
from fullrank.kernels import multilinear as engine
from timing import Peak, Timing

OURS, NAIVE, EINSUM, LENGTH_FREE = "multilinear", "naive", "einsum", "length-free"
RANK, WIDTH, CORES, SCALES = 40, 256, 2, 8
SEED = 0


@dataclass(frozen=True)
class Size:
    batch: int
    tokens: int
    rank: int
    width: int

    def __str__(self) -> str:
        return f"B {self.batch}, N {self.tokens}, R {self.rank}, E {self.width}"


@dataclass(frozen=True)
class Operands:
    """query, keys, values (B, N, R), cores (2, R), weight (N, N, E)."""

    query: Tensor
    keys: Tensor
    values: Tensor
    cores: Tensor
    weight: Tensor


@functools.lru_cache(maxsize=1)  # ours keeps its masks, too
def _visible(tokens: int, device: torch.device) -> Tensor:
    index = torch.arange(tokens, device=device)
    return torch.maximum(index[:, None], index) <= index[:, None, None]  # (N, N, N)


def naive(operands: Operands) -> Tensor:
    batch, tokens, _ = operands.query.shape
    pairs = (operands.query * operands.cores.mean(0))[:, :, None] * operands.keys[:, None]  # (B, N, N, R)
    products = (pairs.flatten(1, 2) @ operands.values.transpose(1, 2)).view(batch, tokens, tokens, tokens)
    return (products * _visible(tokens, products.device)).flatten(2) @ operands.weight.flatten(0, 1)


def einsum(operands: Operands) -> Tensor:
    products = torch.einsum(
        "bir,bjr,bmr->bijm", operands.query * operands.cores.mean(0), operands.keys, operands.values
    )
    visible = _visible(operands.query.shape[1], products.device)
    return torch.einsum("bijm,jme->bie", products * visible, operands.weight)


def ours(operands: Operands) -> Tensor:
    query = operands.query * operands.cores.mean(0)
    return multilinear(Pairs(query, operands.keys, operands.values, operands.weight, causal=True))


def length_free(leaves: dict[str, Tensor]) -> Tensor:
    """sum_sr q_r A_sr B_sr U_sr, from decayed sums A of the keys and B of the values."""
    query, layout = leaves["query"] * leaves["cores"].mean(0), Layout.of(leaves["query"].shape[1])
    with torch.autocast(query.device.type, enabled=False):
        a = compute_decayed_sums(leaves["keys"], leaves["to_keys"], layout)
        b = compute_decayed_sums(leaves["values"], leaves["to_values"], layout)
    return (query[:, :, None] * a * b).flatten(2) @ leaves["weight"].flatten(0, 1)


FUNCTIONS: dict[str, Callable[[Operands], Tensor]] = {OURS: ours, NAIVE: naive, EINSUM: einsum}


def case(size: Size, name: str, settings: Settings) -> Pass:
    """One forward and backward pass of `name`, under autocast where the dtype is narrow."""
    generator = torch.Generator().manual_seed(SEED)
    query, keys, values, cotangent = (
        torch.randn(size.batch, size.tokens, last, generator=generator) * last**-0.5
        for last in (size.rank, size.rank, size.rank, size.width)
    )
    cores = torch.rand(CORES, size.rank, generator=generator)
    leaves = {"query": query, "keys": keys, "values": values, "cores": cores}
    if name == LENGTH_FREE:
        decays = torch.linspace(-2, -0.01, SCALES)
        weight = torch.randn(SCALES, size.rank, size.width, generator=generator)
        leaves |= {"to_keys": decays.clone(), "to_values": decays.clone(), "weight": weight}
    else:
        leaves["weight"] = torch.randn(size.tokens, size.tokens, size.width, generator=generator) / size.tokens
    leaves = {key: leaf.to(settings.torch_device).requires_grad_() for key, leaf in leaves.items()}

    def forward() -> Tensor:
        with settings.autocast():
            return length_free(leaves) if name == LENGTH_FREE else FUNCTIONS[name](Operands(**leaves))

    return Pass(forward, leaves, cotangent.to(settings.torch_device), True)


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    size = Size(settings.batch or 4, length, RANK, WIDTH)
    cube = 4 * size.batch * size.tokens**3  # bytes of the tensor of all pairs of every query

    def candidate(name: str, computes: str, against: tuple[str, ...] = (), takes: int = 0) -> Candidate:
        return Candidate(name, functools.partial(case, size, name, settings), computes, against, takes=takes)

    candidates = (
        candidate(OURS, "pairs", (NAIVE, EINSUM)),
        candidate(NAIVE, "pairs", takes=3 * cube),
        candidate(EINSUM, "pairs", takes=3 * cube),
        candidate(LENGTH_FREE, "decays", (NAIVE, EINSUM)),
    )
    return [Comparison(str(size), length, BOTH, candidates)]


# the closer look

REFERENCE = "naive fp32"
BATCHES = {32: (1, 2, 4, 8, 60), 64: (1, 8), 80: (1, 8), 128: (1, 4), 256: (1, 4)}  # by tokens
SIZES = [Size(batch, tokens, RANK, WIDTH) for tokens, batches in BATCHES.items() for batch in batches]
CANDIDATES = ("naive fp32", "einsum fp32", "multilinear fp32", "naive bf16", "multilinear bf16", f"{LENGTH_FREE} fp32")
CANDIDATES_IN_WORDS = {
    "naive": "T = (Q g o K) V^T (B, N, N, N), masked, times W (N^2, E), with autograd",
    "einsum": "the same by two calls of torch.einsum",
    "multilinear": "fullrank.core.multilinear with its engine",
    "length-free": f"another function: W(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr, S = {SCALES}, no N^2 parameters",
    "bf16": "the same under autocast, parameters in fp32",
}


def flops(size: Size, name: str) -> int | None:
    """FLOPs of the products of a forward and a backward pass; None where it is not a product with T."""
    if name.startswith(LENGTH_FREE):
        return None
    if name.startswith("multilinear"):
        half = name.endswith("bf16")
        call = engine.Size(size.batch, size.tokens, size.tokens, size.rank, size.width, causal=True, half=half)
        return 2 * engine.multiply_adds(call).training
    return 6 * size.batch * size.tokens**3 * (size.rank + size.width)


def named(size: Size, name: str) -> Pass:
    """One forward and backward pass of a candidate: its form and its dtype."""
    form, _, dtype = name.rpartition(" ")
    return case(size, form, Settings(dtype=dtype))


def main() -> None:
    given = parse(
        __doc__,
        make=lambda numbers, name: named(Size(*numbers), name),
        tiny=lambda numbers: (1, 64, 8, 16),
        tokens={"type": int, "nargs": "+", "metavar": "N", "help": "only sizes with so many tokens"},
    )
    results = {}
    for size in (size for size in SIZES if given.tokens is None or size.tokens in given.tokens):
        memory: dict[str, float] = {}

        def figures(timing: Timing, peak: Peak, size: Size = size, memory: dict[str, float] = memory) -> dict[str, Any]:
            done = flops(size, timing.name)
            memory[timing.name] = memory_mib(timing.name, size)
            return {
                "gflop_per_second": None if done is None else done / timing.seconds / 1e9,
                "memory_mib": memory[timing.name],
                "memory_share": memory[timing.name] / memory[REFERENCE],  # the reference comes first
            }

        passes = {name: named(size, name) for name in CANDIDATES}
        results[str(size)] = table(str(size), passes, REFERENCE, given.rounds, figures)
    save(
        given.json,
        "causal multi-linear attention, forward and backward",
        given.rounds,
        results,
        config={"rank": RANK, "width": WIDTH, "cores": CORES, "causal": "masked", "decays": SCALES},
        seed=SEED,
        reference=REFERENCE,
        candidates=CANDIDATES_IN_WORDS,
        memory="growth of the resident high-water mark over inputs and parameters, fresh process, with gradients",
    )


if __name__ == "__main__":
    main()
