"""Scores: how much each query wants each key, before masking.

A score is built from `(config, size)` and maps query (B, H, N, D), keys (B, H, M, D) and a layout to (B, H, N, M).
"""

from __future__ import annotations

from torch import Tensor, nn

from fullrank.attention.layout import Layout
from fullrank.attention.size import HeadSize
from fullrank.config.registry import register


@register("score", "dot_product")
class DotProduct(nn.Module):
    """Scaled dot product (Mixhead Eq. 9).

        A_i = Q_i K_i^T / sqrt(D)

    query (B, H, N, D), keys (B, H, M, D) -> (B, H, N, M).
    """

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()
        self.scale = size.head_dim**-0.5

    def forward(self, query: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        return (query * self.scale) @ keys.transpose(-1, -2)
