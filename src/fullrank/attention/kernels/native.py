"""Weighted attention on a CPU in C++ (`cpp/`): blocks of query rows for all heads at once, nothing of size N M kept.

    M'_ji(n) = M_ji(n) / Z_j(n),    O_i = dropout(sum_j M'_ji exp(A_j - max)) V_i
    G_i = dropout(dO_i V_i^T),   dV_i = dropout(P'_i)^T dO_i,   D_ji(n) = sum_m P_j G_i,   delta_j = sum_i M_ji D_ji
    dA_j = P_j o (sum_i M_ji G_i - delta_j),   dQ_j = s dA_j K_j,   dK_j = s dA_j^T Q_j,   dM(n) = D(n)

For sigsoftmax, the softmax of a + log sigmoid(a), dA_j is multiplied by 2 - sigmoid(A_j). Relative scores add the products
with the keys of distances, shifted, and send their gradients the same way back. The backward pass computes scores and
weights again from the logarithms of the sums, and draws the same numbers for dropout from a saved seed.
Memory: two numbers for each head, row of a block and key, for each thread. Several threads share one text by sums of their
own, added in order: the same call with as many threads gives the same bits.
Limits: fp32 and fp64; no double backward, no functorch transforms.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.attention.kernels.native_build import library
from fullrank.attention.kernels.pipeline import Distances, Pipeline
from fullrank.attention.kernels.precision import refuse_second_order
from fullrank.attention.kernels.sight import Sight, sight_of
from fullrank.attention.layout import Layout

_DTYPES = (torch.float32, torch.float64)


def native_computes(pipeline: Pipeline) -> bool:
    """Whether this kernel does; the first time on a machine it is compiled for the answer."""
    layout, heads = pipeline.layout, (pipeline.query, pipeline.keys, pipeline.values)
    if pipeline.values.device.type != "cpu" or any(tensor.dtype not in _DTYPES for tensor in heads):
        return False
    if len({tensor.dtype for tensor in heads}) > 1 or pipeline.values.numel() == 0 or pipeline.query.numel() == 0:
        return False
    if pipeline.distances is not None and (layout.runs is None or not layout.causal or layout.key_mask is not None):
        return False
    if layout.narrow and (layout.runs is None or not layout.causal):
        return False
    return library() is not None


def native(pipeline: Pipeline) -> Tensor:
    """(B, H, N, D)."""
    dtype, width = pipeline.values.dtype, pipeline.values.shape[-1]
    sight = sight_of(pipeline.layout)
    assert sight is not None
    position = table = base = None
    query = pipeline.query
    if pipeline.distances is not None:
        distances = pipeline.distances
        query, position = _with_biases(query, distances)
        table, base = _ready(distances.keys.to(dtype)), _table_rows(pipeline.layout)
    mixing = None if pipeline.mixing is None else pipeline.mixing.to(dtype).contiguous()
    seed = int(torch.randint(2**63 - 1, (), device="cpu")) if pipeline.dropout else 0
    wanted = _Wanted(sight, base, pipeline.scale, pipeline.normalize == "sigsoftmax", pipeline.dropout, seed)
    heads = (_ready(query), _ready(pipeline.keys), _ready(pipeline.values))
    out: Tensor = _Native.apply(wanted, *heads, mixing, position, table)
    return out[..., :width]


def _with_biases(query: Tensor, distances: Distances) -> tuple[Tensor, Tensor]:
    u, v = distances.u.to(query.dtype)[:, None], distances.v.to(query.dtype)[:, None]
    return query + u, _ready(query + v)


def _ready(heads: Tensor) -> Tensor:
    """Without gaps, and with zeros up to whole vectors."""
    return F.pad(heads, (0, -heads.shape[-1] % (64 // heads.element_size()))).contiguous()


def _table_rows(layout: Layout) -> Tensor:
    """(M,): the row of the table of distances for query n and key m is n plus this; of keys that no query sees, some number."""
    assert layout.runs is not None
    first_query = layout.runs[-1][0] + layout.runs[-1][1] - layout.shape[0]
    shifts, before = [], 0  # of the distances low .. high, to their rows
    for low, high in layout.spans:
        shifts.append((low, high, before - low))
        before += high - low + 1
    rows = []
    for start, size in layout.runs:
        nearest = max(first_query - (start + size - 1), 0)
        shift = next((shift for low, high, shift in shifts if low <= nearest <= high), 0)
        newest = first_query - start + shift
        rows.append(torch.arange(newest, newest - size, -1, dtype=torch.int32))
    return torch.cat(rows)


@dataclass(frozen=True)
class _Wanted:
    """What is no tensor to differentiate."""

    sight: Sight
    base: Tensor | None
    scale: float
    sigsoftmax: bool
    dropout: float
    seed: int


class _Call(ctypes.Structure):
    """`Call` of cpp/call.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "N", "M", "D", "T", "threads", "narrow", "mixing_kind")),
        *((name, ctypes.c_int64) for name in ("sigsoftmax", "dropped")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("scale", "kept_scale")),
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "mixing", "position", "table")),
        *((name, ctypes.c_void_p) for name in ("first", "end", "own", "base", "tokens", "out", "lse", "d_out")),
        *((name, ctypes.c_void_p) for name in ("d_query", "d_keys", "d_values", "d_mixing", "d_position", "d_table")),
    )


