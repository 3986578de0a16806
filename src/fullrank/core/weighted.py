"""`attend` as weighted values: score -> mask -> normalize -> mix -> dropout -> weighted values."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from fullrank.core import engine
from fullrank.core.config import AttentionConfig
from fullrank.core.dropout import dropout as drop
from fullrank.core.engine import Problem
from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.mix import Mixing, mix_heads
from fullrank.core.normalize import Normalizer
from fullrank.core.project import Heads
from fullrank.core.registry import register
from fullrank.core.score_contract import Score
from fullrank.core.stage import build_stage
from fullrank.core.trace import LayerTrace, Trace


@register("attend", "weighted")
class WeightedValues(nn.Module):
    """O_i = dropout(mix(normalize(mask(score(Q_i, K_i))))) V_i  (Mixhead Eq. 9, 10, 12).

    Heads (query (B, H, N, D), keys and values (B, H, M, D)) -> (B, H, N, D).
    Dropout comes after mixing, as in the released Mixhead code. `forward` is the definition, and asks faster engines first.
    """

    def __init__(self, config: AttentionConfig, size: HeadSize, dropout: float) -> None:
        super().__init__()
        self.size = size
        self.score: Score = build_stage("score", config.score, size)
        self.normalize: Normalizer = build_stage("normalize", config.normalize, size)
        self.mix: Mixing = build_stage("mix", config.mix, size)
        self.dropout = dropout

    @property
    def max_length(self) -> int | None:
        """The greatest number of keys, None if there is no limit."""
        return self.score.max_length

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
        """What `Projection` has to make for these stages, as its arguments."""
        return {
            "score_needs": self.score.needs,
            "mix_needs": self.mix.needs,
            "idle": self.score.idle,
            "clamp_length": self.score.clamp_length,
        }

    def problem(self, heads: Heads, layout: Layout, mixing: Tensor | None) -> Problem | str:
        """The call as engines see it; a string is the reason for which no engine computes it."""
        terms = self.score.terms(*self._needed(heads), layout)
        if isinstance(terms, str):
            return terms
        if self.normalize.engine is None:
            return f"no engine knows the normaliser {type(self.normalize).__name__}"
        dropout = self.dropout if self.training else 0.0
        mixing = None if mixing is None else mixing.to(heads.values.device)
        return Problem(
            terms.query,
            terms.keys,
            heads.values,
            mixing,
            terms.distances,
            layout,
            terms.scale,
            self.normalize.engine,
            dropout,
        )

    def scores(self, heads: Heads, layout: Layout) -> Tensor:
        """Before the mask, (B, H, N, M)."""
        scores: Tensor = self.score(*self._needed(heads), layout)
        return scores.expand(heads.values.shape[0], -1, -1, -1)

    def _needed(self, heads: Heads) -> list[Tensor]:
        return [getattr(heads, name) for name in self.score.needs]

    def forward(self, heads: Heads, layout: Layout, trace: Trace | None = None) -> Tensor:
        mixing = self.mix.matrix(heads.query)
        problem = self.problem(heads, layout, mixing) if trace is None else "a trace asks for attention weights"
        if (out := engine.attend(problem)) is not None:
            return out
        scores = self.scores(heads, layout)
        if not layout.unrestricted:
            scores = scores.masked_fill(~layout.visible(), float("-inf"))
        weights = self.normalize(scores)
        mixed = mix_heads(weights, mixing)
        if trace is not None:
            trace.layers.append(LayerTrace(weights, mixed, mixing))
        dropped = drop(mixed, self.dropout) if self.training else mixed
        return dropped.to(heads.values.dtype) @ heads.values
