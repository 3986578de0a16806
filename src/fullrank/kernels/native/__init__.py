"""Weighted attention on a CPU in C++ (`cpp/`): blocks of query rows for all heads at once, nothing of size N M kept.

    M'_ji(n) = M_ji(n) / Z_j(n),    O_i = dropout(sum_j M'_ji exp(A_j - max)) V_i
    G_i = dropout(dO_i V_i^T),   dV_i = dropout(P'_i)^T dO_i,   D_ji(n) = sum_m P_j G_i,   delta_j = sum_i M_ji D_ji
    dA_j = P_j o (sum_i M_ji G_i - delta_j),   dQ_j = s dA_j K_j,   dK_j = s dA_j^T Q_j,   dM(n) = D(n)

Mixed scores A_i = sum_j L_ji S_j have dS_j = sum_i L_ji dA_i and dL_ji = sum_m S_j dA_i in place of these last products.
M and L are of all positions, or of each query. Where keys add to them, M_ji(n) + K_ji(m) stands for M, and K has the gradient
sum_n P_j G_i. A convolution of scores, A(n, m) = sum_ab w(a, b) S(n - a, m + b), reads some rows before those of a block.
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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core import draws
from fullrank.core.engine import Distances, Problem
from fullrank.core.layout import Layout, list_positions
from fullrank.kernels.build import library
from fullrank.kernels.vocabulary import define_operator, mark_constant

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# -- questions about a call, which other kernels ask too ---------------------------------------------------------------


def is_plain(problem: Problem) -> bool:
    """Return whether a call is scaled dot product, softmax and no mixing, which PyTorch's fused kernels compute."""
    mixes = any(mixer is not None for mixer in get_mixers(problem))
    return not mixes and problem.distances is None and problem.normalize == "softmax"


def get_mixers(problem: Problem) -> tuple[Tensor | None, ...]:
    """Return the tensors of a call that mix weights or scores, None where it has none."""
    return problem.mixing, problem.scoring, problem.key_mixing, problem.key_scoring, problem.convolution


def fits(problem: Problem) -> bool:
    """Return whether all shapes are those of `Problem`; the definition broadcasts others, or refuses them."""
    batch, heads, queries, width = problem.query.shape
    keys = problem.keys.shape[2]
    distances = problem.distances
    mask = problem.layout.key_mask
    of_queries = (problem.mixing, problem.scoring)
    of_keys = (problem.key_mixing, problem.key_scoring)
    return (
        problem.keys.shape == problem.values.shape == (batch, heads, keys, width)
        and problem.layout.shape == (queries, keys)
        and all(x is None or x.shape in ((heads, heads), (batch, queries, heads, heads)) for x in of_queries)
        and all(x is None or x.shape == (batch, keys, heads, heads) for x in of_keys)
        and (
            problem.convolution is None or (len(problem.convolution) == heads and problem.convolution.shape[2] % 2 == 1)
        )
        and (mask is None or mask.shape in ((1, keys), (batch, keys)))
        and (distances is None or distances.keys.shape == (heads, problem.layout.distances, width))
    )


def find_obstacle(problem: Problem) -> str | None:
    """Find why neither C++ nor Triton computes a call: its tensors, or visible keys that are no interval; None: nothing."""
    layout = problem.layout
    heads = (problem.query, problem.keys, problem.values)
    if len({x.dtype for x in heads}) > 1:
        return "query, keys and values must have one dtype"
    if any(x.is_meta or x.numel() == 0 for x in heads):  # `meta` knows no autocast either
        return "there are no numbers"
    if layout.strided:
        return "the keys that a query sees at a stride are no interval"
    same_positions = layout.causal and layout.runs is not None
    reads_distances = problem.distances is not None or layout.distance_bias is not None
    if reads_distances and (not same_positions or layout.key_mask is not None):
        return "relative scores and biases need causal keys whose positions are the same in all sequences"
    if layout.narrow and not same_positions:
        return "a window needs causal keys whose positions are the same in all sequences"
    return None if fits(problem) else "the shapes do not fit each other"


