"""What calls of a language model return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fullrank.core.cache import Cache
from fullrank.core.memory import Memory


@dataclass(frozen=True)
class ModelOutput:
    """logits (B, N, V); memory and cache go into the next call, None where the model has none or none was passed."""

    logits: Tensor
    memory: Memory | None = None
    cache: Cache | None = None


class Pass(NamedTuple):
    """What a pass through all layers gives: what the output layer reads, (B, N, E), and the memory and cache after it."""

    hidden: Tensor
    memory: Memory | None
    cache: Cache | None


class LossParts(NamedTuple):
    """Scalars in nats per token: `loss` is what training minimises, `nll` (no gradient) leaves label smoothing out.

    memory goes into the next call.
    """

    loss: Tensor
    nll: Tensor
    memory: Memory | None = None


@dataclass(frozen=True)
class TokenNll:
    """per_token (B, N): negative log-likelihood in nats; memory goes into the next call."""

    per_token: Tensor
    memory: Memory | None = None