def _run(wanted: _Wanted, tensors: dict[str, Tensor | None], backward: bool) -> None:
    loaded = library()
    assert loaded is not None
    query, keys, mixing, table = tensors["query"], tensors["keys"], tensors["mixing"], tensors["table"]
    assert query is not None
    assert keys is not None
    (texts, heads, queries, width), count = query.shape, keys.shape[2]
    sight, tokens = wanted.sight, wanted.sight.tokens
    if tokens is not None:
        tokens = tokens.expand(texts, -1)
        seen_by_none = ~tokens.any(1, keepdim=True) if int(sight.own[0]) < 0 else None
        tokens = (tokens if seen_by_none is None else tokens | seen_by_none).to(torch.uint8).contiguous()
    arrays = {
        **tensors,
        "first": sight.first,
        "end": sight.end,
        "own": sight.own,
        "base": wanted.base,
        "tokens": tokens,
    }
    call = _Call(
        B=texts, H=heads, N=queries, M=count, D=width, T=0 if table is None else table.shape[1],
        threads=torch.get_num_threads(), narrow=int(_narrow(queries)),
        mixing_kind=0 if mixing is None else 1 if mixing.dim() == 2 else 2,
        sigsoftmax=int(wanted.sigsoftmax), dropped=min(round(wanted.dropout * 2**32), 2**32 - 1), seed=wanted.seed,
        scale=wanted.scale, kept_scale=1 / (1 - wanted.dropout) if wanted.dropout < 1 else 0.0,
        **{name: None if array is None else array.data_ptr() for name, array in arrays.items()},
    )  # fmt: skip
    loaded.fullrank_mixed(ctypes.byref(call), int(query.dtype == torch.float64), int(backward))


def _narrow(queries: int) -> bool:
    """Whether blocks of 16 rows, of which each costs a little more, do so much less idle work than blocks of 32."""
    return queries <= 16 or 32 < queries <= 48


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wanted: _Wanted,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mixing: Tensor | None,
        position: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:3])
        given = {"query": query, "keys": keys, "values": values, "mixing": mixing, "position": position, "table": table}
        _run(wanted, {**given, "out": out, "lse": lse}, backward=False)
        ctx.wanted = wanted
        ctx.save_for_backward(*given.values(), lse)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("this attention kernel", "keeps the weights")
        *saved, lse = ctx.saved_tensors
        given = dict(zip(("query", "keys", "values", "mixing", "position", "table"), saved, strict=True))
        found = {f"d_{name}": None if tensor is None else torch.empty_like(tensor) for name, tensor in given.items()}
        _run(ctx.wanted, {**given, **found, "lse": lse, "d_out": cotangent.contiguous()}, backward=True)
        return None, *found.values()