def differentiable(problem: Problem) -> list[Tensor]:
    """List the tensors for which gradients may be asked."""
    tensors: list[Tensor | None] = [problem.query, problem.keys, problem.values, *get_mixers(problem)]
    if problem.distances is not None:
        tensors += [problem.distances.keys, problem.distances.u, problem.distances.v]
    tensors.append(problem.layout.distance_bias)
    return [tensor for tensor in tensors if tensor is not None]


def needs_grad(problem: Problem) -> bool:
    """Return whether a gradient is asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable(problem))


class VisibleKeys(NamedTuple):
    """The keys that each query sees, as numbers that a kernel can compare.

    Query n sees the keys first[n] <= k < end[n] that are tokens (`Layout.tokens`), and key own_key[n] whether it is one or not.
    first, end, own_key (N,) int32, on the CPU; own_key[n] is -1 where a query has no such key. Where texts have documents,
    first is (B, N) on their device.
    """

    first: Tensor
    end: Tensor
    own_key: Tensor


def find_visible_keys(layout: Layout) -> VisibleKeys:
    """Find the keys that each query sees, `layout.visible()`, as intervals; of a layout in which `find_obstacle` finds none."""
    queries, keys = layout.shape
    cpu = torch.device("cpu")  # wherever tensors are made by default
    own_key = torch.arange(keys - queries, keys, dtype=torch.int32, device=cpu)
    first = torch.zeros_like(own_key)
    if not layout.causal:
        return VisibleKeys(first, first + keys, first - 1)
    if layout.narrow:
        assert layout.runs is not None
        assert layout.window is not None
        positions = list_positions(layout.runs, cpu)
        oldest = positions[keys - queries :] - layout.window
        first = torch.searchsorted(positions, oldest, right=True).to(torch.int32)
    if layout.documents is not None:
        begins = find_beginnings(layout.documents, queries)
        first = torch.maximum(first.to(begins.device), begins)
    return VisibleKeys(first, own_key + 1, own_key)


def find_beginnings(documents: Tensor, queries: int) -> Tensor:
    """Find the first key of the document of each query, (B, N) int32; documents (B, M) ascend."""
    of_queries = documents[:, documents.shape[1] - queries :]
    return torch.searchsorted(documents, of_queries.contiguous(), out_int32=True)


# -- the kernel in C++ -------------------------------------------------------------------------------------------------


def refuses(problem: Problem) -> str | None:
    """Return why the machine cannot run the kernel; None: it can.

    It is asked after `declines`, since the library is compiled for the answer, the first time on a machine.
    """
    if problem.values.device.type != "cpu" or not available():
        return f"it needs a CPU, a C++ compiler, and FULLRANK_NATIVE that is not 0; given {problem.values.device}"
    return None


@mark_constant
def available() -> bool:
    """Return whether the library is there, or can be compiled now."""
    return library() is not None


def declines(problem: Problem) -> str | None:
    """Return why the kernel does not compute a call, because of its tensors or its layout; None: it does."""
    if problem.values.dtype not in _DTYPES:
        return "the dtype must have 16, 32 or 64 bits"
    if problem.convolution is not None:
        if problem.layout.shape[0] < problem.layout.shape[1]:
            return "a convolution of scores reads the queries of all tokens"
        others = (problem.scoring, problem.key_scoring, problem.distances, problem.layout.distance_bias)
        if any(tensor is not None for tensor in others):
            return "scores that are convolved have no distances, and no matrices mix them"
    return find_obstacle(problem)


def read_bias_as_distances(problem: Problem) -> Problem:
    """Write biases of distances as a relative score, in one dimension more.

    s Q.K + b(p) = s ([Q, 0] . [K, 0] + ([Q, 0] + v) . R(p)),   v = [0, 1],  R(p) = [0, b(p) / s]
    """
    table = problem.layout.distance_bias
    assert table is not None
    _, heads, _, width = problem.query.shape
    keys = F.pad((table / problem.scale).T[..., None], (width, 0))  # (H, T, D + 1)
    zero = keys.new_zeros(heads, width + 1)
    query = F.pad(problem.query, (0, 1))
    of_keys = F.pad(problem.keys, (0, 1))
    values = F.pad(problem.values, (0, 1))
    v = F.pad(zero[:, 1:], (0, 1), value=1.0)
    distances = Distances(keys, zero, v)
    layout = dataclasses.replace(problem.layout, distance_bias=None)
    return dataclasses.replace(problem, query=query, keys=of_keys, values=values, distances=distances, layout=layout)


def attend(problem: Problem) -> Tensor:
    """Compute weighted attention, (B, H, N, D)."""
    width = problem.values.shape[-1]
    if problem.layout.distance_bias is not None:
        problem = read_bias_as_distances(problem)
    layout = problem.layout
    distances = problem.distances
    dtype = problem.values.dtype
    query = problem.query
    keys = problem.keys
    values = problem.values
    position = table = base = None
    if distances is not None:
        u = distances.u.to(query.dtype)[:, None]
        v = distances.v.to(query.dtype)[:, None]
        position = _ready_rows(query + v)
        query = query + u
        table = _ready(distances.keys.to(dtype))
        base = _table_rows(layout)
    if not _lie_ready(problem):
        keys = _ready(keys)
        values = _ready(values)
    visible = find_visible_keys(layout)
    tokens = layout.tokens
    if tokens is not None:
        tokens = tokens.expand(len(query), -1).to(torch.uint8).contiguous()
    wide = torch.promote_types(dtype, torch.float32)
    matrices = [None if matrix is None else matrix.to(wide).contiguous() for matrix in get_mixers(problem)]
    mixing, scoring, key_mixing, key_scoring, convolution = matrices
    arguments = Arguments(
        query=_ready_rows(query),
        keys=keys,
        values=values,
        mixing=mixing,
        scoring=scoring,
        key_mixing=key_mixing,
        key_scoring=key_scoring,
        convolution=convolution,
        position=position,
        table=table,
        first=visible.first.contiguous(),
        end=visible.end,
        own_key=visible.own_key,
        base=base,
        tokens=tokens,
        seed=draws.seed() if problem.dropout else None,
        scale=problem.scale,
        sigsoftmax=problem.normalize == "sigsoftmax",
        dropout=problem.dropout,
    )
    return _mix_attention(arguments)[..., :width]


def _ready(heads: Tensor) -> Tensor:
    """Lay heads without gaps, and with zeros up to whole vectors."""
    idle = _count_idle(heads)
    return (F.pad(heads, (0, idle)) if idle else heads).contiguous()  # padding by nothing copies, slowly


def _ready_rows(heads: Tensor) -> Tensor:
    """Lay heads with whole vectors in each row; rows may lie anywhere."""
    return heads if heads.stride(-1) == 1 and not _count_idle(heads) else _ready(heads)


def _count_idle(heads: Tensor) -> int:
    """Count the numbers that a head of (..., D) lacks to be whole vectors."""
    vector = 8 if heads.dtype == torch.float64 else 16
    return -heads.shape[-1] % vector


def find_room(heads: Tensor, width: int) -> int | None:
    """Count the rows from one head of (B, H, M, D) to the next, each of `width` numbers; None where they do not lie so."""
    batch, count, rows, _ = heads.shape
    to_text, to_head, to_row, to_number = heads.stride()
    apart = rows * width
    if batch * count > 1:
        apart = to_head if count > 1 else to_text
    regular = batch == 1 or to_text == count * apart
    dense = to_number == 1 and (rows == 1 or to_row == width)
    return apart // width if regular and dense and apart % width == 0 and apart >= rows * width else None


def _lie_ready(problem: Problem) -> bool:
    """Return whether keys and values are part of a cache and can be read in place.

    Zeros stand behind keys then, up to whole vectors.
    """
    keys = problem.keys
    values = problem.values
    if keys.dtype not in (torch.float32, torch.float64) or needs_grad(problem) or torch.compiler.is_compiling():
        return False
    idle = _count_idle(keys)
    width = keys.shape[3] + idle
    room = find_room(keys, width)
    if room is None or room != find_room(values, width):
        return False
    # what stands behind values is cut off from the output
    return idle == 0 or getattr(keys._base, "ends_in_zeros", False)


def _table_rows(layout: Layout) -> Tensor:
    """Compute the offset of each key (M,) in the table of distances: query n and the key have row n plus the offset.

    It is some number for keys that no query sees.
    """
    assert layout.runs is not None
    positions = list_positions(layout.runs, torch.device("cpu"))
    start, size = layout.runs[-1]
    distances = start + size - layout.shape[0] - positions  # from the first query
    nearest = distances.clamp_min(0)  # from a query that sees the key
    return (layout.distance_rows(nearest) - nearest + distances).int()


# -- the call of the library ---------------------------------------------------------------------------------------------


_OPERANDS: Final = 10  # of `Arguments`, which are differentiated


class Arguments(NamedTuple):
    """Operands, which are differentiable; visible keys (`VisibleKeys`, tokens as bytes); seed of dropout; choices.

    query, position (B, H, N, D), keys, values (B, H, M, D), table (H, T, D); D is a multiple of 16, of fp64 of 8. All but query
    and position have no gaps; those have none between the D numbers, and the output and gradients lie as they do: a
    projection splits into heads without a copy.
    mixing and scoring are (H, H), (B, N, H, H) or None, key_mixing and key_scoring (B, M, H, H) or None, convolution (H, Q, C)
    or None; position and table (the query that meets the keys of distances, and those) are None where the score has no
    distances. base (M,): n plus this is the row of the table of distances.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mixing: Tensor | None
    scoring: Tensor | None
    key_mixing: Tensor | None
    key_scoring: Tensor | None
    convolution: Tensor | None
    position: Tensor | None
    table: Tensor | None
    first: Tensor
    end: Tensor
    own_key: Tensor
    base: Tensor | None
    tokens: Tensor | None
    seed: Tensor | None
    scale: float
    sigsoftmax: bool
    dropout: float


