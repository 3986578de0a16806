"""One Transformer block: attention and feed-forward, each in a residual line, with the norm before or after."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fullrank.core.across import Across
from fullrank.core.attention import Attention, Past
from fullrank.core.config import ModelConfig
from fullrank.core.dropout import Dropout
from fullrank.core.feed_forward import FeedForward
from fullrank.core.layout import Layout
from fullrank.core.trace import Trace


class Block(nn.Module):
    """Pre-norm: x + f(norm(x)); post-norm: norm(x + f(x)); f is attention, cross-attention where there is a source, then
    feed-forward.  (B, N, E) -> (B, N, E)."""

    def __init__(self, config: ModelConfig, cross: ModelConfig | None = None) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout.residual, config.dropout.locked)
        self.pre_norm = config.norm == "pre"
        self.cross_attention: Attention | None = None
        if cross is not None:
            self.cross_attention = Attention(cross)
            self.cross_attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        trace: Trace | None = None,
        memory: Tensor | None = None,
        across: Across | None = None,
    ) -> Tensor:
        """memory (B, M, E): inputs of earlier tokens, which the new ones attend to like to themselves."""
        x = self._residual(
            x,
            self.attention_norm,
            lambda h: self.attention(h, self._source(h, memory), layout, trace=trace),
        )
        return self._residual(self._across(x, across, trace), self.feed_forward_norm, self.feed_forward)

    def continued(
        self,
        x: Tensor,
        past: Past | None,
        layout: Layout,
        trace: Trace | None = None,
        memory: Tensor | None = None,
        across: Across | None = None,
        mixed: bool = True,
    ) -> tuple[Tensor, Past]:
        """The same for new tokens after `past`, or after `memory`; also returns the past of the next call."""
        kept: list[Past] = []

        def attend(h: Tensor) -> Tensor:
            source = self._source(h, memory)
            out, present = self.attention.continued(h, past, layout, source=source, trace=trace, mixed=mixed)
            kept.append(present)
            return out

        x = self._across(self._residual(x, self.attention_norm, attend), across, trace)
        return self._residual(x, self.feed_forward_norm, self.feed_forward), kept[0]

    def _across(self, x: Tensor, across: Across | None, trace: Trace | None) -> Tensor:
        """What the tokens read of the source."""
        layer = self.cross_attention
        if layer is None or across is None:
            return x
        source, layout = across
        if isinstance(source, Tensor):
            return self._residual(x, self.cross_attention_norm, lambda h: layer(h, source, layout, trace=trace))

        def attend(h: Tensor) -> Tensor:
            together = h.reshape(source.texts, -1, h.shape[2])  # texts of one sentence are its queries
            return layer.over(together, source, layout, trace=trace).view_as(h)

        return self._residual(x, self.cross_attention_norm, attend)

    def _source(self, h: Tensor, memory: Tensor | None) -> Tensor | None:
        """What keys and values are made of, (B, M + N, E); None: of h alone."""
        if memory is None:
            return None
        before = self.attention_norm(memory) if self.pre_norm else memory
        return torch.cat((before.to(h.dtype), h), dim=1)

    def _residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(layer(norm(x)))
        return norm(x + self.dropout(layer(x)))
