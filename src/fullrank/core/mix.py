"""Mixing: heads exchange attention weights after the normaliser (Mixhead §3.1).

A mixing *is* its matrix: (H, H), or (B, N, H, H) where it depends on the query. Column i makes head i: P'_i = sum_j m_ji P_j.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import registry
from .kinds import LearnedMixingOptions
from .registry import contract, register
from .section import Stage, stage_name, stage_options
from .stage import HeadSize


def mix_heads(weights: Tensor, matrix: Tensor | None) -> Tensor:
    """P'_i(n, m) = sum_j M_ji(n) P_j(n, m)  (Mixhead Eq. 12).

    weights (B, H, N, M), matrix (H, H) or (B, N, H, H), None for M = I -> (B, H, N, M).
    Raises ValueError if the matrix is of other heads, or of other queries.
    """
    if matrix is None:
        return weights
    heads, queries = weights.shape[1:3]
    if matrix.shape[-2:] != (heads, heads) or (matrix.dim() == 4 and matrix.shape[1] != queries):
        raise ValueError(
            f"a mixing of shape {tuple(matrix.shape)} does not fit weights (B, H, N, M) {tuple(weights.shape)}: it must be "
            "(H, H) or (B, N, H, H)"
        )
    equation = "bjnm,ji->binm" if matrix.dim() == 2 else "bjnm,bnji->binm"
    return torch.einsum(equation, weights, matrix.to(weights))


@contract("mix")
class Mixing(nn.Module):
    """Contract of a mixing, built from `(config, size)`; `config` is None for a mixing without a `Config` of its own.

    needs: ("query",) if the matrix depends on the query; otherwise no query has to be projected for it.
    starts_plain: the matrix is I before training, if no option says otherwise.
    no_weight_decay: decay would pull the matrix towards zero, not towards plain attention.
    """

    Config: ClassVar[type | None] = None
    needs: ClassVar[tuple[str, ...]] = ("query",)
    starts_plain: ClassVar[bool] = True
    no_weight_decay: ClassVar[bool] = True

    def matrix(self, query: Tensor | None) -> Tensor | None:
        """M as (H, H), or (B, N, H, H) where it depends on the query (B, H, N, D); None is M = I.

        The query is the projected one with its bias, before scale and rotation. Without a query, a matrix that depends on it
        is the part that all positions share.
        """
        raise NotImplementedError(f"{type(self).__name__} has no matrix(query)")

    @property
    def learned(self) -> bool:
        """The matrix has parameters, so that penalties can change it."""
        return next(self.parameters(), None) is not None

    def draw(self) -> None:
        """Draw anew what starts at random, from the CPU's random numbers: the same ones on every device."""


def starts_plain(stage: Stage) -> bool:
    """The mixing that `stage` names is the identity before training."""
    identity = stage_options(stage).get("start", "identity") == "identity"
    return identity and bool(registry.lookup("mix", stage_name(stage)).starts_plain)


def _normal(matrix: Tensor, std: float) -> None:
    """Fill a matrix with N(0, std^2)."""
    with torch.no_grad():
        matrix.copy_(torch.randn(matrix.shape, device="cpu") * std)


class LearnedMixing(Mixing):
    """`mixing` (H, H), a parameter that starts as `start` says (§3.2): as I, N(0, 1/H), or 1/H everywhere."""

    Config = LearnedMixingOptions

    def __init__(self, config: LearnedMixingOptions | None, size: HeadSize) -> None:
        super().__init__()
        self.begin(config, size.num_heads)

    def begin(self, config: LearnedMixingOptions | None, heads: int) -> None:
        """Make `mixing`."""
        self.start = "identity" if config is None else config.start
        self.mixing = nn.Parameter(
            torch.full((heads, heads), 1 / heads) if self.start == "uniform" else torch.eye(heads)
        )
        with torch.random.fork_rng(devices=[]):  # other parameters start as they do without mixing
            self.draw()

    def draw(self) -> None:
        if self.start == "random":
            _normal(self.mixing, len(self.mixing) ** -0.5)


@register("mix", "none")
class KeepHeads(Mixing):
    """Plain multi-head attention: every head keeps its own weights (M = I)."""

    needs = ()

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()

    def matrix(self, query: Tensor | None) -> None:
        return None


