"""Position-wise feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import registry
from .config import ModelConfig
from .dropout import Dropout
from .registry import register

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
