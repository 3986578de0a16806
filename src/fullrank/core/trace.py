"""What training penalties and analysis want to see besides the output; ordinary runs pass no trace and collect nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LayerTrace:
    """One layer's attention: weights before and after mixing (B, H, N, M), mixing (H, H) or (B, N, H, H) or None."""

    weights: Tensor
    mixed: Tensor
    mixing: Tensor | None


@dataclass
class Trace:
    """Collects one `LayerTrace` per attention layer, in the order in which the layers run.

    partial: layers without attention weights are left out; otherwise they refuse to be traced.
    states: where a list is given, the inputs (B, N, E) of the blocks. weights: whether attention is traced at all; tracing it
    takes the reference kernel.
    """

    layers: list[LayerTrace] = field(default_factory=list)
    partial: bool = False
    states: list[Tensor] | None = None
    weights: bool = True

    def enter(self, x: Tensor) -> Trace | None:
        """What a block that begins with x (B, N, E) hands to its attention."""
        if self.states is not None:
            self.states.append(x)
        return self if self.weights else None
