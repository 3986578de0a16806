"""Weighted attention on a CPU in C++ (`cpp/`): blocks of query rows for all heads at once, nothing of size N M kept.

    M'_ji(n) = M_ji(n) / Z_j(n),    O_i = dropout(sum_j M'_ji exp(A_j - max)) V_i
    G_i = dropout(dO_i V_i^T),   dV_i = dropout(P'_i)^T dO_i,   D_ji(n) = sum_m P_j G_i,   delta_j = sum_i M_ji D_ji
    dA_j = P_j o (sum_i M_ji G_i - delta_j),   dQ_j = s dA_j K_j,   dK_j = s dA_j^T Q_j,   dM(n) = D(n)

Mixed scores A_i = sum_j L_ji S_j have dS_j = sum_i L_ji dA_i and dL_ji = sum_nm S_j dA_i in place of these last products.
For sigsoftmax, the softmax of a + log sigmoid(a), dA_j is multiplied by 2 - sigmoid(A_j). Relative scores add the products
with the keys of distances, shifted, and send their gradients the same way back. The backward pass computes scores and
weights again from the logarithms of the sums, and draws the same numbers for dropout from a saved seed.
Memory: two numbers (one more with sigsoftmax, and with mixed scores) for each head, row of a block and key, for each thread.
Texts that do not divide by the threads are shared, by sums of each thread's own, added in order: the same call with as many
threads gives the same bits.
A compiler gets the same as an operator of its own, without a break in its graph.
Halves are computed in fp32. Limits: no double backward, no functorch transforms.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core import draws
from fullrank.core.engine import Distances, Problem
from fullrank.core.layout import Layout, list_positions
from fullrank.kernels.native.build import library
from fullrank.kernels.vocabulary import define_operator, make_gradients, mark_constant

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SAME_POSITIONS = "causal keys whose positions are the same in all sequences"


# -- questions about a call, which other kernels ask too -----------------------------------------------------------------


def is_plain(problem: Problem) -> bool:
    """Scaled dot product, softmax, no mixing: the attention of PyTorch's fused kernels."""
    mixes = problem.mixing is not None or problem.scoring is not None
    return not mixes and problem.distances is None and problem.normalize == "softmax"


def fits(problem: Problem) -> bool:
    """True if all shapes are those of `Problem`; the definition broadcasts others, or refuses them."""
    (batch, heads, queries, width), keys = problem.query.shape, problem.keys.shape[2]
    mixing, distances, mask = problem.mixing, problem.distances, problem.layout.key_mask
    return (
        problem.keys.shape == problem.values.shape == (batch, heads, keys, width)
        and problem.layout.shape == (queries, keys)
        and (mixing is None or mixing.shape in ((heads, heads), (batch, queries, heads, heads)))
        and (problem.scoring is None or problem.scoring.shape == (heads, heads))
        and (mask is None or mask.shape in ((1, keys), (batch, keys)))
        and (distances is None or distances.keys.shape == (heads, problem.layout.distances, width))
    )


def find_obstacle(problem: Problem) -> str | None:
    """The reason for which neither C++ nor Triton computes a call: its tensors, or keys that are no interval; or None."""
    layout, heads = problem.layout, (problem.query, problem.keys, problem.values)
    if len({x.dtype for x in heads}) > 1:
        return "query, keys and values must have one dtype"
    if any(x.is_meta or x.numel() == 0 for x in heads):  # `meta` knows no autocast either
        return "there are no numbers"
    if layout.strided:
        return "the keys that a query sees at a stride are no interval"
    reads_distances = problem.distances is not None or layout.distance_bias is not None
    if (reads_distances or layout.narrow) and (layout.runs is None or not layout.causal):
        return f"{'relative scores and biases need' if reads_distances else 'a window needs'} {_SAME_POSITIONS}"
    return None if fits(problem) else "the shapes do not fit each other"


def differentiable(problem: Problem) -> list[Tensor]:
    """The tensors for which gradients may be asked."""
    tensors: list[Tensor | None] = [problem.query, problem.keys, problem.values, problem.mixing, problem.scoring]
    if problem.distances is not None:
        tensors += [problem.distances.keys, problem.distances.u, problem.distances.v]
    tensors.append(problem.layout.distance_bias)
    return [tensor for tensor in tensors if tensor is not None]


