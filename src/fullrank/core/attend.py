"""The two ways to attend: weighted values, and a three-way tensor without weights."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.multilinear import MultiLinear as MultiLinear
from fullrank.core.multilinear_decayed import Summed
from fullrank.core.project import Heads
from fullrank.core.trace import Trace
from fullrank.core.weighted import WeightedValues as WeightedValues


class Attend(Protocol):
    """What is registered in the slot `attend`: a module built from `(config: AttentionConfig, size: HeadSize, dropout: float)`.

    size: of the heads that are projected for it. sees_future: whether it leaves a causal mask out.
    """

    size: HeadSize
    sees_future: bool

    @property
    def max_length(self) -> int | None:
        """The greatest number of keys, None if there is no limit."""
        ...

    def projected(self) -> dict[str, Any]:
        """What `Projection` has to make, as its arguments."""
        ...

    def merge(self, bias: bool) -> nn.Module:
        """What follows: (B, N, H D') -> (B, N, E)."""
        ...

    def past(self) -> Summed | None:
        """What decoding begins with; None: it keeps keys and values. One that gives sums has `after`, like `MultiLinear`."""
        ...

    def __call__(self, heads: Heads, layout: Layout, trace: Trace | None = None) -> Tensor:
        """-> (B, H, N, D')."""
        ...
