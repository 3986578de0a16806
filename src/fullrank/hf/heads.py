"""What is injected into one attention module: its stages, and what is known of the module's own attention function."""

from __future__ import annotations

from torch import nn

from fullrank.core.config import Stage
from fullrank.core.cross_head import StochasticCrossHead
from fullrank.core.mix import Mixing
from fullrank.core.normalize import Normalizer
from fullrank.core.stage import HeadSize, build_stage
from fullrank.hf.own import Eager, Own, examine


class Injected(nn.Module):
    """The stages that hang on an attention module as its submodule `fullrank`.

    route permutes key and value heads, normalize and mix act on the weights: they are the stages of our own models, with their
    names and their start. former is the attention function that the module had, eager the model's own.
    It has no forward pass: `interface.attend` reads it.
    """

    def __init__(
        self, size: HeadSize, eager: Eager, former: str, mix: Stage, normalize: Stage, cross_head: float
    ) -> None:
        super().__init__()
        self.normalize: Normalizer = build_stage("normalize", normalize, size)
        self.mix: Mixing = build_stage("mix", mix, size)
        self.route = StochasticCrossHead(cross_head)
        self.size, self.eager, self.former = size, eager, former
        self._own: Own | None = None

    def own(self, module: nn.Module) -> Own:
        """What the model's own attention function does in `module`, found out once: its parameters must have values."""
        if self._own is None:
            self._own = examine(module, self.eager, self.size)
        return self._own
