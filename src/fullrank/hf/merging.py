"""Mixing written into a model's own parameters, where that is possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.errors import InputError
from fullrank.core.normalize import Softmax

_VALUES = ("v_proj", "value", "v_lin", "v", "value_proj")


def merge_mixing(modules: dict[str, Any]) -> None:
    """Multiply the values of each head j by m_jj, where M is diagonal.

        O_j = P'_j V_j = P_j (m_jj V_j)

    A head that takes weights of others would need values that are a sum over heads, of higher rank than a head has.
    Raises InputError naming the module where M is not diagonal, or values are not reached; then nothing was changed.
    """
    with torch.no_grad():
        scaled = [(_values(name, module), _factors(name, module)) for name, module in modules.items()]
        for values, factors in scaled:
            if values is None:
                continue
            rows = factors.repeat_interleave(values.out_features // factors.shape[0])
            values.weight.mul_(rows[:, None])
            if values.bias is not None:
                values.bias.mul_(rows)


def _factors(name: str, module: Any) -> Tensor:
    """m_jj for each value head."""
    stages = module.fullrank
    own_weights = type(stages.normalize) is Softmax
    matrix = stages.mix.matrix(None)
    if not own_weights:
        raise _refusal(name, "its weights are normalised otherwise than the model's own")
    if matrix is None:
        return torch.ones(stages.size.num_heads)
    if any(bool((p != 0).any()) for part, p in stages.mix.named_parameters() if part != "mixing"):
        raise _refusal(name, "its mixing depends on the query")
    factors: Tensor = matrix.diagonal()
    if bool((matrix != torch.diag(factors)).any()):
        raise _refusal(name, "its heads exchange weights (M is not diagonal)")
    by_group = factors.view(-1, getattr(module, "num_key_value_groups", 1))
    if bool((by_group != by_group[:, :1]).any()):
        raise _refusal(name, "the heads of a group share their values, and have different factors")
    return by_group[:, 0]


def _values(name: str, module: Any) -> nn.Linear | None:
    """The projection of values; None where nothing has to be multiplied."""
    if bool((_factors(name, module) == 1).all()):
        return None
    for projection in (getattr(module, attribute, None) for attribute in _VALUES):
        if isinstance(projection, nn.Linear) and not hasattr(module, "v_norm"):
            return projection
    raise _refusal(name, "it has no projection of values alone that could be scaled")


def _refusal(name: str, reason: str) -> InputError:
    return InputError(f"{name}: cannot be merged, {reason}; remove it without merge, or keep it")