def needs_grad(problem: Problem) -> bool:
    """True if a gradient is asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable(problem))


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that each query sees, as numbers that a kernel can compare.

    Query n sees the keys first[n] <= k < end[n] that are tokens, and key own[n] whether it is one or not.
    first, end, own (N,) int32, on the CPU; own[n] is -1 where a query has no such key. Where texts have documents, first is
    (B, N) on their device.
    tokens (B, M) boolean, None where every key is a token: see `tokens_of`.
    """

    first: Tensor
    end: Tensor
    own: Tensor
    tokens: Tensor | None


def find_visible_keys(layout: Layout) -> VisibleKeys | None:
    """`layout.visible()` as intervals; None where it is none: a stride, or a window over rows that differ or without order."""
    if layout.strided:
        return None
    queries, keys = layout.shape
    own = torch.arange(keys - queries, keys, dtype=torch.int32, device="cpu")  # wherever tensors are made by default
    if not layout.causal:
        if layout.narrow:
            return None
        zeros = torch.zeros_like(own)
        return VisibleKeys(zeros, zeros + keys, zeros - 1, tokens_of(layout))
    first = torch.zeros_like(own)
    if layout.narrow:
        if layout.runs is None or layout.window is None:
            return None
        positions = list_positions(layout.runs, torch.device("cpu"))
        oldest = positions[keys - queries :] - layout.window
        first = torch.searchsorted(positions, oldest, right=True).to(torch.int32)
    if layout.documents is not None:
        begins = find_beginnings(layout.documents, queries)
        first = torch.maximum(first.to(begins.device), begins)
    return VisibleKeys(first, own + 1, own, tokens_of(layout))


def find_beginnings(documents: Tensor, queries: int) -> Tensor:
    """The first key of the document of each query, (B, N) int32; documents (B, M) ascend."""
    of_queries = documents[:, documents.shape[1] - queries :]
    return torch.searchsorted(documents, of_queries.contiguous(), out_int32=True)


def tokens_of(layout: Layout) -> Tensor | None:
    """Keys that are tokens, (B, M) or None for all; where a query is no key, a sequence without any token is seen whole."""
    mask = layout.key_mask
    return mask if mask is None or layout.causal else mask | ~mask.any(-1, keepdim=True)


def table_row(layout: Layout, distance: int) -> int:
    """The row of `distance` in the table of distances, the nearest first; itself if no query sees a key so far away."""
    before = 0
    for low, high in layout.spans:
        if low <= distance <= high:
            return before + distance - low
        before += high - low + 1
    return distance


# -- the kernel in C++ ---------------------------------------------------------------------------------------------------


def refuses(problem: Problem) -> str | None:
    """Asked after `declines`: the first time on a machine the library is compiled for the answer."""
    if problem.values.device.type != "cpu" or not available():
        return f"it needs a CPU, a C++ compiler, and FULLRANK_NATIVE that is not 0; given {problem.values.device}"
    return None


@mark_constant
def available() -> bool:
    """True if the library is there, or can be compiled now."""
    return library() is not None


def declines(problem: Problem) -> str | None:
    if problem.values.dtype not in _DTYPES:
        return "the dtype must have 16, 32 or 64 bits"
    reads_distances = problem.distances is not None or problem.layout.distance_bias is not None
    if reads_distances and problem.layout.key_mask is not None:
        return f"relative scores and biases need {_SAME_POSITIONS}"
    return find_obstacle(problem)


def read_bias_as_distances(problem: Problem) -> Problem:
    """Write biases of distances as a relative score, in one dimension more:

    s Q.K + b(p) = s ([Q, 0] . [K, 0] + ([Q, 0] + v) . R(p)),   v = [0, 1],  R(p) = [0, b(p) / s]
    """
    table = problem.layout.distance_bias
    assert table is not None
    heads, width = problem.query.shape[1], problem.query.shape[3]
    keys = F.pad((table / problem.scale).T[..., None], (width, 0))  # (H, T, D + 1)
    zero = keys.new_zeros(heads, width + 1)
    query, of_keys, values = (F.pad(part, (0, 1)) for part in (problem.query, problem.keys, problem.values))
    distances = Distances(keys, zero, F.pad(zero[:, 1:], (0, 1), value=1.0))
    layout = dataclasses.replace(problem.layout, distance_bias=None)
    return dataclasses.replace(problem, query=query, keys=of_keys, values=values, distances=distances, layout=layout)


