"""x W' + b for a few rows on a CPU in C++ (`cpp/linear.h`), as a model that writes token after token asks for it.

Such a product takes as long as its weights take to be read. PyTorch's library reads them at half the speed of the memory or
less, and 8 rows at a quarter of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullrank.kernels.build import library
from fullrank.kernels.vocabulary import are_plain

MOST_ROWS = 8
LEAST_WEIGHTS = 1 << 15  # fewer stay in the cache, where PyTorch is faster
_LEAST_WORK = 1 << 17  # multiply-adds that are worth a thread


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
    is_known = x.dtype in (torch.float32, torch.float64) and are_plain(x, weight, bias)
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
        max(1, min(torch.get_num_threads(), rows * weight.numel() // _LEAST_WORK)),
        x.dtype == torch.float64,
    )
    return out
