"""Parameter groups of an injected model for an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullrank.hf.heads import Injected


def parameter_groups(model: nn.Module, *, learning_rate: float, mixing_learning_rate: float | None = None,
                     weight_decay: float = 0.0) -> list[dict[str, Any]]:  # fmt: skip
    """Groups for an optimizer: mixing parameters with a learning rate of their own and never decayed, the others as usual.

    Decay pulls mixing towards zero, which is not plain attention. Nor are vectors (biases, norms) decayed. Parameters that ask
    for no gradient are left out. mixing_learning_rate: as `learning_rate` where it is None.
    """
    mixing = {id(p) for module in model.modules() if isinstance(module, Injected) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    rest = [p for p in trained if id(p) not in mixing]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "lr": learning_rate, "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) in mixing], "weight_decay": 0.0,
         "lr": learning_rate if mixing_learning_rate is None else mixing_learning_rate},
    ]  # fmt: skip
    return [group for group in groups if group["params"]]
