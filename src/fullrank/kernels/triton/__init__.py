"""Attention with mixed heads on a GPU: nothing of size N M is ever kept, forward and backward.

    A_i = sum_j L_ji s Q_j K_j^T,    P_j = normalize(A_j),    O_i = dropout(sum_j M_ji P_j) V_i

M and L are matrices of all positions, or of each query, to which keys may add; without mixed scores L is the identity.
An output adds heads with different normalisers, which are known only when all keys were seen. So the forward pass makes the
sums of the weights of each head (`totals`), then computes the weights again, mixes and applies them (`outputs`). The backward
pass computes them again too (`programs.py`); its row term of the softmax comes out of the gradient of the mixing:

    delta_j = rowsum(P_j o dP_j) = sum_i M_ji D_ji,      D_ji = rowsum(P_j o G_i) = dM_ji,      G_i = dropout(dO_i V_i^T)

A program owns a tile of queries (or of keys) and a group of g of the H heads that are made: for each tile of the other side it
goes through all heads, adds each to the g mixed tiles, which stay in registers, and multiplies those at the end. Its own rows
of all heads stay in shared memory, where that holds them. Heads are read by their strides, without copies. Products of D
numbers for each score of each head (plain fused attention: 2 forward, and 7 backward in two kernels):

    totals 1,  outputs H/g + 1
    mixing_gradient H/g + H/g',  value_gradient H/g + 1,  query_gradient H/g + 2,  key_gradient H/g + 2

With one group of all heads 3 forward and 10 backward, with two 4 and 14 (`launch.py` says how large groups can be;
`make gpu-compile` prints what the compiler makes of them). Two kernels in one would need room for two sums, so groups of half
the size, which costs more products than it saves.
Memory: the heads, the output, one number for each head and query, an M(n) in another order; in the backward pass dM(n) too.
With mixed scores a weight takes the products of all heads. A program holds small tiles of all heads at once, 16 at most, and
loads the rows of all heads in each round. Gradients of L, and of what keys add, take kernels of their own. Products with 8
heads: totals 1, outputs and value_gradient 2, query_gradient, key_gradient and mixing_gradient 3, the gradient of L 6.
Scores, normalisers, mixing and sums are fp32, products have the dtype of the heads. A product of fp32 is made of three in TF32,
which keeps the precision, or is one where torch allows TF32. Gradients do not depend on the order in which programs run.
Dropout is drawn from one saved seed in every kernel. Limits: differentiable once, no functorch transforms; relative scores,
fp64 and heads larger than 128 are left to others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fullrank.core import draws
from fullrank.core.layout import Layout
from fullrank.kernels.native import find_beginnings, find_kind, find_obstacle, find_visible_keys, get_mixers
from fullrank.kernels.vocabulary import define_operator, make_gradients, mark_constant

if TYPE_CHECKING:
    from fullrank.core.engine import Problem

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_HEADS = 32  # whose weights are mixed
_MOST_SCORES = 16  # heads whose scores are mixed: tiles of all are held twice
_MOST_SIZE = 128  # numbers of a head
_MOST_PROGRAMS = 65_535  # along an axis of a grid
_OLDEST_GPU = 8  # the major number of the first with products of bf16
_TRIAL = (8, 1024)  # texts and tokens on which kernels are tried first
_OLDEST_TRITON = (3, 4)  # tuples of tiles as the kernels use them


@functools.cache
def _is_installed() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton  # its distribution has other names too: nightlies, ROCm, Windows

    version = re.match(r"(\d+)\.(\d+)", triton.__version__)  # `3.4rc1`, `3.5.0+git`
    return version is not None and (int(version[1]), int(version[2])) >= _OLDEST_TRITON


_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton too looks only once, when it is imported


def refuses(problem: Problem) -> str | None:
    """Return why the stages or the machine forbid the kernel; None: they do not. The first call of a kind tries it."""
    if problem.distances is not None or problem.layout.distance_bias is not None:
        return "it computes no relative scores and no biases of distances"
    if problem.convolution is not None:
        return "it convolves no scores"
    query = problem.query
    layout = problem.layout
    if query.dtype not in _DTYPES or not _runs_on(query.device):
        kind = f"{query.dtype} on {query.device}".removeprefix("torch.")
        return (
            "it needs bf16, fp16 or fp32 on a CUDA device of compute capability 8 or more, with Triton 3.4 or later; "
            f"given {kind}"
        )
    if query.is_cuda:
        return find_failure(
            query.device,
            query.dtype,
            query.shape[1],
            query.shape[3],
            tuple(_list_dimensions(problem)),
            problem.normalize == "sigsoftmax",
            layout.key_mask is not None,
            layout.documents is not None,
            problem.dropout > 0,
        )
    return None


@mark_constant
def find_failure(*kind: Any) -> str | None:
    """Find why calls of a kind (the arguments of `try_out`) cannot run on this machine; None: they can."""
    return try_out(*kind)  # of a cached function a compiler would trace the inside


@functools.cache
def try_out(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    size: int,
    dimensions: tuple[int | None, ...],
    sigmoid: bool = False,
    padded: bool = False,
    packed: bool = False,
    drop: bool = False,
) -> str | None:
    """Try all kernels of a kind, on texts of zeros.

    The first call of a kind compiles the kernels and chooses their block sizes.

    Args:
        device: the GPU.
        dtype: of the heads.
        heads: number of heads.
        size: numbers of a head.
        dimensions: of the matrices, in the order of `Arguments`; None without.
        sigmoid: whether weights are those of sigsoftmax.
        padded: whether some keys are padding.
        packed: whether texts hold documents.
        drop: whether weights are dropped.

    Returns:
        Why they fail, with a warning; None: they run.
    """
    batch, length = _TRIAL
    if dimensions[0] is None:
        batch *= heads
        heads = 1
    shapes = {2: (heads, heads), 4: (batch, length, heads, heads)}
    with torch.device(device):
        rows = torch.zeros(batch, length, heads, size, dtype=dtype).transpose(1, 2)
        matrices = [None if number is None else torch.zeros(shapes[number]) for number in dimensions]
        mixing, scoring, key_mixing, key_scoring = matrices
        arguments = Arguments(
            rows,
            rows,
            rows,
            mixing,
            scoring,
            key_mixing,
            key_scoring,
            key_mask=torch.ones(batch, length, dtype=torch.bool) if padded else None,
            documents=torch.zeros(batch, length, dtype=torch.int64) if packed else None,
            seed=torch.ones(2, dtype=torch.int64) if drop else None,
            causal=True,
            runs=[],
            window=0,
            scale=1.0,
            sigmoid=sigmoid,
            dropout=0.5 if drop else 0.0,
        )
    try:
        out, total = _compute(arguments)
        _differentiate(arguments, out, total, [x is not None for x in arguments[:_OPERANDS]])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as failure:  # the compiler, the driver and the card each have errors of their own
        said = str(failure).partition("\n")[0]
        reason = f"its kernels fail on this machine: {type(failure).__name__}: {said}"
        warnings.warn(
            f"attention is computed by its definition; of kernel 'triton': {reason}", RuntimeWarning, stacklevel=2
        )
        return reason
    return None


@mark_constant
def _runs_on(device: torch.device) -> bool:
    """Return whether the device is a GPU that is new enough, or a CPU under Triton's interpreter.

    The interpreter (TRITON_INTERPRET=1) is for tests.
    """
    if device.type == "cuda":
        return (
            _is_installed()
            and torch.version.hip is None
            and torch.cuda.get_device_properties(device).major >= _OLDEST_GPU
        )
    return _is_installed() and _INTERPRETED and device.type == "cpu"


def _list_dimensions(problem: Problem) -> list[int | None]:
    """List the dimensions of mixing, scoring, key_mixing and key_scoring in `Arguments`; None without.

    The kernels read what keys add beside a matrix of queries, and mixed scores beside mixed weights. Where the problem has no
    such matrix, the identity takes its place, which has two dimensions.
    """
    mixing, scoring, key_mixing, key_scoring = (None if x is None else x.dim() for x in get_mixers(problem)[:4])
    if scoring is None and key_scoring is not None:
        scoring = 2
    if mixing is None and (scoring is not None or key_mixing is not None):
        mixing = 2
    return [mixing, scoring, key_mixing, key_scoring]


def declines(problem: Problem) -> str | None:
    """Return why the kernel does not compute a call, because of its tensors or its layout; None: it does."""
    batch, heads, queries, size = problem.query.shape
    mixing, scoring, *_ = _list_dimensions(problem)
    most = heads if mixing is None else _MOST_HEADS if scoring is None else _MOST_SCORES
    if size > _MOST_SIZE or heads > most:
        return f"heads must not be larger than {_MOST_SIZE}, nor mixed heads more than {most}"
    if problem.dropout >= 1:
        return "dropout must be less than 1"
    # programs along an axis of a grid, and places of one text, which are numbers of 32 bits
    places = [heads * heads * queries]
    for x in (problem.query, problem.keys, problem.values):
        places.append(heads * x.stride(1) + x.shape[2] * x.stride(2))
    if batch * heads > _MOST_PROGRAMS or max(places) >= 2**31:
        return "there are too many heads, queries or keys"
    return find_obstacle(problem)


def attend(problem: Problem) -> Tensor:
    """Compute weighted attention, (B, H, N, D), in the dtype of the values."""
    query = problem.query
    keys = problem.keys
    values = problem.values
    layout = problem.layout
    batch, heads = query.shape[:2]
    matrices = list(get_mixers(problem)[:4])
    for at, dimensions in enumerate(_list_dimensions(problem)):
        if matrices[at] is None and dimensions is not None:
            matrices[at] = torch.eye(heads, device=query.device)
    seed = draws.seed(query.device) if problem.dropout else None
    mixing, scoring, key_mixing, key_scoring = matrices
    if mixing is None:  # heads do not meet: each is a text of its own with a single head
        query, keys, values = (x.reshape(batch * heads, 1, *x.shape[2:]) for x in (query, keys, values))
        if seed is not None:
            seed = seed * seed.new_tensor((1, heads))  # a text is `heads` sequences
    runs: list[int] = []
    window = 0
    if layout.narrow and layout.window is not None and layout.runs is not None:
        runs = [number for run in layout.runs for number in run]
        window = layout.window
    out = _mix_heads(
        Arguments(
            query,
            keys,
            values,
            mixing,
            scoring,
            key_mixing,
            key_scoring,
            layout.tokens,
            layout.documents,
            seed,
            layout.causal,
            runs,
            window,
            problem.scale,
            problem.normalize == "sigsoftmax",
            problem.dropout,
        )
    )
    return out.view(batch, heads, *out.shape[2:])


_OPERANDS: Final = 7  # of `Arguments`, which are differentiated


class Arguments(NamedTuple):
    """Arguments of the operator, into which a compiler does not look.

    mixing and scoring are M and L, (H, H), (B, N, H, H) or None; key_mixing and key_scoring are (B, M, H, H) or None.
    Padding and documents have a row for each sequence, or for all heads of one where those are sequences.
    runs: first position and size of each, oldest first, where `window` hides a key; otherwise empty.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mixing: Tensor | None
    scoring: Tensor | None
    key_mixing: Tensor | None
    key_scoring: Tensor | None
    key_mask: Tensor | None
    documents: Tensor | None
    seed: Tensor | None
    causal: bool
    runs: list[int]
    window: int
    scale: float
    sigmoid: bool
    dropout: float


