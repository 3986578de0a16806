"""The sizes that stages are built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadSize:
    """H attention heads of D dimensions over a model of width E, sequences of at most `max_length` tokens."""

    num_heads: int
    head_dim: int
    hidden_size: int
    max_length: int
