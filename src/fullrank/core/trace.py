"""Attention weights of a forward pass, and penalties that keep mixed heads diverse.

The penalties ask for orthogonal mixing (Mixhead Eq. 16) and for little overlap of heads (Eq. 20).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError


@dataclass(frozen=True)
class LayerTrace:
    """One layer's attention: weights before and after mixing (B, H, N, M), mixing (H, H) or (B, N, H, H) or None.

    learned: the mixing has parameters. values (B, H, M, D): what the mixed weights are summed over.
    """

    weights: Tensor
    mixed: Tensor
    mixing: Tensor | None
    learned: bool = True
    values: Tensor | None = None


class Trace:
    """A collector of one `LayerTrace` for each layer with attention weights, in the order in which the layers run.

    states: a list that gets the inputs (B, N, E) of the blocks; None for none.
    weights: False collects no attention; tracing attention takes the definition instead of an engine.
    last: the input of the vocabulary layer (B, N, E), before its dropout. hidden: the same after it, where the loss reads it.
    """

    # no dataclass: a sharded model (FSDP2) copies those among its arguments
    def __init__(self, states: list[Tensor] | None = None, weights: bool = True) -> None:
        self.layers: list[LayerTrace] = []
        self.states = states
        self.weights = weights
        self.last: Tensor | None = None
        self.hidden: Tensor | None = None

    def enter(self, x: Tensor) -> Trace | None:
        """Record the input x (B, N, E) of a block; return the trace for its attention, None if that is not collected."""
        if self.states is not None:
            self.states.append(x)
        return self if self.weights else None

    def get_layers(self) -> list[LayerTrace]:
        """Return the layers that were collected; InputError if there are none."""
        if not self.layers:
            raise InputError("the trace is empty: hand it to a forward pass first")
        return self.layers


def _measure_overlap_of_rows(mixing: Tensor) -> Tensor:
    """Compute ||M^T M - I||_F^2, for (..., H, H) the mean over the leading dimensions."""
    gram = mixing.transpose(-1, -2) @ mixing
    off = gram - torch.eye(gram.shape[-1], device=gram.device, dtype=gram.dtype)
    return off.square().sum((-1, -2)).mean()


def orthogonality(source: nn.Module | Trace) -> Tensor:
    """Compute how far mixing is from orthogonal, a scalar (Mixhead Eq. 16).

        R_orth = sum over layers of ||M^T M - I||_F^2

    From a model, ours or an injected one, M are the mixing matrices themselves. Position-wise mixing counts with B, the part
    that every position shares (the paper does not say which M is meant).
    From a `Trace`, position-wise mixing counts with the mean of the penalty over the M(n) of all positions of the pass. This
    is what training uses.
    Layers without mixing count zero, and so do constant matrices (`random`, `average`): Eq. 16 is about a learned M.
    Raises InputError for a model in which no layer mixes heads, and for a trace that has seen no layer.
    """
    if isinstance(source, Trace):
        layers = source.get_layers()
        matrices = [layer.mixing for layer in layers if layer.mixing is not None and layer.learned]
        zero = layers[0].weights.new_zeros(())
    else:
        stages: list[Any] = [module.mix for module in source.modules() if "mix" in module._modules]
        mixings = [stage for stage in stages if stage.matrix(None) is not None]
        if not mixings:
            raise InputError(
                f"{type(source).__name__}: no layer of it mixes heads, and orthogonality is of mixing matrices; set "
                "model.attention.mix, or call fullrank.inject(model, mix=...) on a Hugging Face model"
            )
        matrices = [stage.matrix(None) for stage in mixings if stage.learned]
        zero = next(source.parameters()).new_zeros(())
    return sum((_measure_overlap_of_rows(mixing).to(zero) for mixing in matrices), zero)


def overlap_terms(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute R_d and R_c of Mixhead Eq. 20, summed over all pairs of heads, mean over the batch.

        R_d = sum_{i<j} ||P_i P_j^T||_F^2,      R_c = sum_{i<j} ||P_i^T P_j||_F^2

    weights (B, H, N, M) -> two scalars. With the Gram matrices G_i = P_i^T P_i of each head,
    ||P_i P_j^T||_F^2 = <G_i, G_j>, so that all pairs cost one sum of Gram matrices.
    """

    def pairs(gram: Tensor) -> Tensor:
        together = gram.sum(1).square().sum((-1, -2))
        alone = gram.square().sum((-1, -2, -3))
        return ((together - alone) / 2).mean()

    transposed = weights.transpose(-1, -2)
    return pairs(transposed @ weights), pairs(weights @ transposed)


def overlap(source: Tensor | Trace) -> Tensor:
    """Compute R_d + R_c of Mixhead Eq. 20, a scalar, from weights (B, H, N, M) or summed over the layers of a trace.

    A trace counts with the weights before mixing, the P_i that mixing adds up (§3.4).
    """
    if isinstance(source, Trace):
        return torch.stack([overlap(layer.weights) for layer in source.get_layers()]).sum()
    rows, columns = overlap_terms(source)
    return rows + columns