def _compute(arguments: Arguments) -> tuple[Tensor, Tensor]:
    from fullrank.kernels.triton.launch import launch

    out, total = _make_results(arguments)
    shared = _share_arguments(arguments) | {"TOTAL": total}
    with _use_device(arguments.query.device):
        launch("totals", shared)
        launch(
            "outputs",
            shared,
            X=_describe_rows(arguments.values),
            OUT=_describe_rows(out),
        )
    return out, total


def _make_results(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Make room for the output, in the memory order of a projection (B, N, H, D), and one number for each head and query."""
    query = arguments.query
    batch, heads, queries, size = query.shape
    out = query.new_empty(batch, queries, heads, size).transpose(1, 2)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _describe_rows(heads: Tensor) -> tuple[Any, ...]:
    """Describe heads as the kernels read them: the tensor, and its strides of texts, heads and rows."""
    if heads.stride(3) != 1:
        heads = heads.contiguous()
    return heads, *heads.stride()[:3]


def _differentiate(arguments: Arguments, cotangent: Tensor, total: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """Compute the gradients of the heads and matrices; of what is not wanted, no numbers."""
    from fullrank.kernels.triton.launch import launch

    gradients = make_gradients(wanted, arguments[:_OPERANDS], total)
    d_query, d_keys, d_values, *d_matrices = gradients
    for_query, for_keys, for_values, *for_matrices = wanted
    shared = _share_arguments(arguments) | {"TOTAL": total}
    cotangents = _describe_rows(cotangent)

    def compute_shares(name: str, by_keys: bool = False) -> Tensor:
        """Compute what one of the kernels of `mixing_gradient` says of each query, or key, (B, H, H, N or M)."""
        batch, heads = total.shape[:2]
        shares = total.new_empty(batch, heads, heads, arguments.keys.shape[2] if by_keys else total.shape[2])
        launch(name, shared, D_MIXING=shares)
        return shares

    def write_gradient(shares: Tensor, gradient: Tensor) -> None:
        gradient.copy_(shares.sum((0, 3)) if gradient.dim() == 2 else shares.permute(0, 3, 1, 2))

    with _use_device(arguments.query.device):
        if for_values:
            launch("value_gradient", shared, X=cotangents, OUT=_describe_rows(d_values))
        shared |= {"V": _describe_rows(arguments.values), "D_OUT": cotangents, "DELTA": total}  # not read yet
        d_mixing, d_scoring, d_key_mixing, d_key_scoring = d_matrices
        for_mixing, for_scoring, for_key_mixing, for_key_scoring = for_matrices
        if not (for_query or for_keys or any(for_matrices)):
            return gradients
        if for_key_mixing:
            write_gradient(compute_shares("key_mixing_gradient", by_keys=True), d_key_mixing)
        if for_mixing or arguments.key_mixing is None:
            shares = compute_shares("mixing_gradient")
            if for_mixing:
                write_gradient(shares, d_mixing)
        if arguments.key_mixing is not None:
            shares = compute_shares("delta")
        elif arguments.mixing is not None:
            matrix, _ = shared["MIXING"]
            shares.mul_(matrix[..., None] if matrix.dim() == 2 else matrix)
        shared["DELTA"] = shares.sum(2)
        if for_scoring:
            write_gradient(compute_shares("scoring_gradient").mul_(arguments.scale), d_scoring)
        if for_key_scoring:
            shares = compute_shares("key_scoring_gradient", by_keys=True)
            write_gradient(shares.mul_(arguments.scale), d_key_scoring)
        if for_query:
            launch("query_gradient", shared, OUT=_describe_rows(d_query))
        if for_keys:
            launch("key_gradient", shared, OUT=_describe_rows(d_keys))
    return gradients


_mix_heads = define_operator(
    "mixed_heads", Arguments, _OPERANDS, _compute, _differentiate, _make_results, "this attention kernel"
)


def _share_arguments(arguments: Arguments) -> dict[str, Any]:
    """Collect the arguments that kernels share, by name."""
    query = arguments.query
    key_mask = arguments.key_mask
    documents = arguments.documents
    batch, heads, queries, size = query.shape
    length = arguments.keys.shape[2]
    first, end, own_key, looks, looked = _intervals(
        arguments.causal, queries, length, tuple(arguments.runs), arguments.window, query.device
    )
    rows = max(1 if x is None else len(x) for x in (key_mask, documents))  # of both, one for a text or for all
    tokens = end  # not read
    if key_mask is not None:
        tokens = key_mask.to(query.device, torch.uint8).expand(rows, -1).contiguous()
    if documents is not None:
        first = torch.maximum(first, find_beginnings(documents, queries))
        at = torch.arange(length, dtype=torch.int32, device=query.device).repeat(rows, 1)
        looked = torch.searchsorted(first, at, right=True, out_int32=True)
    return {
        "Q": _describe_rows(query),
        "K": _describe_rows(arguments.keys),
        "MIXING": (_order_matrix(arguments.mixing, end), _order_matrix(arguments.key_mixing, end)),
        "SCORING": (_order_matrix(arguments.scoring, end), _order_matrix(arguments.key_scoring, end)),
        "VISIBLE": (first, end, own_key, looks, looked),
        "TOKENS": tokens,
        "SEED": end if arguments.seed is None else arguments.seed,
        "B": batch,
        "N": queries,
        "M": length,
        "H": heads,
        "D": size,
        "BD": max(16, 1 << (size - 1).bit_length()),
        "scale": arguments.scale,
        "unit": arguments.scale / math.log(2),
        "least": min(math.floor(2**32 * arguments.dropout), 2**32 - 1) - 2**31,
        "kept": 1 / (1 - arguments.dropout),
        "MIX": find_kind(arguments.mixing) + (0 if arguments.key_mixing is None else 2),
        "SCORE": find_kind(arguments.scoring) + (0 if arguments.key_scoring is None else 2),
        "SIGMOID": arguments.sigmoid,
        "PADDED": key_mask is not None,
        "PACKED": documents is not None,
        "DROP": arguments.seed is not None,
        "EACH": batch // rows,
        "PRECISION": _precision(query),
    }


def _precision(query: Tensor) -> str:
    """Choose the precision of the kernels' products (`programs.dot`); 16-bit numbers have "ieee" only."""
    if query.dtype == torch.bfloat16 and not query.is_cuda:
        return "widened"
    if query.dtype != torch.float32 or not query.is_cuda:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@functools.lru_cache(maxsize=64)
def _intervals(
    causal: bool, queries: int, keys: int, runs: tuple[int, ...], window: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Copy `VisibleKeys` to the device, and for each key the interval of queries that may see it; both ends ascend.

    The result is cached, so that layers and steps share it and nothing is copied from the host at each call.
    """
    if window:
        pairs = zip(runs[::2], runs[1::2], strict=True)
        visible = find_visible_keys(Layout.from_runs(queries, pairs, window=window))
    else:
        visible = find_visible_keys(Layout.of(queries, keys, causal=causal))
    at = torch.arange(keys, dtype=torch.int32, device="cpu")
    looks = torch.searchsorted(visible.end, at, right=True).to(torch.int32)  # queries before it end too early
    looked = torch.searchsorted(visible.first, at, right=True).to(torch.int32)  # queries from it on begin too late
    return tuple(x.contiguous().to(device) for x in (visible.first, visible.end, visible.own_key, looks, looked))


def _order_matrix(matrix: Tensor | None, unread: Tensor) -> Tensor:
    """Order a matrix as the kernels read it, in fp32: (H, H), or (B, H, H, N) so that positions stand side by side."""
    if matrix is None:
        return unread
    ordered = matrix if matrix.dim() == 2 else matrix.permute(0, 2, 3, 1)
    return ordered.float().contiguous()


def _use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