@register("mix", "position_independent")
class PositionIndependentMixing(LearnedMixing):
    """Mixhead A: one learned mixing for all positions (Mixhead §3.1, Eq. 12).

        P'_i = sum_j m_ji P_j

    `mixing` is (H, H).
    Starts at M = I: plain multi-head attention (§3.2), or as `start` says.  Rows need not sum to one and may be negative
    (§3.3).
    """

    needs = ()

    def matrix(self, query: Tensor | None) -> Tensor:
        return self.mixing


@register("mix", "position_wise")
class PositionWiseMixing(LearnedMixing):
    """Mixhead B: each query decides how the heads exchange attention (Mixhead §3.1, Eq. 12).

        P'_i(n) = sum_j m_ji(n) P_j(n)      with  m_ji(n) = sum_d Q_j(n)_d W_di + B_ji

    query (B, H, N, D) -> M (B, N, H, H).  `from_query` W is (D, H), `mixing` B is (H, H).
    Row j of M(n) reads the query of its own, the source, head j; W is shared by all heads.
    Starts at W = 0, B = I: plain multi-head attention (§3.2); B may start otherwise, as `start` says.  Rows need not sum to
    one and may be negative (§3.3).
    Differs from the released code: none of its other mixing types, and the query is unscaled in decoding too.
    """

    def __init__(self, config: LearnedMixingOptions | None, size: HeadSize) -> None:
        Mixing.__init__(self)
        self.from_query = nn.Parameter(torch.zeros(size.head_dim, size.num_heads))
        self.begin(config, size.num_heads)

    def matrix(self, query: Tensor | None) -> Tensor:
        """M(n), (B, N, H, H); without a query, B: the part that all positions share."""
        if query is None:
            return self.mixing
        # (B, N, H, D), which is how a projection lies in memory, times (D, H)
        return query.transpose(1, 2) @ self.from_query.to(query.dtype) + self.mixing.to(query.dtype)


@register("mix", "random")
class RandomMixing(Mixing):
    """Mixhead_rand: a fixed matrix with normally distributed entries, never trained (Mixhead §4.4.2, Table 7).

        P'_i = sum_j m_ji P_j      with  m_ji ~ N(0, 1/H)

    `mixing` (H, H) is a buffer. The paper gives no scale; this one keeps the size of the output of H heads with unrelated
    weights. The released code divides each column by its sum instead, which can be near zero.
    """

    needs = ()
    starts_plain = False

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()
        self.mixing: Tensor
        self.register_buffer("mixing", torch.empty(size.num_heads, size.num_heads))
        with torch.random.fork_rng(devices=[]):  # other parameters start as they do without mixing
            self.draw()

    def draw(self) -> None:
        _normal(self.mixing, len(self.mixing) ** -0.5)

    def matrix(self, query: Tensor | None) -> Tensor:
        return self.mixing


@register("mix", "average")
class AverageHeads(Mixing):
    """Avghead: every head uses the mean of all heads' weights, m_ji = 1/H (Mixhead §4.4.2, Table 7)."""

    needs = ()
    starts_plain = False

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads

    def matrix(self, query: Tensor | None) -> Tensor:
        size = (self.num_heads, self.num_heads)
        if query is None:  # 1/H exactly, whatever dtype the weights have
            return torch.full(size, 1 / self.num_heads, dtype=torch.float64, device="cpu")
        return query.new_full(size, 1 / self.num_heads)


# -- after the values ----------------------------------------------------------------------------------------------------


class HeadGate(nn.Module):
    """Output gate: each query scales the output of each head (Qiu et al. 2025, arXiv 2505.06708, headwise, after the values).

        O'_i(n) = 2 sigmoid(w_i x_n) O_i(n)

    x (B, N, E), heads (B, H, N, D) -> (B, H, N, D).  weight w (H, E) starts at 0, where every gate is 1: plain attention.
    Differs from the paper: the factor 2, without which heads start at half of their output.
    """

    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size.num_heads, size.hidden_size))

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        gates = 2 * torch.sigmoid(F.linear(x, self.weight))  # (B, N, H)
        return heads * gates.transpose(1, 2)[..., None].to(heads.dtype)
