"""A translation model as the checks of other models see it: target ids in, logits out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.config import ModelConfig


class Given(nn.Module):
    """The model of translations of random sentences, which never change: input_ids (B, N) of the target in, logits out.

    sources (3, M): as many as are needed take turns. Its modules have the names that they have in the translator.
    """

    def __init__(self, translator: Any, sources: Tensor) -> None:
        super().__init__()
        self.encoder, self.decoder, self.config = translator.encoder, translator.decoder, translator.config
        self._translator = (translator,)  # a tuple: its modules are registered above
        self.sources: Tensor
        self.register_buffer("sources", sources, persistent=False)
        self.max_length: int | None = translator.max_length

    @property
    def translator(self) -> Any:
        return self._translator[0]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        rows = torch.arange(len(input_ids), device=input_ids.device) % len(self.sources)
        return self.translator(self.sources[rows], input_ids, None, attention_mask)


def is_translator(model: nn.Module) -> bool:
    """Whether it is a translation model of ours."""
    return hasattr(model, "of_source") and isinstance(getattr(model, "config", None), ModelConfig)
