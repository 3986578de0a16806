"""Plain attention, where nothing special is asked: PyTorch's fused kernel, or on a CPU blocks of rows where that is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.layout import Layout
from fullrank.core.project import Heads
from fullrank.core.trace import Trace
from fullrank.kernels.rows import attend_rows

if TYPE_CHECKING:
    from fullrank.core.weighted import WeightedValues

_SHORT = 1024  # keys; up to here blocks of rows train faster in bf16 than the fused kernel (measured from 35 to 1024)


def sdpa(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """Dot product, softmax, no mixing; (B, H, N, D)."""
    query, keys = heads.scored, heads.keys
    assert query is not None
    assert keys is not None
    p = attend.dropout if attend.training else 0.0
    causal = layout.plain_causal and not layout.unrestricted
    if _in_rows(query, keys, p):
        visible = None if layout.unrestricted else layout.visible()
        return attend_rows(query, keys, heads.values, visible, attend.score.scale, p, causal)
    return F.scaled_dot_product_attention(
        query,
        keys,
        heads.values,
        attn_mask=None if causal or layout.unrestricted else layout.visible(),
        dropout_p=p,
        is_causal=causal,
        scale=attend.score.scale,
    )


def _in_rows(query: Tensor, keys: Tensor, p: float) -> bool:
    """On a CPU the fused kernel has no dropout, and a slow backward pass in bf16."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    trains = torch.is_grad_enabled() and query.requires_grad
    return 0 < p <= 1 - 2**-16 or (trains and query.dtype == torch.bfloat16 and keys.shape[2] <= _SHORT)
