"""Input layers: token ids to vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.registry import register
from fullrank.config.schema import ModelConfig
from fullrank.errors import ConfigError


@register("input", "token")
class TokenEmbedding(nn.Module):
    """One vector per token, times sqrt(E) if `scale_embedding`.  input_ids (B, N) -> (B, N, E); weight (V, E)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size: must be a number to build a model (a run takes it from its data)")
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.scale = config.hidden_size**0.5 if config.scale_embedding else 1.0

    def forward(self, input_ids: Tensor) -> Tensor:
        vectors = F.embedding(input_ids, self.weight)
        return vectors * self.scale if self.scale != 1 else vectors
