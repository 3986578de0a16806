"""Products of few rows, x W' + b, and attention of one query on a CPU in C++, for models that write token after token.

A product of few rows takes as long as its weights take to be read (`cpp/linear.h`). PyTorch's library reads them at half the
speed of the memory or less, and 8 rows at a quarter of it. Attention of one query (`cpp/one_query.h`) is one call in place of
five.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.core.engine import Problem
from fullrank.kernels.build import library
from fullrank.kernels.native import find_room, fits, get_mixers
from fullrank.kernels.vocabulary import are_plain

MOST_ROWS = 8
LEAST_WEIGHTS = 1 << 15  # fewer stay in the cache, where PyTorch is faster
_LEAST_WORK = 1 << 17  # multiply-adds that are worth a thread
_DTYPES = (torch.float32, torch.float64)


def multiply_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply at most 8 rows by a weight, x W' + b, without gradient.

    Args:
        x: (.., E).
        weight: (V, E).
        bias: (V,); None for none.

    Returns:
        (.., V); None where the operands are not dense fp32 or fp64 tensors on a CPU, or there is no C++ kernel.
    """
    operands = (x, weight) if bias is None else (x, weight, bias)
    is_known = x.dtype in _DTYPES and are_plain(*operands) and x.shape[-1] == weight.shape[1]
    are_contiguous = is_known and x.numel() > 0 and all(tensor.is_contiguous() for tensor in operands)
    kernels = library() if are_contiguous else None
    if kernels is None:
        return None
    size, width = weight.shape
    rows = x.numel() // width
    out = x.new_empty(*x.shape[:-1], size)
    kernels.fullrank_linear(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        size,
        _count_threads(rows * weight.numel()),
        x.dtype == torch.float64,
    )
    return out


def attend_one_query(problem: Problem) -> Tensor | None:
    """Compute attention with one query in each text, without gradient.

    The query has to see all keys. Weights are those of a softmax, mixed by a matrix or not.

    Args:
        problem: a call with one query.

    Returns:
        (B, H, 1, D); None where another kernel or the definition has to compute it.
    """
    layout = problem.layout
    has_distances = problem.distances is not None or layout.distance_bias is not None
    mixing, *others = get_mixers(problem)
    is_plain = problem.normalize == "softmax" and not problem.dropout and all(mixer is None for mixer in others)
    if not layout.unrestricted or has_distances or not is_plain:
        return None
    keys = problem.keys
    values = problem.values
    query = problem.query.contiguous()
    operands = (query, keys, values) if mixing is None else (query, keys, values, mixing)
    kernels = library() if query.dtype in _DTYPES and are_plain(*operands) and fits(problem) else None
    room = find_room(keys, keys.shape[3]) if keys.numel() > 0 else None
    if kernels is None or room is None or room != find_room(values, keys.shape[3]):
        return None
    texts, heads, length, width = keys.shape
    matrix = None if mixing is None else mixing.contiguous()
    out = torch.empty_like(query)
    failed = kernels.fullrank_one_query(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        None if matrix is None else matrix.data_ptr(),
        out.data_ptr(),
        texts,
        heads,
        length,
        width,
        room,
        _count_threads(keys.numel()),
        matrix is not None and matrix.dim() == 4,
        query.dtype == torch.float64,
        problem.scale,
    )
    return None if failed else out


def _count_threads(work: int) -> int:
    """Count the threads that so many multiply-adds are worth."""
    return max(1, min(torch.get_num_threads(), work // _LEAST_WORK))
