"""Attention weights of a forward pass, for penalties and analysis."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
    """Collector of one `LayerTrace` per attention layer, in the order in which the layers run, for penalties and analysis.

    partial: layers without attention weights are left out; otherwise they refuse to be traced.
    states: where a list is given, the inputs (B, N, E) of the blocks. last: the input of the vocabulary layer (B, N, E), before
    its dropout; hidden: after it, where the loss reads it. weights: False collects no attention; tracing attention takes the
    definition instead of an engine.
    """

    # no dataclass: a sharded model (FSDP2) copies those among its arguments
    def __init__(
        self,
        layers: list[LayerTrace] | None = None,
        partial: bool = False,
        states: list[Tensor] | None = None,
        weights: bool = True,
    ) -> None:
        self.layers = [] if layers is None else layers
        self.partial, self.states, self.weights = partial, states, weights
        self.last: Tensor | None = None
        self.hidden: Tensor | None = None

    def enter(self, x: Tensor) -> Trace | None:
        """Record the input x (B, N, E) of a block; the trace for its attention."""
        if self.states is not None:
            self.states.append(x)
        return self if self.weights else None
