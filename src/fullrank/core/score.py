"""Scores: how much each query wants each key, before masking.

A score is built from `(config, size)`. `needs` names what it reads of the `Heads`, in the order of its arguments, and
nothing else is projected: ("scored", "keys") for the dot product, () for a learned matrix; the layout comes last.
It returns (B, H, N, M), or (1, H, N, M) if all texts have the same scores. `idle` names what is allocated all the same, and
`max_length` is the greatest M, for scores that have such.
"""

from __future__ import annotations

from torch import Tensor, nn

from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.registry import register
from fullrank.core.relative import XLRelative as XLRelative
from fullrank.core.synthesizer import DenseSynthesizer as DenseSynthesizer
from fullrank.core.synthesizer import RandomSynthesizer as RandomSynthesizer


@register("score", "dot_product")
class DotProduct(nn.Module):
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
