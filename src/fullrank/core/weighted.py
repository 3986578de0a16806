"""`attend` as weighted values: score -> mask -> normalize -> mix -> dropout -> weighted values."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from fullrank import kernels
from fullrank.core.config import AttentionConfig
from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.project import Heads
from fullrank.core.registry import register
from fullrank.core.stage import build_stage
from fullrank.core.trace import Trace


@register("attend", "weighted")
class WeightedValues(nn.Module):
    """O_i = dropout(mix(normalize(mask(score(Q_i, K_i))))) V_i  (Mixhead Eq. 9, 10, 12).

    Heads (query (B, H, N, D), keys and values (B, H, M, D)) -> (B, H, N, D).
    Dropout comes after mixing, as in the released Mixhead code. The kernel that computes it is chosen in `kernels`.
    """

    def __init__(self, config: AttentionConfig, size: HeadSize, dropout: float) -> None:
        super().__init__()
        self.size = size
        self.score: Any = build_stage("score", config.score, size)
        self.normalize: Any = build_stage("normalize", config.normalize, size)
        self.mix: Any = build_stage("mix", config.mix, size)
        # decay would pull mixing towards zero, not towards plain attention
        setattr(self.mix, "no_weight_decay", True)  # noqa: B010
        self.dropout = dropout

    @property
    def max_length(self) -> int | None:
        """The greatest number of keys, None if there is no limit."""
        return getattr(self.score, "max_length", None)

    sees_future = False  # the mask is a stage of its own

    def unmixed(self) -> WeightedValues:
        """The same with heads left as they are; it shares all other stages."""
        plain = copy.copy(self)
        plain._modules = {**self._modules, "mix": build_stage("mix", "none", self.size)}
        return plain

    def past(self) -> None:
        """What decoding begins with: nothing; it keeps keys and values."""
        return

    def merge(self, bias: bool) -> nn.Module:
        """W_O, over the heads side by side."""
        return nn.Linear(self.size.num_heads * self.size.head_dim, self.size.hidden_size, bias=bias)

    def projected(self) -> dict[str, Any]:
        """What `Projection` has to make for these stages, as its arguments. A stage that does not say reads everything."""
        return {
            "score_needs": getattr(self.score, "needs", ("scored", "keys")),
            "mix_needs": getattr(self.mix, "needs", ("query",)),
            "idle": getattr(self.score, "idle", ()),
            "clamp_length": getattr(self.score, "clamp_length", None),
        }

    def scores(self, heads: Heads, layout: Layout) -> Tensor:
        """Before the mask, (B, H, N, M)."""
        read = [getattr(heads, name) for name in getattr(self.score, "needs", ("scored", "keys"))]
        scores: Tensor = self.score(*read, layout)
        return scores.expand(heads.values.shape[0], -1, -1, -1)

    def forward(self, heads: Heads, layout: Layout, trace: Trace | None = None) -> Tensor:
        return kernels.kernel_for(self, tracing=trace is not None)(self, heads, layout, trace)
