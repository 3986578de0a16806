"""What vocabulary layers have in common: where their sizes and their matrix come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fullrank.core.config import ModelConfig, OutputConfig
from fullrank.core.errors import ConfigError


def sizes_of(
    layer: str, config: ModelConfig | OutputConfig, vocab_size: int | None, hidden_size: int | None
) -> tuple[OutputConfig, int | None, int]:
    """The output section, vocab_size and hidden_size of a `ModelConfig`, or of an `OutputConfig` and the sizes it lacks.

    Raises ConfigError, in the name of `layer`, for a size given twice and for no hidden_size.
    """
    if isinstance(config, ModelConfig):
        if vocab_size is not None or hidden_size is not None:
            raise ConfigError(f"{layer}: a ModelConfig has its own sizes; change them there")
        return config.output, config.vocab_size, config.hidden_size
    if hidden_size is None:
        raise ConfigError(f"{layer}: give a ModelConfig, or an OutputConfig with vocab_size and hidden_size")
    return config, vocab_size, hidden_size


def own_or_tied(weight: Tensor | None, tied: Sequence[Any]) -> Tensor:
    """W (V, E): the layer's own, or that of the embedding in `tied`."""
    found = tied[0].weight if tied else weight
    assert isinstance(found, Tensor)
    return found
