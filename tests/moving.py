"""Modules away from where they start, so that what starts at zero shows."""

from typing import TypeVar

import torch
from torch import nn

import fullrank as fr

Module = TypeVar("Module", bound=nn.Module)

# Without a GPU, torch.manual_seed keeps a seed and a stack trace for each kind of device: half a millisecond each time.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def moved(module, size=0.3):
    """The module itself, every parameter perturbed by normal numbers times `size`, always the same ones."""
    seed(17)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return module


def narrow(kind=fr.LanguageModel, size=0.3, **keys):
    """A model of two narrow layers in double precision and evaluation mode, moved by normal numbers times `size`."""
    sizes = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    seed(0)
    return moved(kind(fr.ModelConfig(**sizes | keys)).double().eval(), size)