_FIELDS: tuple[tuple[Any, str], ...] = (
    (ctypes.c_int64, "B H N M D T"),
    (ctypes.c_int64 * 3, "query_steps position_steps out_steps d_query_steps d_position_steps"),
    (
        ctypes.c_int64,
        "K threads narrow convolved_queries convolved_keys mixing_kind scoring_kind packed sigsoftmax dropped first_text",
    ),
    (ctypes.c_uint64, "seed"),
    (ctypes.c_double, "scale kept_scale"),
    (
        ctypes.c_void_p,
        "query keys values mixing scoring key_mixing key_scoring convolution position table first end own_key base tokens",
    ),
    (
        ctypes.c_void_p,
        "out lse d_out d_query d_keys d_values d_mixing d_scoring d_key_mixing d_key_scoring d_convolution d_position d_table",
    ),
)


class _Call(ctypes.Structure):
    """`Call` of cpp/call.h; what is not set is 0 or null."""

    _fields_ = [(name, kind) for kind, names in _FIELDS for name in names.split()]


# tensors (B, H, N, D) of any order, and where `_Call` has the steps from one text, head and row to the next
_ROWS: Final = {
    "query": "query_steps",
    "position": "position_steps",
    "out": "out_steps",
    "d_out": "out_steps",
    "d_query": "d_query_steps",
    "d_position": "d_position_steps",
}


