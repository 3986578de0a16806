"""Attention with mixed heads on a GPU: nothing of size N M is ever kept, forward and backward.

    A_j = s Q_j K_j^T,    P_j = normalize(A_j),    O_i = dropout(sum_j M_ji P_j) V_i

No single pass can do that: an output adds heads with different normalisers, which are known only when all keys were seen. So
the forward pass first makes the sums of the weights of each head (`totals`), then computes the weights again, mixes and applies
them (`outputs`). The backward pass computes them again too (`triton_backward.py`), where

    delta_j = rowsum(P_j o dP_j) = sum_i M_ji D_ji,      D_ji = rowsum(P_j o G_i) = dM_ji,      G_i = dropout(dO_i V_i^T)

so the row term of the softmax comes out of the gradient of the mixing. A program owns a tile of queries (or of keys) and a
group of g of the H heads that are made; for each tile of the other side it goes through all H heads that are mixed, adds each
to the g mixed tiles, which stay in registers, and multiplies those at the end. In products of D numbers for each score of each head
(plain fused attention: 2 forward, 7 backward in two kernels):

    totals 1,  outputs H/g + 1,  of_mixing H/g + H/g',  of_values H/g + 1,  of_queries H/g + 2,  of_keys H/g + 2

Groups are as large as registers allow (`triton_blocks.py`): with one group of all heads 3 forward and 10 backward, with two 4 and 14.
Beside that each kernel but the first spends H multiply-adds and one exponential on each score.
Memory: the heads, the output, one number for each head and query, and the gradient of M for each query (B, H, H, N), backward only.

Scores, normalisers, mixing and sums are fp32, products have the dtype of the heads (fp32: TF32 where torch allows it for
products). Gradients do not depend on the order in which programs run. Dropout is drawn from one saved seed in every kernel;
it costs a draw for each score, most in `of_queries` and `of_keys`. Limits: differentiable once, no functorch transforms;
relative scores, fp64, and heads larger than 128 are left to others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullrank.attention.kernels.precision import refuse_second_order
from fullrank.attention.kernels.sight import sight_of
from fullrank.attention.layout import Layout, Run

if TYPE_CHECKING:
    from fullrank.attention.kernels.pipeline import Pipeline

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_HEADS, _MOST_SIZE = 32, 128
_MOST_PROGRAMS = 65_535  # along an axis of a grid
_OLDEST_GPU = (8, 0)  # bf16 products
_OLDEST_TRITON = (3, 4)  # tuples of tiles as the kernels use them


def triton_computes(pipeline: Pipeline) -> bool:
    """Whether `triton_mixed` computes it here: on a GPU, or on a CPU under Triton's interpreter (TRITON_INTERPRET=1)."""
    query, keys, values = pipeline.query, pipeline.keys, pipeline.values
    (batch, heads, queries, size), length = query.shape, keys.shape[2]
    if pipeline.distances is not None or torch.compiler.is_compiling():
        return False
    if query.dtype not in _DTYPES or not query.dtype == keys.dtype == values.dtype:
        return False
    if 0 in (batch, heads, queries, length) or size > _MOST_SIZE or values.shape[-1] != size:
        return False
    if not 0 <= pipeline.dropout < 1 or batch * heads > _MOST_PROGRAMS:
        return False
    if pipeline.mixing is not None and heads > _MOST_HEADS:
        return False
    if heads * max(queries, length) * size >= 2**31 or heads * heads * queries >= 2**31:  # places within one text
        return False
    narrow = pipeline.layout.narrow
    if narrow and (not pipeline.layout.causal or pipeline.layout.runs is None):
        return False
    return _ready(query.device)


def _ready(device: torch.device) -> bool:
    """Triton is there, and it can run on this device."""
    if not _installed():
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _OLDEST_GPU
    return device.type == "cpu" and _interpreted()


@functools.cache
def _installed() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= _OLDEST_TRITON


