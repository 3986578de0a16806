"""Causal multi-linear attention against the masked tensor of all pairs of every query.

multilinear     ours
naive           T = (Q g o K) V^T (B, N, N, N), masked, times W (N^2, E), with autograd
einsum          the same by torch.einsum, as the equation reads
length-free     ours, with W(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr: no N^2 parameters, another function
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fullrank.bench.candidates import BOTH, Candidate, Comparison, Pass, Settings
from fullrank.kernels.multilinear import multilinear
from fullrank.kernels.multilinear_decayed import decayed_multilinear

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
class Given:
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


def naive(given: Given) -> Tensor:
    batch, tokens, _ = given.query.shape
    pairs = (given.query * given.cores.mean(0))[:, :, None] * given.keys[:, None]  # (B, N, N, R)
    found = (pairs.flatten(1, 2) @ given.values.transpose(1, 2)).view(batch, tokens, tokens, tokens)
    return (found * _visible(tokens, found.device)).flatten(2) @ given.weight.flatten(0, 1)


def einsum(given: Given) -> Tensor:
    found = torch.einsum("bir,bjr,bmr->bijm", given.query * given.cores.mean(0), given.keys, given.values)
    seen = _visible(given.query.shape[1], found.device)
    return torch.einsum("bijm,jme->bie", found * seen, given.weight)


def ours(given: Given) -> Tensor:
    return multilinear(given.query, given.keys, given.values, given.cores, given.weight)


FUNCTIONS: dict[str, Callable[[Given], Tensor]] = {OURS: ours, NAIVE: naive, EINSUM: einsum}


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
    leaves = {key: leaf.to(settings.where).requires_grad_() for key, leaf in leaves.items()}

    def forward() -> Tensor:
        with settings.autocast():
            if name != LENGTH_FREE:
                return FUNCTIONS[name](Given(**leaves))
            query, keys, values, cores = (leaves[key] for key in ("query", "keys", "values", "cores"))
            decays = (leaves["to_keys"], leaves["to_values"])
            return decayed_multilinear(query, keys, values, cores, decays, leaves["weight"])[0]

    return Pass(forward, leaves, cotangent.to(settings.where), True)


def comparisons(settings: Settings, length: int) -> list[Comparison]:
    size = Size(settings.batch or 4, length, RANK, WIDTH)
    cube = 4 * size.batch * size.tokens**3  # bytes of the tensor of all pairs of every query

    def candidate(name: str, computes: str, against: tuple[str, ...] = (), takes: int = 0) -> Candidate:
        return Candidate(name, functools.partial(case, size, name, settings), computes, against, takes=takes)

    found = (
        candidate(OURS, "pairs", (NAIVE, EINSUM)),
        candidate(NAIVE, "pairs", takes=3 * cube),
        candidate(EINSUM, "pairs", takes=3 * cube),
        candidate(LENGTH_FREE, "decays", (NAIVE, EINSUM)),
    )
    return [Comparison(str(size), length, BOTH, found)]