def _run(arguments: Arguments, results: dict[str, Tensor], backward: bool) -> None:
    """Write the `results`; in a backward pass `lse` and `d_out` among them are read."""
    loaded = library()
    assert loaded is not None
    tensors = {name: x for name, x in arguments._asdict().items() if isinstance(x, Tensor) and name != "seed"}
    tensors |= results
    call = _Call(**{name: x.data_ptr() for name, x in tensors.items()})
    for name, x in tensors.items():
        if name in _ROWS:
            steps = x.stride()[:3]
            setattr(call, _ROWS[name], (ctypes.c_int64 * 3)(*steps))
        else:
            assert x.is_contiguous() or name in ("keys", "values")
    call.B, call.H, call.N, call.D = arguments.query.shape
    call.M = arguments.keys.shape[2]
    call.K = find_room(arguments.keys, call.D)
    call.threads = torch.get_num_threads()
    call.narrow = call.N <= 16 or 32 < call.N <= 48  # blocks of 16 rows, each a little dearer, beat blocks of 32 there
    call.packed = arguments.first.dim() == 2
    call.scale = arguments.scale
    call.sigsoftmax = arguments.sigsoftmax
    if arguments.table is not None:
        call.T = arguments.table.shape[1]
    call.mixing_kind = find_kind(arguments.mixing)
    call.scoring_kind = find_kind(arguments.scoring)
    if arguments.convolution is not None:
        _, call.convolved_queries, call.convolved_keys = arguments.convolution.shape
    if arguments.seed is not None:
        call.seed, call.first_text = arguments.seed.tolist()
        call.dropped = min(round(arguments.dropout * 2**32), 2**32 - 1)
        call.kept_scale = 1 / (1 - arguments.dropout) if arguments.dropout < 1 else 0.0
    is_double = arguments.query.dtype == torch.float64
    if loaded.fullrank_mixed(ctypes.byref(call), is_double, backward):
        raise MemoryError(
            f"attention of {call.B} x {call.H} x {call.N} x {call.M}, {call.threads} threads: not enough memory"
        )


