"""Mixers of the heads' maps beside Mixhead A and B, one class each.

mix_scores  S' = mix_scores(S)            before the mask and the softmax; matrices and a convolution run in C++
mix         P' = mix(P)                   weights; a matrix runs in every kernel (`core/stages.py`)

Mixers of queries, keys, values and outputs stand in `core/vector_mixers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .draws import draw_apart
from .kinds import DynamicOptions, LowRankMixingOptions, MultiTokenOptions
from .layout import Layout
from .registry import register
from .stages import Heads, HeadSize, Matrices, Mixing, fill_with_normal, multiply


def draw_for(layer: int, parameter: Tensor, std: float) -> None:
    """Start a parameter N(0, std^2), with other numbers in every layer.

    All numbers that are drawn later stay as they are.

    Args:
        layer: number of the layer, from 0.
        parameter: tensor of any shape and device, which is filled.
        std: standard deviation.
    """
    with draw_apart():
        for _ in range(layer + 1):
            fill_with_normal(parameter, std)


@register("mix_scores", "multi_token")
class MultiTokenScores(Mixing):
    """Multi-token attention: a convolution of scores over queries and keys (Golovneva et al. 2025, arXiv 2504.00927, §3.1).

        S'_i(n, m) = sum_a sum_b w_i(a, b) S_i(n - a, m + b)       a from 0 to Q - 1, b from -(C - 1) / 2 to (C - 1) / 2

    Scores of keys that query n - a does not see are 0, so nothing later than n is read; the mask follows once more. `kernel`
    w (H, Q, C), its last row is a = 0. Scores of Q - 1 earlier queries are read, too, as far as there are any: a cache keeps
    queries, so that decoding is exact.
    Starts as the identity: plain attention.  Differs from the released code: padding is hidden as later keys are. Its
    convolution over heads is `mix: talking_heads`, its norm that of `mix: differential`.
    """

    Config = MultiTokenOptions

    def __init__(self, config: MultiTokenOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        kernel = torch.zeros(size.num_heads, config.queries, config.keys)
        middle = config.keys // 2
        kernel[:, -1, middle] = 1
        self.kernel = nn.Parameter(kernel)

    def remember(self, x: Tensor, scored: Tensor | None) -> Tensor | None:
        return scored

    def matrix(self, query: Tensor | None) -> None:
        return None

    @property
    def convolution(self) -> Tensor:
        return self.kernel

    def mix_scores(
        self, score: Callable[[Heads, Layout], Tensor], heads: Heads, layout: Layout, matrices: Matrices
    ) -> Tensor:
        queries, _ = heads.notes
        assert queries is not None
        num_heads, rows, columns = self.kernel.shape
        count, num_keys = layout.shape
        num_read = min(num_keys, count + rows - 1)
        first = num_keys - num_read
        heads = replace(heads, scored=queries[:, :, first:])
        positions = layout.key_positions[..., first:]
        layout = replace(layout, query_positions=positions)
        seen = layout.visible()
        if layout.tokens is not None:  # nor does padding see anything
            seen = seen & layout.tokens[:, None, first:, None]
        scores = score(heads, layout)
        visible = scores.masked_fill(~seen, 0)
        beside = columns // 2
        border = (beside, beside, rows - 1, 0)
        padded = F.pad(visible, border)
        kernel = self.kernel.to(visible.dtype)
        mixed = F.conv2d(padded, kernel[:, None], groups=num_heads)
        return mixed.narrow(2, -count, count)

    def multiply_adds(self, keys: float) -> float:
        return self.kernel.numel() * keys


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
        super().__init__(config, size)
        heads = size.num_heads
        self.mixing = nn.Buffer(torch.empty(heads, heads))
        with torch.random.fork_rng(devices=[]):  # other parameters start as they do without mixing
            self.draw()

    def draw(self) -> None:
        fill_with_normal(self.mixing, len(self.mixing) ** -0.5)

    def matrix(self, query: Tensor | None) -> Tensor:
        return self.mixing


@register("mix", "average")
class AverageHeads(Mixing):
    """Avghead: every head uses the mean of all heads' weights, m_ji = 1/H (Mixhead §4.4.2, Table 7)."""

    needs = ()
    starts_plain = False

    def matrix(self, query: Tensor | None) -> Tensor:
        heads = self.size.num_heads
        shape = (heads, heads)
        if query is None:  # 1/H exactly, whatever dtype the weights have
            return torch.full(shape, 1 / heads, dtype=torch.float64, device="cpu")
        return query.new_full(shape, 1 / heads)


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
        shape = (size.num_heads, config.rank)
        self.left = nn.Parameter(torch.empty(shape))
        self.right = nn.Parameter(torch.zeros(shape))
        self.draw()

    def draw(self) -> None:
        rank = self.left.shape[1]
        draw_for(self.size.layer, self.left, rank**-0.5)

    def matrix(self, query: Tensor | None) -> Tensor:
        product = self.left @ self.right.mT
        identity = torch.eye(len(product)).to(product)
        return identity + product


