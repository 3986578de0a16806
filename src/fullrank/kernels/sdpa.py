"""Plain attention: PyTorch's fused kernel, or on a CPU blocks of rows where that is faster."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.engine import Problem
from fullrank.kernels.problem import is_plain
from fullrank.kernels.rows import attend_rows

_SHORT = 1024  # keys; up to here blocks of rows train faster in bf16 than the fused kernel (measured from 35 to 1024)


def refuses(problem: Problem) -> str | None:
    if not is_plain(problem):
        return "it computes the dot product, softmax and no mixing only"
    return None


def attend(problem: Problem) -> Tensor:
    """(B, H, N, D)."""
    layout, operands = problem.layout, (problem.query, problem.keys, problem.values)
    causal = layout.plain_causal and not layout.unrestricted
    if _in_rows(problem):
        visible = None if layout.unrestricted else layout.visible()
        return attend_rows(*operands, visible, problem.scale, problem.dropout, causal)
    return F.scaled_dot_product_attention(
        *operands,
        attn_mask=None if causal or layout.unrestricted else layout.visible(),
        dropout_p=problem.dropout,
        is_causal=causal,
        scale=problem.scale,
    )


def _in_rows(problem: Problem) -> bool:
    """On a CPU the fused kernel has no dropout, and a slow backward pass in bf16."""
    query, p = problem.query, problem.dropout
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    trains = torch.is_grad_enabled() and query.requires_grad
    return 0 < p <= 1 - 2**-16 or (trains and query.dtype == torch.bfloat16 and problem.keys.shape[2] <= _SHORT)
