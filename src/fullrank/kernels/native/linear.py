"""x W' + b for a few rows on a CPU in C++ (`cpp/linear.h`), as a model that writes token after token asks for it.

Such a product takes as long as its weights take to be read. PyTorch's library reads them at half the speed of the memory or
less, and 8 rows at a quarter of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullrank.kernels.native.build import library
from fullrank.kernels.vocabulary import is_transformed

MOST_ROWS = 8
_LEAST_WORK = 1 << 17  # multiply-adds that are worth a thread


def multiply_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x W' + b (.., V) without gradient, of at most 8 rows; None for other tensors.  x (.., E), weight (V, E), bias (V,)."""
    kernels = library() if _are_plain(x, weight, bias) else None
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


def _are_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True for dense tensors on a CPU in one of two dtypes, whose addresses may be read: nobody watches or transforms them."""
    watched = torch._C._len_torch_dispatch_stack() or is_transformed()
    if watched or x.dtype not in (torch.float32, torch.float64) or not x.is_cpu or torch.is_autocast_enabled("cpu"):
        return False
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype != x.dtype or not tensor.is_contiguous():
            return False
    return x.shape[-1] == weight.shape[1] and x.numel() > 0