def find_kind(matrix: Tensor | None) -> int:
    """Return the kind of a matrix: 0 for none, 1 for (H, H), 2 for (B, N, H, H)."""
    return 0 if matrix is None else matrix.dim() // 2


def _compute(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Compute the output and the logarithms of the sums, (B, H, N)."""
    wide = _widen(arguments)
    out = torch.empty_like(wide.query)
    lse = wide.query.new_empty(wide.query.shape[:3])
    _run(wide, {"out": out, "lse": lse}, backward=False)
    return out.to(arguments.query.dtype), lse


def _differentiate(arguments: Arguments, cotangent: Tensor, lse: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    wide = _widen(arguments)
    names = [name for name in arguments._fields[:_OPERANDS] if getattr(arguments, name) is not None]
    computed = {f"d_{name}": torch.empty_like(getattr(wide, name)) for name in names}
    if wide.convolution is not None:  # blocks of rows share queries
        computed["d_query"] = torch.empty_like(wide.query, memory_format=torch.contiguous_format)
    d_out = _ready_rows(cotangent.to(lse.dtype))
    _run(wide, {**computed, "lse": lse, "d_out": d_out}, backward=True)
    if wide.convolution is not None:
        computed["d_query"] = torch.empty_like(wide.query).copy_(computed["d_query"])
    gradients = []
    for name, operand, want in zip(arguments._fields, arguments, wanted, strict=False):
        if want and isinstance(operand, Tensor):
            gradients.append(computed[f"d_{name}"].to(operand.dtype))
        else:
            gradients.append(cotangent.new_empty(0))
    return gradients


def _widen(arguments: Arguments) -> Arguments:
    """Widen operands to fp32 at least: the kernel has no products of halves, and is faster than those of PyTorch even so."""
    operands: Any = arguments[:_OPERANDS]
    wide = [None if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in operands]
    return Arguments._make((*wide, *arguments[_OPERANDS:]))


def _make_fake(arguments: Arguments) -> tuple[Tensor, Tensor]:
    query = arguments.query
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


_mix_attention = define_operator(
    "mixed_attention", Arguments, _OPERANDS, _compute, _differentiate, _make_fake, "this attention kernel"
)
