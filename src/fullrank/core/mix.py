"""Mixing: heads exchange attention weights after the normaliser (Mixhead §3.1).

A mixing is built from `(config, size)`. It maps weights (B, H, N, M) and the projected query (B, H, N, D) - with its bias,
before scale and rotation - to mixed weights (B, H, N, M), and says with `matrix(query)` by which matrices:
(H, H), or (B, N, H, H) if they depend on the query. Column i makes head i: P'_i = sum_j m_ji P_j.
`needs` is ("query",) where the query is read; where it is (), and no score needs one, the query is None.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullrank.core.head_size import HeadSize
from fullrank.core.registry import register


def _check(weights: Tensor, num_heads: int) -> None:
    if weights.shape[1] != num_heads:
        raise ValueError(
            f"weights (B, H, N, M) have H = {weights.shape[1]} heads, the mixing was built for {num_heads}"
        )


@register("mix", "none")
class KeepHeads(nn.Module):
    """Plain multi-head attention: every head keeps its own weights (M = I)."""

    needs = ()

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()

    def forward(self, weights: Tensor, query: Tensor | None) -> Tensor:
        return weights

    def matrix(self, query: Tensor | None) -> None:
        return None


@register("mix", "position_independent")
class PositionIndependentMixing(nn.Module):
    """Mixhead A: one learned mixing for all positions (Mixhead §3.1, Eq. 12).

        P'_i = sum_j m_ji P_j

    weights (B, H, N, M) -> (B, H, N, M).  `mixing` is (H, H).
    Starts at M = I: plain multi-head attention (§3.2).  Rows need not sum to one and may be negative (§3.3).
    Raises ValueError if the weights have another number of heads.
    """

    needs = ()

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.eye(size.num_heads))

    def forward(self, weights: Tensor, query: Tensor | None) -> Tensor:
        _check(weights, self.mixing.shape[0])
        return torch.einsum("bjnm,ji->binm", weights, self.mixing.to(weights.dtype))

    def matrix(self, query: Tensor | None) -> Tensor:
        return self.mixing


@register("mix", "position_wise")
class PositionWiseMixing(nn.Module):
    """Mixhead B: each query decides how the heads exchange attention (Mixhead §3.1, Eq. 12).

        P'_i(n) = sum_j m_ji(n) P_j(n)      with  m_ji(n) = sum_d Q_j(n)_d W_di + B_ji

    weights (B, H, N, M), query (B, H, N, D) -> (B, H, N, M).  `from_query` W is (D, H), `mixing` B is (H, H).
    Row j of M(n) reads the query of its own, the source, head j; W is shared by all heads.
    Starts at W = 0, B = I: plain multi-head attention (§3.2).  Rows need not sum to one and may be negative (§3.3).
    Raises ValueError if query and weights disagree on H or N.
    Differs from the released code: none of its other mixing types, and the query is unscaled in decoding too.
    """

    needs = ("query",)

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()
        self.from_query = nn.Parameter(torch.zeros(size.head_dim, size.num_heads))
        self.mixing = nn.Parameter(torch.eye(size.num_heads))

    def forward(self, weights: Tensor, query: Tensor | None) -> Tensor:
        _check(weights, self.mixing.shape[0])
        if query is None or query.shape[1:3] != weights.shape[1:3]:
            given = None if query is None else tuple(query.shape)
            raise ValueError(f"query (B, H, N, D) {given} does not fit weights (B, H, N, M) {tuple(weights.shape)}")
        return torch.einsum("bjnm,bnji->binm", weights, self.matrix(query).to(weights.dtype))

    def matrix(self, query: Tensor | None) -> Tensor:
        """M(n), (B, N, H, H); without a query, B: the part that all positions share."""
        if query is None:
            return self.mixing
        # (B, N, H, D), which is how a projection lies in memory, times (D, H)
        return query.transpose(1, 2) @ self.from_query.to(query.dtype) + self.mixing.to(query.dtype)


@register("mix", "random")
class RandomMixing(nn.Module):
    """Mixhead_rand: a fixed matrix with normally distributed entries, never trained (Mixhead §4.4.2, Table 7).

        P'_i = sum_j m_ji P_j      with  m_ji ~ N(0, std^2)

    `mixing` (H, H) is a buffer. The paper gives no scale; `std` is 1/sqrt(H) by default, which keeps the size of the output
    of H heads with unrelated weights. The released code divides each column by its sum instead, which can be near zero.
    """

    needs = ()
    starts_plain = False

    @dataclass(frozen=True)
    class Config:
        std: float | None = None

        def __post_init__(self) -> None:
            if self.std is not None and not self.std > 0:
                raise ValueError(f"std: a positive number, given {self.std}")

    def __init__(self, config: Config, size: HeadSize) -> None:
        super().__init__()
        self.std = config.std or size.num_heads**-0.5
        self.mixing: Tensor
        self.register_buffer("mixing", torch.empty(size.num_heads, size.num_heads))
        with torch.random.fork_rng(devices=[]):  # other parameters start as they do without mixing
            self.draw()

    def draw(self) -> None:
        """Fill the matrix anew, from the CPU's random numbers: the same ones on every device."""
        with torch.no_grad():
            self.mixing.copy_(torch.randn(self.mixing.shape, device="cpu") * self.std)

    def forward(self, weights: Tensor, query: Tensor | None) -> Tensor:
        _check(weights, self.mixing.shape[0])
        return torch.einsum("bjnm,ji->binm", weights, self.mixing.to(weights.dtype))

    def matrix(self, query: Tensor | None) -> Tensor:
        return self.mixing


@register("mix", "average")
class AverageHeads(nn.Module):
    """Avghead: every head uses the mean of all heads' weights, m_ji = 1/H (Mixhead §4.4.2, Table 7)."""

    needs = ()
    starts_plain = False

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads

    def forward(self, weights: Tensor, query: Tensor | None) -> Tensor:
        return weights.mean(dim=1, keepdim=True).expand_as(weights)

    def matrix(self, query: Tensor | None) -> Tensor | None:
        return None if query is None else query.new_full((self.num_heads, self.num_heads), 1 / self.num_heads)
