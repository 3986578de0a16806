"""What kernels written by hand have in common: the precision of products, one derivative, operators that keep tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# For `torch.library.custom_op`: an operator that keeps tensors for later calls, so that a CUDA graph must not hold it.
# torch has the tag from 2.9 on; before, `train.cuda_graphs` is refused.
KEEPS_TENSORS: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)


def device_kind(tensor: Tensor) -> str:
    """The device as autocast knows it; it does not know `meta`."""
    return "cpu" if tensor.device.type == "meta" else tensor.device.type


def product_dtype(operand: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that autocast asks matrix products to have."""
    kind = device_kind(operand)
    autocast = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if autocast else weight.dtype


def refuse_second_order(what: str, instead: str) -> None:
    """Called in a backward pass: RuntimeError where it is to be differentiated again.

    Autograd would take the gradients for constants where their cotangent is one, and say nothing.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"no second derivative (create_graph=True) of {what}: compute it inside "
            f'`with fullrank.kernel("reference"):`, which {instead}'
        )
