"""Mixers of heads beside those of Mixhead, one class each: of scores, of weights, and what follows the weighted values.

mix_scores  S' = mix_scores(S)            before the mask and the softmax; the definition computes it
mix         P' = mix(P)                   weights; a matrix runs in every kernel (`core/stages.py`)
gate        O' = gate(x, O, V)            after the values
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .draws import draw_apart
from .errors import ConfigError
from .kinds import ExclusiveOptions, LowRankMixingOptions
from .layout import Layout
from .registry import contract, register
from .stages import Heads, HeadSize, Mixing, PositionIndependentMixing, mix_heads

register("mix_scores", "none")(None)  # scores and outputs stay as they are
register("gate", "none")(None)


def draw_for(layer: int, parameter: Tensor, std: float) -> None:
    """Start a parameter N(0, std^2), otherwise in every layer, and leave all numbers that are drawn later as they are."""
    with torch.no_grad(), draw_apart():
        for _ in range(layer + 1):
            numbers = torch.randn(parameter.shape, device="cpu")
        parameter.copy_(numbers * std)


# -- scores --------------------------------------------------------------------------------------------------------------


@contract("mix_scores")
class ScoreMixing(nn.Module):
    """Contract of a mixing of scores, built from `(config, size)` and called with scores, heads and the layout.

    Scores (B, H, N, M) before the mask -> (B, H, N, M). What it reads of hidden keys must not reach the result.
    starts_plain: scores stay as they are before training. no_weight_decay: as of `Mixing`.
    """

    Config: ClassVar[type | None] = None
    starts_plain: ClassVar[bool] = True
    no_weight_decay: ClassVar[bool] = True

    def __init__(self, config: Any = None, size: HeadSize | None = None) -> None:
        super().__init__()

    def draw(self) -> None:
        """Draw anew what starts at random, from the CPU's random numbers."""


@register("mix_scores", "talking_heads")
class TalkingHeads(ScoreMixing):
    """Talking heads before the softmax (Shazeer et al. 2020, arXiv 2003.02436, §3: the projection P_l).

        S'_i(n, m) = sum_j l_ji S_j(n, m)

    `mixing` l is (H, H). The projection after the softmax, P_w, is `mix: talking_heads`, the matrix of Mixhead A.
    Starts at I: plain attention.  Differs from the paper: as many heads of scores as of weights, and this start.
    """

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        self.mixing = nn.Parameter(torch.eye(size.num_heads))

    def forward(self, scores: Tensor, heads: Heads, layout: Layout) -> Tensor:
        return mix_heads(scores, self.mixing)


# -- weights -------------------------------------------------------------------------------------------------------------


register("mix", "talking_heads")(PositionIndependentMixing)


