"""Causal multi-linear attention against the masked tensor of all pairs of every query, forward and backward.

multilinear     ours
naive           T = (Q g o K) V^T (B, N, N, N), masked, times W (N^2, E), with autograd
einsum          the same by torch.einsum, as the equation reads
length-free     ours, with W(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr: no N^2 parameters, another function

Sizes: B texts of N tokens, rank R, width E, two cores. The gradient of W alone takes 4 N^2 E bytes. GFLOP/s are of products,
those of what the backward pass computes again included.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from candidates import BOTH, Candidate, Comparison, Pass, Settings
from fullrank.core.engine import Pairs
from fullrank.core.layout import Layout
from fullrank.core.multilinear import compute_decayed_sums, multilinear
from fullrank.kernels import multilinear as engine

RANK = 40
WIDTH = 256
CORES = 2
SCALES = 8


@dataclass(frozen=True)
class Size:
    """Texts, tokens of a text, rank and width."""

    batch: int
    tokens: int
    rank: int = RANK
    width: int = WIDTH

    def __str__(self) -> str:
        return f"B {self.batch}, N {self.tokens}, R {self.rank}, E {self.width}"


@functools.lru_cache(maxsize=1)  # ours keeps its masks, too
def _make_mask(tokens: int, device: torch.device) -> Tensor:
    """Make the mask (N, N, N) that is True where the later of both keys is no later than the query."""
    index = torch.arange(tokens, device=device)
    return torch.maximum(index[:, None], index) <= index[:, None, None]


# query, keys, values (B, N, R), cores (2, R), weight (N, N, E)


def naive(query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, weight: Tensor) -> Tensor:
    """Compute the tensor of all pairs of every query by products, mask it, and multiply it by W."""
    batch, tokens, _ = query.shape
    pairs = (query * cores.mean(0))[:, :, None] * keys[:, None]  # (B, N, N, R)
    products = (pairs.flatten(1, 2) @ values.transpose(1, 2)).view(batch, tokens, tokens, tokens)
    return (products * _make_mask(tokens, products.device)).flatten(2) @ weight.flatten(0, 1)


def einsum(query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, weight: Tensor) -> Tensor:
    """Compute the same by torch.einsum, as the equation reads."""
    products = torch.einsum("bir,bjr,bmr->bijm", query * cores.mean(0), keys, values)
    visible = _make_mask(query.shape[1], products.device)
    return torch.einsum("bijm,jme->bie", products * visible, weight)


def ours(query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, weight: Tensor) -> Tensor:
    """Compute the same by this package."""
    return multilinear(Pairs(query * cores.mean(0), keys, values, weight, causal=True))


def length_free(
    query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, to_keys: Tensor, to_values: Tensor, weight: Tensor
) -> Tensor:
    """Compute sum_sr q_r A_sr B_sr U_sr, from decayed sums A of the keys and B of the values."""
    query = query * cores.mean(0)
    layout = Layout.of(query.shape[1])
    with torch.autocast(query.device.type, enabled=False):
        a = compute_decayed_sums(keys, to_keys, layout)
        b = compute_decayed_sums(values, to_values, layout)
    return (query[:, :, None] * a * b).flatten(2) @ weight.flatten(0, 1)


def make_pass(function: Callable[..., Tensor], settings: Settings, backward: bool, size: Size) -> Pass:
    """Make a pass of a function on random operands."""
    generator = torch.Generator().manual_seed(0)
    leaves = {}
    for name in ("query", "keys", "values"):
        leaves[name] = torch.randn(size.batch, size.tokens, size.rank, generator=generator) * size.rank**-0.5
    cotangent = torch.randn(size.batch, size.tokens, size.width, generator=generator) * size.width**-0.5
    leaves["cores"] = torch.rand(CORES, size.rank, generator=generator)
    if function is length_free:
        leaves["to_keys"] = torch.linspace(-2, -0.01, SCALES)
        leaves["to_values"] = torch.linspace(-2, -0.01, SCALES)
        leaves["weight"] = torch.randn(SCALES, size.rank, size.width, generator=generator)
    else:
        leaves["weight"] = torch.randn(size.tokens, size.tokens, size.width, generator=generator) / size.tokens
    leaves = {name: leaf.to(settings.torch_device).requires_grad_() for name, leaf in leaves.items()}
    return Pass(partial(function, **leaves), leaves, cotangent.to(settings.torch_device), backward, settings)


def compare(settings: Settings, length: int) -> list[Comparison]:
    """Compare ours with the tensor of all pairs, on four texts of `length` tokens."""
    size = Size(settings.batch or 4, length)
    cube = size.batch * size.tokens**3  # numbers of the tensor of all pairs of every query
    half = settings.dtype != "fp32"
    call = engine.Size(size.batch, size.tokens, size.tokens, size.rank, size.width, causal=True, half=half)
    naive_gflop = 6 * cube * (size.rank + size.width) / 1e9

    peers = ("naive", "einsum")
    candidates = [
        Candidate(
            "multilinear", partial(make_pass, ours), "pairs", peers, gflop=2 * engine.multiply_adds(call).training / 1e9
        ),
        Candidate("length-free", partial(make_pass, length_free), "decays", peers),
        Candidate("naive", partial(make_pass, naive), "pairs", takes=12 * cube, gflop=naive_gflop),
        Candidate("einsum", partial(make_pass, einsum), "pairs", takes=12 * cube, gflop=naive_gflop),
    ]
    return [Comparison(size, dataclasses.replace(size, tokens=8), length, candidates, (BOTH,))]
