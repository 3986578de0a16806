"""One Transformer block: attention and feed-forward, each in a residual line, with the norm before or after."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import registry
from .attention import Attention
from .cache import CrossInput, KeyValues, Past
from .config import ModelConfig
from .draws import Dropout
from .layout import Layout
from .registry import register
from .trace import Trace

relu = register("activation", "relu")(torch.relu)
gelu = register("activation", "gelu")(partial(F.gelu, approximate="none"))


@register("activation", "swiglu")
def swiglu(up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): the first half of `up`, through SiLU, gates the second.  (..., 2F) -> (..., F)."""
    gate, value = up.chunk(2, dim=-1)
    return F.silu(gate) * value


class FeedForward(nn.Module):
    """FFN(x) = dropout(act(x W_1 + b_1)) W_2 + b_2.  x (B, N, E) -> (B, N, E), inner size F.

    With `swiglu` W_1 makes 2F columns: gate and value.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None  # resolved by ModelConfig
        inner = config.intermediate_size
        gated = config.hidden_act == "swiglu"
        self.activation: Callable[[Tensor], Tensor] = registry.lookup(
            "activation", config.hidden_act, "model.hidden_act"
        )
        self.up = nn.Linear(config.hidden_size, 2 * inner if gated else inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)
        self.dropout = Dropout(config.dropout.activation, config.dropout.locked)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x))))


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
        *,
        past: Past | None = None,
        memory: Tensor | None = None,
        cross: CrossInput | None = None,
        kept: list[Past] | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """past, kept: as of `Attention`. memory (B, M, E): inputs of the block at earlier tokens, which x attends to, too."""

        def attend(h: Tensor) -> Tensor:
            source = None
            if memory is not None:
                before = self.attention_norm(memory) if self.pre_norm else memory
                source = torch.cat((before.to(h.dtype), h), dim=1)
            return self.attention(h, source, layout, past=past, kept=kept, trace=trace)

        x = self._residual(x, self.attention_norm, attend)
        if cross is not None:
            x = self._residual(x, self.cross_attention_norm, partial(self._attend_across, cross=cross, trace=trace))
        return self._residual(x, self.feed_forward_norm, self.feed_forward)

    def _attend_across(self, h: Tensor, cross: CrossInput, trace: Trace | None) -> Tensor:
        assert self.cross_attention is not None
        source, layout = cross
        if isinstance(source, KeyValues):  # all beams of a sentence are its queries
            together = h.reshape(source.batch, -1, h.shape[2])
            return self.cross_attention(together, source, layout, trace=trace).view_as(h)
        return self.cross_attention(h, source, layout, trace=trace)

    def _residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(layer(norm(x)))
        return norm(x + self.dropout(layer(x)))