@register("mix", "differential")
class DifferentialMixing(Mixing):
    """Differential attention V1: the difference of two maps (Ye et al. 2024, arXiv 2410.05258, §2.1, Eq. 1 to 3).

        P'_2i = P'_2i+1 = P_2i - lambda P_2i+1
        lambda = exp(q_1 . k_1) - exp(q_2 . k_2) + lambda_init,      lambda_init = 0.8 - 0.6 exp(-0.3 l)
        [O'_2i, O'_2i+1] = (1 - lambda_init) RMSNorm([O_2i, O_2i+1])

    A pair of our heads is a head of the paper, whose values are twice as wide; l is the layer, from 0. The difference is a
    matrix (H, H) of mixed heads, so every kernel computes it. `vectors` q_1, k_1, q_2, k_2 (4, D) start N(0, 0.1^2), the
    weight (2 D) of the norm, which the pairs share, starts at 1. Not plain attention at the start.
    """

    needs = ()
    starts_plain = False
    injectable = False

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        self.pairs = size.num_heads // 2
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * size.layer)
        self.vectors = nn.Parameter(torch.empty(4, size.head_dim))
        self.weight = nn.Parameter(torch.ones(2 * size.head_dim))
        self.draw()

    def draw(self) -> None:
        draw_for(self.size.layer, self.vectors, 0.1)

    def matrix(self, query: Tensor | None) -> Tensor:
        q_1, k_1, q_2, k_2 = self.vectors
        first = (q_1 * k_1).sum().exp()
        second = (q_2 * k_2).sum().exp()
        share = first - second + self.lambda_init
        ones = torch.ones_like(share)
        column = torch.stack((ones, -share))
        pair = column[:, None].expand(2, 2)
        return torch.block_diag(*[pair] * self.pairs)

    def finish(self, out: Tensor) -> Tensor:
        pairs = out.unflatten(1, (self.pairs, 2))
        wide = pairs.transpose(2, 3).flatten(3)  # (B, H/2, N, 2 D)
        weight = self.weight.to(wide.dtype)
        normed = F.rms_norm(wide, weight.shape, weight, eps=1e-5)
        scaled = normed * (1 - self.lambda_init)
        heads = scaled.unflatten(3, (2, -1))
        return heads.transpose(2, 3).flatten(1, 2)


@register("mix_scores", "dynamic")
@register("mix", "dynamic")
class DynamicMixing(Mixing):
    """Dynamically composable heads, of scores or weights (Xiao et al. 2024, arXiv 2405.08553, §3; Caiyun-AI/DCFormer).

        w_1, w_2 = GELU(x W) (U_1, U_2),   w_1 normed by its root mean square over heads,   d = tanh(x W_d)
        A'_i = A_i + sum_r w_2ri (sum_j w_1rj A_j) + d_i A_i        with w and d of the query's token, and of the key's

    It is a matrix M(n) of the query's token, and one K(m) of the key's, which with `keys: false` is none.
    x (B, N, E) -> notes (B, 1, N, F) with w_1, w_2 (S, R, H) and d (S, H); S is 2, or 1 for the query alone.
    `hidden` W (E, S, K), `first` U_1 and `second` U_2 (S, K, R, H), `diagonal` W_d (E, S, H). W starts N(0, 1/E), U_1
    N(0, 1/K), U_2 = W_d = 0: plain attention.  Differs from the released code: this start, and one group of heads.
    """

    Config = DynamicOptions
    needs = ()
    injectable = False

    def __init__(self, config: DynamicOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        heads = size.num_heads
        width = size.hidden_size
        parts = 2 if config.keys else 1
        self.shape = (parts, config.rank, heads)
        inner = config.hidden or 4 * heads
        self.composition = nn.ParameterDict()
        self.composition["hidden"] = torch.empty(width, parts, inner)
        shape_of_maps = (parts, inner, config.rank, heads)
        self.composition["first"] = torch.empty(shape_of_maps)
        self.composition["second"] = torch.zeros(shape_of_maps)
        self.composition["diagonal"] = torch.zeros(width, parts, heads)
        self.draw()

    def draw(self) -> None:
        hidden, first, *_ = self.composition.values()
        width, _, inner = hidden.shape
        draw_for(self.size.layer, hidden, width**-0.5)
        draw_for(self.size.layer, first, inner**-0.5)

    def remember(self, x: Tensor, scored: Tensor | None) -> Tensor:
        to_hidden, to_first, to_second, to_diagonal = self.composition.values()
        hidden = F.gelu(multiply("bne,esk->bnsk", x, to_hidden))
        first = multiply("bnsk,skrh->bnsrh", hidden, to_first)
        heads = first.shape[-1:]
        normed = F.rms_norm(first, heads, eps=1e-6)
        second = multiply("bnsk,skrh->bnsrh", hidden, to_second)
        diagonal = torch.tanh(multiply("bne,esh->bnsh", x, to_diagonal))
        last = diagonal[..., None, :]
        rows = torch.cat((normed, second, last), dim=3)  # (B, N, S, 2 R + 1, H)
        notes = rows.flatten(2)
        return notes[:, None]

    def matrix(self, query: Tensor | None) -> None:
        return None

    def compute_matrices(self, heads: Heads, notes: Tensor | None, layout: Layout) -> Matrices:
        assert notes is not None
        count = layout.shape[0]
        query_notes = notes.narrow(2, -count, count)
        matrix = self.compute_matrix(query_notes, 0)
        identity = torch.eye(self.size.num_heads).to(matrix)
        key_matrices = self.compute_matrix(notes, 1) if self.shape[0] == 2 else None
        return Matrices(matrix + identity, key_matrices)

    def compute_matrix(self, notes: Tensor, part: int) -> Tensor:
        """Compute sum_r w_1rj w_2ri + [i = j] d_i of one of the S parts, (B, N, H, H)."""
        parts, rank, heads = self.shape
        by_token = notes[:, 0]
        by_part = by_token.unflatten(2, (parts, -1, heads))
        rows = by_part[:, :, part]
        first, second, diagonal = rows.split((rank, rank, 1), dim=2)
        product = torch.einsum("bnrj,bnri->bnji", first, second)
        return product + torch.diag_embed(diagonal[:, :, 0])

    def multiply_adds(self, keys: float) -> float:
        parts, rank, heads = self.shape
        cost_of_notes = sum(parameter.numel() for parameter in self.parameters())
        return cost_of_notes + parts * heads**2 * (rank + keys)
