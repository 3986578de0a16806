"""Stages of our own in a file of their own, as everybody's: with options, helpers, and a base in the same file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fullrank as fr
from fullrank.core.engine import Components
from fullrank.core.layout import Layout
from fullrank.core.mix import AverageHeads
from fullrank.core.output import SoftmaxOutput
from fullrank.core.registry import register
from fullrank.core.score import Score, Softmax
from fullrank.core.stage import HeadSize

SCALE = 2.0


@register("activation", "own-shape")
def shape(x: Tensor) -> Tensor:
    return torch.tanh(SCALE * x)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@register("score", "own-score")
class Cosine(Score):
    """A = Q K^T / (|Q| |K|)."""

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()

    def forward(self, query: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        return unit(query) @ unit(keys).transpose(-1, -2)


@register("normalize", "own-normalize")
class Squared(Softmax):
    """softmax(a^2 sign a)."""

    engine = None

    def forward(self, scores: Tensor) -> Tensor:
        return super().forward(scores * scores.abs())


class Options:
    @dataclass(frozen=True)
    class Config:
        share: float = 0.5


@fr.register("mix", "own-mix")
class Halfway(Options, AverageHeads):
    """Heads move towards their mean."""

    def __init__(self, config: Options.Config, size: HeadSize) -> None:
        super().__init__(None, size)
        self.share = config.share

    def matrix(self, query: Tensor | None) -> Tensor:
        mean = super().matrix(query)
        return self.share * mean + (1 - self.share) * torch.eye(self.num_heads).to(mean)


@register("output", "own-output")
class Tempered(SoftmaxOutput):
    """p(v | h) = softmax(W h / t + b)_v."""

    @dataclass(frozen=True, kw_only=True)
    class Config(fr.OutputConfig):
        kind: str = "own-output"
        temperature: float = 1.0

    def __init__(self, config: fr.ModelConfig, embedding: nn.Module) -> None:
        super().__init__(config, embedding)
        self.temperature = config.output.temperature

    def components(self, hidden: Tensor) -> Components:
        return super().components(hidden / self.temperature)
