"""Building a stage from its word in the configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullrank.attention.size import HeadSize
from fullrank.config import registry
from fullrank.config.schema import Stage, stage_name, stage_options


def build_stage(slot: str, stage: Stage, size: HeadSize) -> nn.Module:
    """The module that `stage` names, built for `size`; its options fill the class's nested `Config`, if it has one."""
    found: Any = registry.lookup(slot, stage_name(stage), f"model.attention.{slot}")
    config = getattr(found, "Config", None)
    module: nn.Module = found(config(**stage_options(stage)) if config else None, size)
    return module
