"""One Transformer block: attention and feed-forward, each in a residual line, with the norm before or after."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import Attention, Trace
from .cache import Past
from .config import ModelConfig
from .dropout import Dropout
from .feed_forward import FeedForward
from .layout import Layout
from .source import CrossInput


class Block(nn.Module):
    """Pre-norm: x + f(norm(x)); post-norm: norm(x + f(x)); f is attention, then cross-attention if there is a source, then
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
        cross: CrossInput | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        """memory (B, M, E): inputs of the block at earlier tokens, which the new tokens attend to as well.

        first (B, H, M + N, D): values of the first block at all these tokens, for value residuals.
        """
        x = self._residual(
            x,
            self.attention_norm,
            lambda h: self.attention(h, self._source(h, memory), layout, trace=trace, first=first),
        )
        x = self._read_source(x, cross, trace)
        return self._residual(x, self.feed_forward_norm, self.feed_forward)

    def continued(
        self,
        x: Tensor,
        past: Past | None,
        layout: Layout,
        trace: Trace | None = None,
        memory: Tensor | None = None,
        cross: CrossInput | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Past]:
        """The block for new tokens after `past`, or after `memory`; also returns the past of the next call."""
        kept: list[Past] = []

        def attend(h: Tensor) -> Tensor:
            source = self._source(h, memory)
            out, present = self.attention.continued(h, past, layout, source=source, trace=trace, first=first)
            kept.append(present)
            return out

        x = self._read_source(self._residual(x, self.attention_norm, attend), cross, trace)
        return self._residual(x, self.feed_forward_norm, self.feed_forward), kept[0]

    def values(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """Values (B, H, M + N, D) of the block's attention at earlier tokens, if any, and at x (B, N, E)."""
        h = self.attention_norm(x) if self.pre_norm else x
        source = self._source(h, memory)
        return self.attention.values_of(h if source is None else source)

    def _read_source(self, x: Tensor, cross: CrossInput | None, trace: Trace | None) -> Tensor:
        """Cross-attention, if there is a source."""
        layer = self.cross_attention
        if layer is None or cross is None:
            return x
        source, layout = cross
        if isinstance(source, Tensor):
            return self._residual(x, self.cross_attention_norm, lambda h: layer(h, source, layout, trace=trace))

        def attend(h: Tensor) -> Tensor:
            together = h.reshape(source.batch, -1, h.shape[2])  # all beams of a sentence are its queries
            return layer.over(together, source, layout, trace=trace).view_as(h)

        return self._residual(x, self.cross_attention_norm, attend)

    def _source(self, h: Tensor, memory: Tensor | None) -> Tensor | None:
        """Tokens that keys and values are made of, (B, M + N, E); None: h alone."""
        if memory is None:
            return None
        before = self.attention_norm(memory) if self.pre_norm else memory
        return torch.cat((before.to(h.dtype), h), dim=1)

    def _residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(layer(norm(x)))
        return norm(x + self.dropout(layer(x)))
