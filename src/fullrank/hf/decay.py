"""Weight decay, which pulls mixing towards zero and not towards plain attention, kept away from mixing parameters."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from torch import nn

from fullrank.hf.heads import Injected


def mixing_names(model: nn.Module) -> set[str]:
    """The names of all parameters that were injected."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, Injected)
        for name, _ in module.named_parameters()
    }


def exempt_from_trainer() -> None:
    """Have `transformers.Trainer` leave mixing parameters out of weight decay, as it does biases and norms.

    It asks `Trainer.get_decay_parameter_names`, which from now on leaves out what was injected; of models without, nothing
    changes. Without accelerate there is no Trainer.
    """
    if importlib.util.find_spec("accelerate") is None:
        return
    from transformers.trainer import Trainer

    names_of = Trainer.get_decay_parameter_names
    if getattr(names_of, "leaves_out_mixing", False):
        return

    @functools.wraps(names_of)
    def get_decay_parameter_names(self: Any, model: nn.Module) -> list[str]:
        mixing = mixing_names(model)
        return [name for name in names_of(self, model) if name not in mixing]

    get_decay_parameter_names.leaves_out_mixing = True  # type: ignore[attr-defined]
    Trainer.get_decay_parameter_names = get_decay_parameter_names
