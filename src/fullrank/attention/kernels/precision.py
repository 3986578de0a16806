"""What kernels written by hand have in common: the precision of their products, and that they are differentiated once."""

from __future__ import annotations

import torch
from torch import Tensor


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
