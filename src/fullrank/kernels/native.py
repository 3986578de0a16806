"""Weighted attention on a CPU in C++ (`cpp/`): blocks of query rows for all heads at once, nothing of size N M kept.

    M'_ji(n) = M_ji(n) / Z_j(n),    O_i = dropout(sum_j M'_ji exp(A_j - max)) V_i
    G_i = dropout(dO_i V_i^T),   dV_i = dropout(P'_i)^T dO_i,   D_ji(n) = sum_m P_j G_i,   delta_j = sum_i M_ji D_ji
    dA_j = P_j o (sum_i M_ji G_i - delta_j),   dQ_j = s dA_j K_j,   dK_j = s dA_j^T Q_j,   dM(n) = D(n)

For sigsoftmax, the softmax of a + log sigmoid(a), dA_j is multiplied by 2 - sigmoid(A_j). Relative scores add the products
with the keys of distances, shifted, and send their gradients the same way back. The backward pass computes scores and
weights again from the logarithms of the sums, and draws the same numbers for dropout from a saved seed.
Memory: two numbers (with sigsoftmax three) for each head, row of a block and key, for each thread. Texts that do not divide
by the threads are shared, by sums of each thread's own, added in order: the same call with as many threads gives the same bits.
A compiler gets the same as an operator of its own, without a break in its graph.
Halves are computed in fp32. Limits: no double backward, no functorch transforms.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.engine import Distances, Problem
from fullrank.core.layout import Layout
from fullrank.kernels.native_build import library
from fullrank.kernels.native_call import Geometry, Operands, attention
from fullrank.kernels.problem import fits
from fullrank.kernels.sight import sight_of

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def refuses(problem: Problem) -> str | None:
    """Asked after `declines`: the first time on a machine the library is compiled for the answer."""
    if problem.values.device.type != "cpu" or not _available():
        return f"it needs a CPU, a C++ compiler, and FULLRANK_NATIVE that is not 0; given {problem.values.device}"
    return None


@torch.compiler.assume_constant_result
def _available() -> bool:
    return library() is not None


def declines(problem: Problem) -> str | None:
    layout, heads = problem.layout, (problem.query, problem.keys, problem.values)
    if len({tensor.dtype for tensor in heads}) > 1 or problem.values.dtype not in _DTYPES:
        return "query, keys and values must have one dtype of 16, 32 or 64 bits"
    if problem.values.numel() == 0 or problem.query.numel() == 0:
        return "there are no numbers"
    if problem.distances is not None and (layout.runs is None or not layout.causal or layout.key_mask is not None):
        return "relative scores need causal keys in runs without padding"
    if layout.narrow and (layout.runs is None or not layout.causal):
        return "a window needs causal keys in runs"
    return None if fits(problem) else "the shapes do not fit each other"


def attend(problem: Problem) -> Tensor:
    """(B, H, N, D)."""
    dtype, width = problem.values.dtype, problem.values.shape[-1]
    query, mixing, position, table, base = problem.query, problem.mixing, None, None, None
    if problem.distances is not None:
        distances = problem.distances
        query, position = _with_biases(query, distances)
        table, base = _ready(distances.keys.to(dtype)), _table_rows(problem.layout)
    operands = Operands(
        query=_ready(query),
        keys=_ready(problem.keys),
        values=_ready(problem.values),
        mixing=None if mixing is None else mixing.to(torch.promote_types(dtype, torch.float32)).contiguous(),
        position=position,
        table=table,
    )
    sight = sight_of(problem.layout)
    assert sight is not None
    tokens = sight.tokens
    if tokens is not None:
        tokens = tokens.expand(len(query), -1).to(torch.uint8).contiguous()
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if problem.dropout else None
    geometry = Geometry(sight.first, sight.end, sight.own, base, tokens, seed)
    choices = (problem.scale, problem.normalize == "sigsoftmax", problem.dropout)
    out: Tensor = attention(operands, geometry, choices)
    return out[..., :width]


def _with_biases(query: Tensor, distances: Distances) -> tuple[Tensor, Tensor]:
    u, v = distances.u.to(query.dtype)[:, None], distances.v.to(query.dtype)[:, None]
    return query + u, _ready(query + v)


def _ready(heads: Tensor) -> Tensor:
    """Without gaps, and with zeros up to whole vectors."""
    idle = -heads.shape[-1] % (8 if heads.dtype == torch.float64 else 16)
    return (F.pad(heads, (0, idle)) if idle else heads).contiguous()  # padding by nothing copies, slowly


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
        rows.append(torch.arange(newest, newest - size, -1, dtype=torch.int32, device="cpu"))
    return torch.cat(rows)
