"""Building a stage from its word in the configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullrank.core import registry
from fullrank.core.config import Stage, stage_name, stage_options
from fullrank.core.head_size import HeadSize


def build_stage(slot: str, stage: Stage, size: HeadSize) -> nn.Module:
    """The module that `stage` names, built for `size`; its options fill the class's nested `Config`, if it has one."""
    found: Any = registry.lookup(slot, stage_name(stage), f"model.attention.{slot}")
    config = getattr(found, "Config", None)
    module: nn.Module = found(config(**stage_options(stage)) if config else None, size)
    return module


@contextlib.contextmanager
def drawn_apart() -> Iterator[None]:
    """Random numbers drawn inside are others than those that follow, and do not change them (on the CPU)."""
    with torch.random.fork_rng(devices=[]):
        seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu").item()
        torch.default_generator.manual_seed(int(seed))
        yield
