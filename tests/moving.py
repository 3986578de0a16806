"""Modules away from where they start, so that what starts at zero shows."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def moved(module: Module, size: float = 0.3) -> Module:
    """The module itself, every parameter perturbed by normal numbers times `size`, always the same ones."""
    torch.manual_seed(17)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return module
