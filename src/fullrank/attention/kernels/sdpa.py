"""PyTorch's fused attention, where nothing special is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from fullrank.attention.layout import Layout
from fullrank.attention.project import Heads
from fullrank.attention.trace import Trace

if TYPE_CHECKING:
    from fullrank.attention.weighted import WeightedValues


def sdpa(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """Dot product, softmax, no mixing; (B, H, N, D)."""
    causal = layout.plain_causal and not layout.unrestricted
    return F.scaled_dot_product_attention(
        heads.scored,
        heads.keys,
        heads.values,
        attn_mask=None if causal or layout.unrestricted else layout.visible(),
        dropout_p=attend.dropout if attend.training else 0.0,
        is_causal=causal,
        scale=attend.score.scale,
    )
