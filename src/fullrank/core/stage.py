"""Building a stage from its word in the configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fullrank.core import registry
from fullrank.core.config import Stage, stage_name, stage_options
from fullrank.core.head_size import HeadSize


def build_stage(slot: str, stage: Stage, size: HeadSize) -> Any:
    """The module that `stage` names, built for `size`; its options fill the class's nested `Config`, if it has one."""
    kind: Any = registry.lookup(slot, stage_name(stage), f"model.attention.{slot}")
    return kind(kind.Config(**stage_options(stage)) if kind.Config else None, size)


@contextlib.contextmanager
def drawn_apart() -> Iterator[None]:
    """Random numbers drawn inside are others than those that follow, and do not change them (on the CPU)."""
    with torch.random.fork_rng(devices=[]):
        seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu").item()
        torch.default_generator.manual_seed(int(seed))
        yield
