"""Scores: how much each query wants each key, before masking."""

from __future__ import annotations

from torch import Tensor

from fullrank.core.engine import Terms
from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.registry import register
from fullrank.core.relative import XLRelative as XLRelative
from fullrank.core.score_contract import Score
from fullrank.core.synthesizer import DenseSynthesizer as DenseSynthesizer
from fullrank.core.synthesizer import RandomSynthesizer as RandomSynthesizer


@register("score", "dot_product")
class DotProduct(Score):
    """Scaled dot product (Mixhead Eq. 9).

        A_i = Q_i K_i^T / sqrt(D)

    query (B, H, N, D), keys (B, H, M, D) -> (B, H, N, M).
    """

    needs = ("scored", "keys")

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()
        self.scale = size.head_dim**-0.5

    def forward(self, query: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        return (query * self.scale) @ keys.transpose(-1, -2)

    def terms(self, query: Tensor, keys: Tensor, layout: Layout) -> Terms:  # type: ignore[override]  # its arguments are what it needs
        return Terms(query, keys, self.scale)
