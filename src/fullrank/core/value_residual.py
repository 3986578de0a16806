"""Value residuals (Zhou et al. 2025, arXiv 2410.17897), a policy of no paper here: hooks of the projections of values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class ValueResiduals(nn.Module):
    """Values of later layers take a share of those of the first layer.

        V'_l = (1 - a_l) V_l + a_l V_1

    V (B, M, H D), of the tokens that a call projects, before dropout. a_l = `shares[l]`, a number of the layer l that starts at
    1/2; layers without one keep their values. projections: W_V of each layer, the first one first, which are hooked.
    """

    def __init__(self, projections: Sequence[nn.Module], layers: Sequence[int]) -> None:
        super().__init__()
        self.shares = nn.ParameterDict({str(layer): nn.Parameter(torch.full((1,), 0.5)) for layer in layers})
        self.first: Tensor | None = None  # V_1 of the current call
        projections[0].register_forward_hook(self._take)
        for layer in layers:
            projections[layer].register_forward_hook(partial(self._mix, layer))

    def _take(self, module: nn.Module, inputs: Any, values: Tensor) -> None:
        self.first = values

    def _mix(self, layer: int, module: nn.Module, inputs: Any, values: Tensor) -> Tensor:
        if self.first is None:  # a layer by itself
            return values
        share = self.shares[str(layer)].to(values.dtype)
        return (1 - share) * values + share * self.first

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"first": None}  # a copy of the model begins without values of a call