def attend(problem: Problem) -> Tensor:
    """(B, H, N, D)."""
    if problem.layout.distance_bias is not None:
        return attend(read_bias_as_distances(problem))[..., : problem.values.shape[-1]]
    dtype, width = problem.values.dtype, problem.values.shape[-1]
    query, position, table, base = problem.query, None, None, None
    if problem.distances is not None:
        distances = problem.distances
        u, v = (bias.to(query.dtype)[:, None] for bias in (distances.u, distances.v))
        query, position = query + u, _ready(query + v)
        table, base = _ready(distances.keys.to(dtype)), _table_rows(problem.layout)
    visible = find_visible_keys(problem.layout)
    assert visible is not None
    tokens = visible.tokens
    if tokens is not None:
        tokens = tokens.expand(len(query), -1).to(torch.uint8).contiguous()
    keys, values = problem.keys, problem.values
    if not _lie_ready(problem):
        keys, values = _ready(keys), _ready(values)
    given = Arguments(
        query=_ready(query),
        keys=keys,
        values=values,
        mixing=_widen_matrix(problem.mixing, dtype),
        scoring=_widen_matrix(problem.scoring, dtype),
        position=position,
        table=table,
        first=visible.first.contiguous(),
        end=visible.end,
        own=visible.own,
        base=base,
        tokens=tokens,
        seed=draws.seed() if problem.dropout else None,
        scale=problem.scale,
        sigsoftmax=problem.normalize == "sigsoftmax",
        dropout=problem.dropout,
    )
    # an operator costs more than a function, and is taken where somebody looks at operators, or operands have no addresses
    ordinary = all(tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) for tensor in given[:_OPERANDS])
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not ordinary
    out: Tensor = (operator if watched else Native.apply)(*given)[0]
    return out[..., :width]


def _ready(heads: Tensor) -> Tensor:
    """Without gaps, and with zeros up to whole vectors."""
    idle = -heads.shape[-1] % (8 if heads.dtype == torch.float64 else 16)
    return (F.pad(heads, (0, idle)) if idle else heads).contiguous()  # padding by nothing copies, slowly


def _widen_matrix(matrix: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if matrix is None else matrix.to(torch.promote_types(dtype, torch.float32)).contiguous()


def _find_room(heads: Tensor, width: int) -> int | None:
    """Rows from one head of (B, H, M, D) to the next, each of `width` numbers; None where they do not lie so."""
    batch, count, rows, _ = heads.shape
    apart = rows * width
    if batch * count > 1:
        apart = heads.stride(1) if count > 1 else heads.stride(0)
    regular = batch == 1 or heads.stride(0) == count * apart
    dense = heads.stride(3) == 1 and (rows == 1 or heads.stride(2) == width)
    return apart // width if regular and dense and apart % width == 0 and apart >= rows * width else None


def _lie_ready(problem: Problem) -> bool:
    """True if keys and values are part of a cache, and can be read in place: zeros stand behind keys up to whole vectors."""
    keys, values = problem.keys, problem.values
    if keys.dtype not in (torch.float32, torch.float64) or needs_grad(problem) or torch.compiler.is_compiling():
        return False
    width = keys.shape[3] + -keys.shape[3] % (8 if keys.dtype == torch.float64 else 16)
    room = _find_room(keys, width)
    if room is None or room != _find_room(values, width):
        return False
    # what stands behind values is cut off from the output
    return width == keys.shape[3] or getattr(keys._base, "ends_in_zeros", False)


def _table_rows(layout: Layout) -> Tensor:
    """(M,): the row of the table of distances for query n and key m is n plus this; of keys that no query sees, some number."""
    assert layout.runs is not None
    first_query = layout.runs[-1][0] + layout.runs[-1][1] - layout.shape[0]
    rows = []
    for start, size in layout.runs:
        nearest = max(first_query - (start + size - 1), 0)
        newest = first_query - start + table_row(layout, nearest) - nearest
        rows.append(torch.arange(newest, newest - size, -1, dtype=torch.int32, device="cpu"))
    return torch.cat(rows)


# -- the call of the library: arguments, autograd function, and the operator that a compiler sees ----------------------


_OPERANDS: Final = 7  # of `Arguments`, which are differentiated


class Arguments(NamedTuple):
    """Operands, which are differentiable; visible keys (`VisibleKeys`, tokens as bytes); seed of dropout; choices.

    query, position (B, H, N, D), keys, values (B, H, M, D), table (H, T, D) have no gaps; D is a multiple of 16, of fp64 of 8.
    mixing is (H, H), (B, N, H, H) or None, scoring (H, H) or None; position and table (the query that meets the keys of
    distances, and those) are None where the score has no distances. base (M,): n plus this is the row of the table of
    distances.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mixing: Tensor | None
    scoring: Tensor | None
    position: Tensor | None
    table: Tensor | None
    first: Tensor
    end: Tensor
    own: Tensor
    base: Tensor | None
    tokens: Tensor | None
    seed: Tensor | None
    scale: float
    sigsoftmax: bool
    dropout: float


class _Call(ctypes.Structure):
    """`Call` of cpp/call.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "N", "M", "D", "T", "threads", "narrow", "mixing_kind")),
        *((name, ctypes.c_int64) for name in ("sigsoftmax", "dropped")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("first_text", "K", "packed")),
        *((name, ctypes.c_double) for name in ("scale", "kept_scale")),
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "mixing", "scoring", "position", "table")),
        *((name, ctypes.c_void_p) for name in ("first", "end", "own", "base", "tokens", "out", "lse", "d_out")),
        *((name, ctypes.c_void_p) for name in ("d_query", "d_keys", "d_values", "d_mixing", "d_scoring", "d_position")),
        ("d_table", ctypes.c_void_p),
    )