@register("mix", "low_rank")
class LowRankMixing(Mixing):
    """Identity and a learned matrix of rank R (virtual head attention, PaddlePaddle/PaddleFleet pull request 1620: postmix).

        M = I + U V^T,    P'_i = sum_j m_ji P_j

    `left` U and `right` V are (H, R).  Starts at V = 0: plain attention.
    Differs from that code: it mixes the heads' outputs, which folds into W_O; weights are mixed here. U starts N(0, 1/R).
    """

    Config = LowRankMixingOptions
    needs = ()

    def __init__(self, config: LowRankMixingOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.layer = size.layer
        self.left = nn.Parameter(torch.empty(size.num_heads, config.rank))
        self.right = nn.Parameter(torch.zeros(size.num_heads, config.rank))
        self.draw()

    def draw(self) -> None:
        draw_for(self.layer, self.left, self.left.shape[1] ** -0.5)

    def matrix(self, query: Tensor | None) -> Tensor:
        identity = torch.eye(len(self.left), device=self.left.device, dtype=self.left.dtype)
        return identity + self.left @ self.right.mT


@register("mix", "differential")
class DifferentialMixing(Mixing):
    """Differential attention V1: the difference of two maps (Ye et al. 2024, arXiv 2410.05258, §2.1, Eq. 1 to 3).

        P'_2i = P'_2i+1 = P_2i - lambda P_2i+1
        lambda = exp(q_1 . k_1) - exp(q_2 . k_2) + lambda_init,      lambda_init = 0.8 - 0.6 exp(-0.3 l)
        [O'_2i, O'_2i+1] = (1 - lambda_init) RMSNorm([O_2i, O_2i+1])

    A pair of our heads is a head of the paper, whose values are twice as wide; l is the layer, from 0. The difference is a
    matrix (H, H) of mixed heads, so every kernel computes it. `vectors` q_1, k_1, q_2, k_2 (4, D) start N(0, 0.1^2), the
    weight (2 D) of the norm, which the pairs share, starts at 1. Not plain attention at the start.
    Raises ConfigError for an odd number of heads.
    """

    needs = ()
    starts_plain = False
    injectable = False

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        if size.num_heads % 2:
            raise ConfigError(
                f"model.attention.mix: 'differential' takes heads in pairs; model.num_attention_heads must be even, given "
                f"{size.num_heads}"
            )
        self.num_heads, self.layer = size.num_heads, size.layer
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * size.layer)
        self.vectors = nn.Parameter(torch.empty(4, size.head_dim))
        self.weight = nn.Parameter(torch.ones(2 * size.head_dim))
        self.draw()

    def draw(self) -> None:
        draw_for(self.layer, self.vectors, 0.1)

    def matrix(self, query: Tensor | None) -> Tensor:
        first, second = (self.vectors[0::2] * self.vectors[1::2]).sum(-1).exp()
        difference = first - second + self.lambda_init
        pair = torch.stack((torch.ones_like(difference), -difference))[:, None].expand(2, 2)
        return torch.kron(torch.eye(self.num_heads // 2, device=pair.device, dtype=pair.dtype), pair)

    def finish(self, out: Tensor) -> Tensor:
        pairs = out.unflatten(1, (-1, 2)).transpose(2, 3)  # (B, H/2, N, 2, D)
        wide = pairs.flatten(3)
        normed = F.rms_norm(wide, wide.shape[-1:], self.weight.to(wide.dtype), eps=1e-5) * (1 - self.lambda_init)
        return normed.unflatten(3, pairs.shape[3:]).transpose(2, 3).flatten(1, 2)


# -- outputs -------------------------------------------------------------------------------------------------------------


@contract("gate")
class Gate(nn.Module):
    """Contract of what acts on the heads' outputs, built from `(config, size)`.

    x (B, N, E), outputs (B, H, N, D), values (B, H, M, D), the last N of the queries' own tokens -> (B, H, N, D).
    starts_plain: outputs stay as they are before training.
    """

    Config: ClassVar[type | None] = None
    starts_plain: bool = True

    def __init__(self, config: Any = None, size: HeadSize | None = None) -> None:
        super().__init__()


@register("gate", "head")
class HeadGate(Gate):
    """Output gate: each query scales the output of each head (Qiu et al. 2025, arXiv 2505.06708, headwise, after the values).

        O'_i(n) = 2 sigmoid(w_i x_n) O_i(n)

    weight w (H, E) starts at 0, where every gate is 1: plain attention.
    Differs from the paper: the factor 2, without which heads start at half of their output.
    """

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        self.weight = nn.Parameter(torch.zeros(size.num_heads, size.hidden_size))

    def forward(self, x: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
        gates = 2 * torch.sigmoid(F.linear(x, self.weight))  # (B, N, H)
        return outputs * gates.transpose(1, 2)[..., None].to(outputs.dtype)


@register("gate", "elementwise")
class ElementwiseGate(Gate):
    """Output gate: each query scales every number of each head's output (Qiu et al. 2025, elementwise, after the values).

        O'_i(n) = 2 sigmoid(W_i x_n) * O_i(n)

    weight W (H D, E) starts at 0, where every gate is 1: plain attention.  Differs from the paper as `HeadGate` does.
    """

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        self.weight = nn.Parameter(torch.zeros(size.num_heads * size.head_dim, size.hidden_size))

    def forward(self, x: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
        gates = 2 * torch.sigmoid(F.linear(x, self.weight))  # (B, N, H D)
        return outputs * gates.unflatten(-1, (outputs.shape[1], -1)).transpose(1, 2).to(outputs.dtype)


@register("gate", "exclusive")
class ExclusiveGate(Gate):
    """Exclusive self-attention: an output leaves out what lies along the token's own value (Zhai 2026, arXiv 2603.09078).

        O'_i(n) = O_i(n) - a_i (O_i(n) . v) v,      v = V_i(n) / ||V_i(n)||

    a_i is 1, or with `learned` a number `amount` (H,) that starts at 0, where it is plain attention.
    The paper was read in summaries and public code; `learned` is KellerJordan/modded-nanogpt pull request 264.
    """

    Config = ExclusiveOptions

    def __init__(self, config: ExclusiveOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.starts_plain = config.learned
        self.amount = nn.Parameter(torch.zeros(size.num_heads)) if config.learned else None

    def forward(self, x: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
        own = F.normalize(values[:, :, values.shape[2] - outputs.shape[2] :], dim=-1)
        along = (outputs * own).sum(-1, keepdim=True) * own
        return outputs - (along if self.amount is None else self.amount[:, None, None].to(along.dtype) * along)
