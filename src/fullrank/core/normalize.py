"""Normalisers: masked scores (B, H, N, M), with -inf where nothing may be seen, to weights that sum to one over M."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import contract, register
from .stage import HeadSize


@contract("normalize")
class Normalizer(nn.Module):
    """Contract of a normaliser, built from `(config, size)`.

    engine: the name by which engines know what it computes; None if no engine does.
    """

    Config: ClassVar[type | None] = None
    engine: ClassVar[str | None] = None


@register("normalize", "softmax")
class Softmax(Normalizer):
    """softmax(a)_m = exp(a_m) / sum_k exp(a_k)  (Mixhead Eq. 9)."""

    engine = "softmax"

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()

    def forward(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)


@register("normalize", "sigsoftmax")
class SigSoftmax(Normalizer):
    """Sigsoftmax (Mixhead Eq. 21; Kanai et al. 2018).

        sigsoftmax(a)_m = exp(a_m) sigmoid(a_m) / sum_k exp(a_k) sigmoid(a_k) = softmax(a + log sigmoid(a))_m

    The right-hand form never overflows. Unlike softmax it is not invariant to a shift of `a`, so the maximum must not be
    subtracted before the sigmoid (the paper's footnote 5 leaves that open).
    """

    engine = "sigsoftmax"

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()

    def forward(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores + F.logsigmoid(scores), dim=-1)