def _run(given: Arguments, others: dict[str, Tensor | None], backward: bool) -> None:
    loaded = library()
    assert loaded is not None
    query, mixing, table = given.query, given.mixing, given.table
    (batch, heads, queries, width), (*_, seed, scale, sigsoftmax, dropout) = query.shape, given
    narrow = queries <= 16 or 32 < queries <= 48  # blocks of 16 rows, each a little dearer, beat blocks of 32 there
    number, first_text = (0, 0) if seed is None else seed.tolist()
    arrays: dict[str, Tensor | None] = dict(zip(given._fields[:12], given[:12], strict=True)) | others
    assert all(array is None or array.is_contiguous() or name in ("keys", "values") for name, array in arrays.items())
    call = _Call(
        B=batch, H=heads, N=queries, M=given.keys.shape[2], D=width, T=0 if table is None else table.shape[1],
        threads=torch.get_num_threads(), narrow=int(narrow),
        mixing_kind=0 if mixing is None else 1 if mixing.dim() == 2 else 2,
        sigsoftmax=int(sigsoftmax), dropped=min(round(dropout * 2**32), 2**32 - 1), seed=number,
        first_text=first_text, K=_find_room(given.keys, width), packed=int(given.first.dim() == 2), scale=scale,
        kept_scale=1 / (1 - dropout) if dropout < 1 else 0.0,
        **{name: None if array is None else array.data_ptr() for name, array in arrays.items()},
    )  # fmt: skip
    if loaded.fullrank_mixed(ctypes.byref(call), int(query.dtype == torch.float64), int(backward)):
        raise MemoryError(
            f"attention of {batch} x {heads} x {queries} x {call.M}, {call.threads} threads: not enough memory"
        )


def _compute(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The output and the logarithms of the sums, (B, H, N)."""
    given = _widen(arguments)
    out, lse = torch.empty_like(given.query), given.query.new_empty(given.query.shape[:3])
    _run(given, {"out": out, "lse": lse}, backward=False)
    return out.to(arguments[0].dtype), lse


def _differentiate(cotangent: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any) -> list[Tensor]:
    given = _widen(arguments)
    gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in given[:_OPERANDS]]
    others = {f"d_{name}": gradient for name, gradient in zip(given._fields[:_OPERANDS], gradients, strict=True)}
    _run(given, others | {"lse": lse, "d_out": cotangent.to(lse.dtype).contiguous()}, backward=True)
    found = make_gradients(wanted, arguments[:_OPERANDS], cotangent)
    return [
        room if gradient is None or not room.numel() else gradient.to(room.dtype)
        for gradient, room in zip(gradients, found, strict=True)
    ]


def _widen(arguments: Sequence[Any]) -> Arguments:
    """Operands in fp32 at least: the kernel has no products of halves, and is faster than those of PyTorch even so."""
    operands = (x if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in arguments[:_OPERANDS])
    return Arguments._make((*operands, *arguments[_OPERANDS:]))


def _make_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments[0]
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


_ARGUMENTS = (
    "Tensor query, Tensor keys, Tensor values, Tensor? mixing, Tensor? scoring, Tensor? position, Tensor? table, "
    "Tensor first, Tensor end, Tensor own, Tensor? base, Tensor? tokens, Tensor? seed, float scale, "
    "bool sigsoftmax, float dropout"
)
operator, Native = define_operator(
    "mixed_attention", _ARGUMENTS, _OPERANDS, 13, _compute, _differentiate, _make_fake, "this attention kernel"
)
