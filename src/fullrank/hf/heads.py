"""What is injected into one attention module: its stages, and what is known of the module's own attention function."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullrank.attention.route import SameHead, StochasticCrossHead
from fullrank.attention.size import HeadSize
from fullrank.attention.stage import build_stage
from fullrank.config.schema import Stage
from fullrank.hf.own import Own


class Injected(nn.Module):
    """The stages that hang on an attention module as its submodule `fullrank`.

    route permutes key and value heads, normalize and mix act on the weights: they are the stages of our own models, with their
    names and their start. `own` says what the model's own attention function does, `former` by which one it was computed.
    It has no forward pass: `interface.attend` reads it.
    """

    def __init__(self, size: HeadSize, own: Own, former: str, mix: Stage, normalize: Stage, cross_head: float) -> None:
        super().__init__()
        self.normalize: Any = build_stage("normalize", normalize, size)
        self.mix: Any = build_stage("mix", mix, size)
        setattr(self.mix, "no_weight_decay", True)  # noqa: B010  it would pull mixing towards zero
        self.route: Any = StochasticCrossHead(cross_head) if cross_head else SameHead()
        self.size, self.own, self.former = size, own, former
