"""Sizes of attention heads, and how a stage is built from its name in the configuration or replaced in a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from . import registry
from .config import Stage, stage_name, stage_options

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class HeadSize:
    """H attention heads of D dimensions over a model of width E, sequences of at most `max_length` tokens."""

    num_heads: int
    head_dim: int
    hidden_size: int
    max_length: int


def build_stage(slot: str, stage: Stage, size: HeadSize) -> Any:
    """The module that `stage` names, built for `size`; its options fill the class's nested `Config`, if it has one."""
    kind: Any = registry.lookup(slot, stage_name(stage), f"model.attention.{slot}")
    return kind(kind.Config(**stage_options(stage)) if kind.Config else None, size)


def with_parts(module: Part, **parts: nn.Module) -> Part:
    """A view of `module` with other submodules of these names; it shares everything else."""
    view = object.__new__(type(module))  # not by copy.copy: a sharded module (FSDP2) would be made anew
    view.__dict__.update(vars(module), _modules={**module._modules, **parts})
    return view


@contextlib.contextmanager
def draw_apart() -> Iterator[None]:
    """Draw other random numbers inside than afterwards, and leave those that follow unchanged (on the CPU)."""
    with torch.random.fork_rng(devices=[]):
        seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu").item()
        torch.default_generator.manual_seed(int(seed))
        yield