def _interpreted() -> bool:
    """Triton decides once, when it is imported."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from fullrank.attention.kernels import triton_blocks

    return triton_blocks.INTERPRETED


def triton_mixed(pipeline: Pipeline) -> Tensor:
    """(B, H, N, D), in the dtype of the values; for what `triton_computes` says True of."""
    query, mixing = pipeline.query, pipeline.mixing
    batch, heads = query.shape[:2]
    given = [query, pipeline.keys, pipeline.values]
    if mixing is None:  # heads do not meet: each is a text of its own with a single head
        given = [tensor.reshape(batch * heads, 1, *tensor.shape[2:]) for tensor in given]
    call = _call(pipeline)
    out: Tensor = _Mixed.apply(*given, mixing, call)
    return out.view(batch, heads, *out.shape[2:])


@dataclass(frozen=True)
class Call:
    """What all kernels of one call are told alike; names are those of their arguments."""

    FIRST: Tensor
    END: Tensor
    OWN: Tensor
    LOOKS: Tensor
    LOOKED: Tensor
    TOKENS: Tensor
    SEED: Tensor
    N: int
    M: int
    scale: float
    unit: float
    least: int
    kept: float
    LONG: int
    H: int
    D: int
    BD: int
    MIX: int
    SIGMOID: bool
    PADDED: bool
    DROP: bool
    PRECISION: str
    EACH: int


def _call(pipeline: Pipeline) -> Call:
    query, layout, mixing, p = pipeline.query, pipeline.layout, pipeline.mixing, pipeline.dropout
    (_, heads, queries, size), length = query.shape, pipeline.keys.shape[2]
    narrow = layout.narrow
    first, end, own, looks, looked = _intervals(
        layout.causal, queries, length, layout.runs if narrow else None, layout.window if narrow else None, query.device
    )
    tokens = layout.key_mask
    if tokens is not None and not layout.causal:  # who would see nothing sees everything
        tokens = tokens | ~tokens.any(-1, keepdim=True)
    return Call(
        FIRST=first,
        END=end,
        OWN=own,
        LOOKS=looks,
        LOOKED=looked,
        TOKENS=first if tokens is None else tokens.to(query.device, torch.uint8).contiguous(),
        SEED=torch.randint(2**62, (1,), device=query.device) if p else first,
        N=queries,
        M=length,
        scale=pipeline.scale,
        unit=pipeline.scale / math.log(2),
        least=min(math.floor(2**32 * p), 2**32 - 1) - 2**31,
        kept=1 / (1 - p),
        LONG=int(max(queries, length) > 1024),
        H=1 if mixing is None else heads,
        D=size,
        BD=max(16, 1 << (size - 1).bit_length()),
        MIX=0 if mixing is None else 1 if mixing.dim() == 2 else 2,
        SIGMOID=pipeline.normalize == "sigsoftmax",
        PADDED=tokens is not None,
        DROP=p > 0,
        PRECISION=_precision(query),
        EACH=heads if mixing is None else 1,
    )


def _precision(query: Tensor) -> str:
    """How the kernels multiply (`triton_tiles.dot`)."""
    if query.dtype == torch.bfloat16 and _interpreted():
        return "widened"
    return "tf32" if query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


@functools.lru_cache(maxsize=64)
def _intervals(
    causal: bool, queries: int, keys: int, runs: tuple[Run, ...] | None, window: int | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`Sight` on the device, and for each key the interval of queries that may see it: both ends of sight ascend.

    Kept, so that layers and steps share it and a recorded CUDA graph copies nothing from the host.
    """
    if window is None or runs is None:
        layout = Layout.of(queries, keys, causal=causal)
    else:
        layout = dataclasses.replace(Layout.of_runs(queries, runs), window=window)
    sight = sight_of(layout)
    assert sight is not None
    at = torch.arange(keys, dtype=torch.int32)
    looks = torch.searchsorted(sight.end, at, right=True).to(torch.int32)  # before it queries end too early
    looked = torch.searchsorted(sight.first, at, right=True).to(torch.int32)  # from it on they begin too late
    first, end, own, looks, looked = (
        tensor.contiguous().to(device) for tensor in (sight.first, sight.end, sight.own, looks, looked)
    )
    return first, end, own, looks, looked


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mixing: Tensor | None, call: Call) -> Tensor:
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
        out, total = values.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)
        with _on(query.device):
            _launch("totals", call, query, Q=query, K=keys, TOTAL=total)
            matrix = _matrix(mixing, query)
            _launch("outputs", call, query, Q=query, K=keys, V=values, MIXING=matrix, TOTAL=total, OUT=out)
        ctx.save_for_backward(query, keys, values, mixing, total)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("this attention kernel", "keeps the weights")
        query, keys, values, mixing, total = ctx.saved_tensors
        call, (for_query, for_keys, for_values, for_mixing, _) = ctx.call, ctx.needs_input_grad
        cotangent, matrix = cotangent.contiguous(), _matrix(mixing, query)
        found: list[Tensor | None] = [None, None, None, None, None]
        heads = {"Q": query, "K": keys, "D_OUT": cotangent, "TOTAL": total}
        with _on(query.device):
            if for_values:
                found[2] = torch.empty_like(values)
                _launch("of_values", call, query, **heads, MIXING=matrix, D_V=found[2])
            if for_query or for_keys or for_mixing:
                batch, count, queries, _ = query.shape
                shares = total.new_empty(batch, count, count, queries)
                _launch("of_mixing", call, query, **heads, V=values, D_MIXING=shares)
                if for_mixing:
                    found[3] = (shares.sum((0, 3)) if call.MIX == 1 else shares.permute(0, 3, 1, 2)).to(mixing.dtype)
                if call.MIX:
                    shares = shares * (matrix[..., None] if call.MIX == 1 else matrix)
                heads |= {"V": values, "MIXING": matrix, "DELTA": shares.sum(2)}
            if for_query:
                found[0] = torch.empty_like(query)
                _launch("of_queries", call, query, **heads, D_Q=found[0])
            if for_keys:
                found[1] = torch.empty_like(keys)
                _launch("of_keys", call, query, **heads, D_K=found[1])
        return tuple(found)


def _matrix(mixing: Tensor | None, query: Tensor) -> Tensor:
    """M as the kernels read it, in fp32: (H, H), or (B, H, H, N) so that queries stand side by side."""
    if mixing is None:
        return query  # not read
    ordered = mixing if mixing.dim() == 2 else mixing.permute(0, 2, 3, 1)
    return ordered.detach().float().contiguous()


def _launch(name: str, call: Call, query: Tensor, **tensors: Tensor) -> None:
    from fullrank.attention.kernels import triton_blocks

    triton_blocks.launch(name, call, query, tensors)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
