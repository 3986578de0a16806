"""Mixers of heads beside those of Mixhead, one class each: of queries, keys and values, of scores, of weights, of outputs.

mix_qkv     Q', K', V' = mix_qkv(Q, K, V) before norms, rotation and cache
mix_scores  S' = mix_scores(S)            before the mask and the softmax; the definition computes it
mix         P' = mix(P)                   weights; a matrix runs in every kernel (`core/stages.py`)
gate        O' = gate(x, O, V)            after the values
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .draws import draw_apart
from .embedding import Rotary
from .kinds import (
    DynamicOptions,
    ExclusiveOptions,
    InterleavedOptions,
    KnockingOptions,
    LowRankMixingOptions,
    MultiTokenOptions,
)
from .layout import Layout
from .registry import contract, register
from .stages import Heads, HeadSize, Mixing, PositionIndependentMixing, ProjectedMixing, mix_heads

register("mix_scores", "none")(None)
register("gate", "none")(None)


def draw_for(layer: int, parameter: Tensor, std: float) -> None:
    """Start a parameter N(0, std^2), otherwise in every layer, and leave all numbers that are drawn later as they are."""
    with torch.no_grad(), draw_apart():
        for _ in range(layer + 1):
            numbers = torch.randn(parameter.shape, device="cpu")
        parameter.copy_(numbers * std)


# -- projections ---------------------------------------------------------------------------------------------------------


@register("mix_qkv", "knocking")
class KnockingHeads(ProjectedMixing):
    """Knocking heads: a map of D dimensions that all heads share (Zhou et al. 2025, arXiv 2510.23052, §3.2, Eq. 5 to 9).

        mlp:     V'_i = 2 (V_i W_up * sigmoid(V_i W_gate)) W_down
        linear:  Q'_i = Q_i T_Q,   K'_i = K_i T_K,   V'_i = V_i T_V        which folds into W_Q, W_K and W_V

    `maps` (3, D, D) are W_up, W_gate, W_down, or T_Q, T_K, T_V; what a score does not read is not mapped.
    Starts at I, with W_gate = 0 (§3.3): plain attention.
    """

    Config = KnockingOptions

    def __init__(self, config: KnockingOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.linear = config.form == "linear"
        self.num_heads = size.num_heads
        self.shared_heads = size.num_heads // size.groups
        maps = torch.eye(size.head_dim).repeat(3, 1, 1)
        if not self.linear:
            maps[1] = 0
        self.maps = nn.Parameter(maps)

    def map_query(self, query: Tensor) -> Tensor:
        if not self.linear:
            return query
        return query @ self.maps[0].to(query.dtype)

    def map_key(self, key: Tensor) -> Tensor:
        if not self.linear:
            return key
        return key @ self.maps[1].to(key.dtype)

    def map_value(self, value: Tensor) -> Tensor:
        up, gate, down = self.maps.to(value.dtype)
        if self.linear:
            return value @ down
        raised = value @ up
        gates = 2 * torch.sigmoid(value @ gate)
        return (raised * gates) @ down

    def multiply_adds(self) -> tuple[int, int]:
        of_map = self.maps[0].numel()
        if self.linear:
            return self.num_heads * of_map, 2 * self.shared_heads * of_map
        return 0, 3 * self.shared_heads * of_map


@register("mix_qkv", "interleaved")
class InterleavedHeads(ProjectedMixing):
    """Interleaved heads: P tokens at each position, combined of all heads (Duvvuri et al. 2026, arXiv 2602.21371, §4).

        Q~_ip(n) = sum_j a^Q_jip Q_j(n),  K~ and V~ likewise         at the virtual position n P + p
        O~_i = softmax(Q~_i K~_i^T / sqrt(D)) V~_i                   over the N P tokens, causal among them, too
        O_i(n) = sum_jp r_ijp O~_jp(n)

    `mixing` a (3, H, H, P), `collapsing` r (H, H, P). Rotary positions and windows count virtual tokens. A cache holds
    P keys and values a token. Starts at a_jip = [j = i] and r that takes the last token of each head, which sees what plain
    attention sees; plain attention at P = 1, where all of this folds into W_Q, W_K, W_V and W_O. The paper gives no start.
    A trace has the weights of virtual tokens.
    """

    Config = InterleavedOptions

    def __init__(self, config: InterleavedOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.pseudo_heads, self.head_dim = config.pseudo_heads, size.head_dim
        self.starts_plain = config.pseudo_heads == 1
        own_head = torch.eye(size.num_heads)[..., None]
        identities = own_head.expand(3, -1, -1, self.pseudo_heads)
        self.mixing = nn.Parameter(identities.clone())
        last_token = identities[0].clone()
        last_token[..., :-1] = 0
        self.collapsing = nn.Parameter(last_token)

    def map_query(self, query: Tensor) -> Tensor:
        return self._combine(0, query)

    def map_key(self, key: Tensor) -> Tensor:
        return self._combine(1, key)

    def map_value(self, value: Tensor) -> Tensor:
        return self._combine(2, value)

    def _combine(self, which: int, heads: Tensor) -> Tensor:
        mixing = self.mixing[which].to(heads.dtype)
        return torch.einsum("bjnd,jip->binpd", heads, mixing)

    def rotate(self, heads: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
        tokens = heads.flatten(2, 3)
        rotated = rotary(tokens, self._place(positions))
        return rotated.unflatten(2, (-1, self.pseudo_heads))

    def _place(self, positions: Tensor) -> Tensor:
        """Virtual positions (N P,) or (B, N P) of positions (N,) or (B, N)."""
        first = positions[..., None] * self.pseudo_heads
        within = torch.arange(self.pseudo_heads, device=positions.device)
        return (first + within).flatten(-2)

    def expand(self, heads: Heads, layout: Layout) -> tuple[Heads, Layout]:
        tokens = Heads(
            self._lay_side_by_side(heads.query),
            self._lay_side_by_side(heads.scored),
            self._lay_side_by_side(heads.keys),
            self._lay_side_by_side(heads.values),
        )
        return tokens, self._expand_layout(layout)

    def _lay_side_by_side(self, heads: Tensor | None) -> Any:
        """(B, H, N, P D) or (B, H, N, P, D) -> (B, H, N P, D)."""
        if heads is None:
            return None
        tokens = heads.flatten(3).unflatten(3, (self.pseudo_heads, -1))
        return tokens.flatten(2, 3)

    def _expand_layout(self, layout: Layout) -> Layout:
        count = self.pseudo_heads
        changes: dict[str, Any] = {
            "query_positions": self._place(layout.query_positions),
            "key_positions": self._place(layout.key_positions),
        }
        if layout.key_mask is not None:
            changes["key_mask"] = layout.key_mask.repeat_interleave(count, dim=1)
        if layout.documents is not None:
            changes["documents"] = layout.documents.repeat_interleave(count, dim=1)
        if layout.runs is not None:
            runs = [(start * count, size * count) for start, size in layout.runs]
            changes["runs"] = tuple(runs)
        if layout.window is not None:
            changes["window"] = layout.window * count
        if layout.farthest is not None:
            changes["farthest"] = layout.farthest * count + count - 1
        return replace(layout, **changes)

    def collapse(self, out: Tensor) -> Tensor:
        tokens = out.unflatten(2, (-1, self.pseudo_heads))
        collapsing = self.collapsing.to(out.dtype)
        return torch.einsum("bjnpd,ijp->bind", tokens, collapsing)

    def multiply_adds(self) -> tuple[int, int]:
        of_heads = self.collapsing.numel() * self.head_dim
        return 2 * of_heads, 2 * of_heads


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

    def mix(self, score: Callable[[Heads, Layout], Tensor], heads: Heads, layout: Layout) -> Tensor:
        """Mixed scores of a call; `score` gives those of any queries."""
        mixed: Tensor = self(score(heads, layout), heads, layout)
        return mixed

    def remember(self, x: Tensor, scored: Tensor | None) -> Tensor | None:
        """Notes of each token (B, C, N, F), made of inputs x (B, N, E) and queries, which stand in `Heads.notes[0]`."""
        return None

    def draw(self) -> None:
        """Draw anew what starts at random, from the CPU's random numbers."""

    def multiply_adds(self, keys: float) -> float:
        """Multiply-adds of a query that sees so many keys."""
        return 0.0


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

    def multiply_adds(self, keys: float) -> float:
        return self.mixing.numel() * keys


@register("mix_scores", "multi_token")
class MultiTokenScores(ScoreMixing):
    """Multi-token attention: a convolution of scores over queries and keys (Golovneva et al. 2025, arXiv 2504.00927, §3.1).

        S'_i(n, m) = sum_a sum_b w_i(a, b) S_i(n - a, m + b)       a from 0 to Q - 1, b from -(C - 1) / 2 to (C - 1) / 2

    Scores of keys that query n - a does not see are 0, so nothing later than n is read; the mask follows once more. `kernel`
    w (H, Q, C), its last row is a = 0. Queries are kept in a cache, so that decoding is exact.
    Starts as the identity: plain attention.  Differs from the released code: padding is hidden as later keys are. Its
    convolution over heads is `mix: talking_heads`, its norm that of `mix: differential`.
    """

    Config = MultiTokenOptions

    def __init__(self, config: MultiTokenOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        kernel = torch.zeros(size.num_heads, config.queries, config.keys)
        kernel[:, -1, config.keys // 2] = 1
        self.kernel = nn.Parameter(kernel)

    def remember(self, x: Tensor, scored: Tensor | None) -> Tensor | None:
        return scored

    def mix(self, score: Callable[[Heads, Layout], Tensor], heads: Heads, layout: Layout) -> Tensor:
        queries = heads.notes[0] if heads.notes else heads.scored
        assert queries is not None
        known = queries.shape[2]
        covered = self.kernel.shape[1] - 1
        earlier = min(covered, known - layout.shape[0])
        if earlier > 0:
            first = known - layout.shape[0] - earlier
            layout = replace(layout, query_positions=layout.key_positions[..., first:])
            heads = replace(heads, scored=queries[:, :, first:])
        scores = score(heads, layout)
        mixed: Tensor = self(scores, heads, layout)
        return mixed[:, :, earlier:]

    def forward(self, scores: Tensor, heads: Heads, layout: Layout) -> Tensor:
        seen = layout.visible()
        if layout.key_mask is not None:  # queries are the last of the keys' tokens
            queries = layout.key_mask[:, layout.key_mask.shape[1] - scores.shape[2] :]
            seen = seen & layout.key_mask[:, None, None] & queries[:, None, :, None]
        count, rows, columns = self.kernel.shape
        beside = columns // 2
        known = scores.masked_fill(~seen, 0)
        padded = F.pad(known, (beside, beside, rows - 1, 0))
        kernel = self.kernel[:, None].to(scores.dtype)
        return F.conv2d(padded, kernel, groups=count)

    def multiply_adds(self, keys: float) -> float:
        return self.kernel.numel() * keys


class Composition(nn.Module):
    """The generator of dynamically composable heads (Xiao et al. 2024, arXiv 2405.08553, §3; Caiyun-AI/DCFormer).

        w_1, w_2 = GELU(x W) (U_1, U_2),   w_1 normed by its root mean square over heads,   d = tanh(x W_d)
        A'_i = A_i + sum_r w_2ri (sum_j w_1rj A_j) + d_i A_i        with w and d of the query's token, and of the key's

    x (B, N, E) -> notes (B, 1, N, F) with w_1, w_2 (S, R, H) and d (S, H); S is 2, or 1 for the query alone.
    `hidden` W (E, S, K), `first` U_1 and `second` U_2 (S, K, R, H), `diagonal` W_d (E, S, H). W starts N(0, 1/E), U_1
    N(0, 1/K), U_2 = W_d = 0: plain attention.  Differs from the released code: this start, and one group of heads.
    """

    def __init__(self, config: DynamicOptions, size: HeadSize) -> None:
        super().__init__()
        heads, width, parts = size.num_heads, size.hidden_size, 1 + config.keys
        inner = config.hidden or 4 * heads
        self.layer, self.shape = size.layer, (parts, config.rank, heads)
        self.hidden = nn.Parameter(torch.empty(width, parts, inner))
        self.first = nn.Parameter(torch.empty(parts, inner, config.rank, heads))
        self.second = nn.Parameter(torch.zeros(parts, inner, config.rank, heads))
        self.diagonal = nn.Parameter(torch.zeros(width, parts, heads))
        self.draw()

    def draw(self) -> None:
        draw_for(self.layer, self.hidden, len(self.hidden) ** -0.5)
        draw_for(self.layer, self.first, self.first.shape[1] ** -0.5)

    def make_notes(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        projected = torch.einsum("bne,esk->bnsk", x, self.hidden.to(dtype))
        hidden = F.gelu(projected)
        first = torch.einsum("bnsk,skrh->bnsrh", hidden, self.first.to(dtype))
        second = torch.einsum("bnsk,skrh->bnsrh", hidden, self.second.to(dtype))
        first = F.rms_norm(first, first.shape[-1:], eps=1e-6)
        diagonal = torch.einsum("bne,esh->bnsh", x, self.diagonal.to(dtype))
        parts = (first, second, torch.tanh(diagonal))
        flat = [part.flatten(2) for part in parts]
        return torch.cat(flat, dim=-1)[:, None]

    def read(self, notes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w_1, w_2 (B, N, S, R, H) and d (B, N, S, H) of notes."""
        parts, rank, heads = self.shape
        products = parts * rank * heads
        first, second, diagonal = notes[:, 0].split((products, products, parts * heads), dim=-1)
        return (
            first.unflatten(2, self.shape),
            second.unflatten(2, self.shape),
            diagonal.unflatten(2, (parts, heads)),
        )

    def matrix(self, notes: Tensor) -> Tensor:
        """The query's part as M (B, N, H, H), with the identity."""
        first, second, diagonal = (part[:, :, 0] for part in self.read(notes))
        identity = torch.eye(self.shape[2], device=notes.device, dtype=notes.dtype)
        product = torch.einsum("bnrj,bnri->bnji", first, second)
        return identity + torch.diag_embed(diagonal) + product

    def compose(self, maps: Tensor, notes: Tensor) -> Tensor:
        """Maps (B, H, N, M) of the last N of M tokens."""
        of_queries = notes[:, :, notes.shape[2] - maps.shape[2] :]
        composed = mix_heads(maps, self.matrix(of_queries))
        if self.shape[0] == 1:
            return composed
        first, second, diagonal = (part[:, :, 1].to(maps.dtype) for part in self.read(notes))
        together = torch.einsum("bjnm,bmrj->brnm", maps, first)
        composed = composed + torch.einsum("brnm,bmri->binm", together, second)
        by_key = diagonal.transpose(1, 2)[:, :, None]  # (B, H, 1, M)
        return composed + maps * by_key

    def multiply_adds(self, keys: float) -> float:
        """Multiply-adds of a token's notes and matrix, and of its maps over so many keys."""
        parts, rank, heads = self.shape
        of_notes = sum(parameter.numel() for parameter in self.parameters())
        of_matrix = rank * heads**2
        of_key = heads**2 + (parts - 1) * 2 * rank * heads
        return of_notes + of_matrix + of_key * keys


@register("mix_scores", "dynamic")
class DynamicScores(ScoreMixing):
    """Dynamically composed scores, before the softmax (Xiao et al. 2024, arXiv 2405.08553): see `Composition`."""

    Config = DynamicOptions

    def __init__(self, config: DynamicOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.composition = Composition(config, size)

    def draw(self) -> None:
        self.composition.draw()

    def remember(self, x: Tensor, scored: Tensor | None) -> Tensor:
        return self.composition.make_notes(x)

    def forward(self, scores: Tensor, heads: Heads, layout: Layout) -> Tensor:
        notes = heads.notes[0]
        assert notes is not None
        return self.composition.compose(scores, notes)

    def multiply_adds(self, keys: float) -> float:
        return self.composition.multiply_adds(keys)


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
    """

    needs = ()
    starts_plain = False
    injectable = False

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        self.num_heads, self.layer = size.num_heads, size.layer
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * size.layer)
        self.vectors = nn.Parameter(torch.empty(4, size.head_dim))
        self.weight = nn.Parameter(torch.ones(2 * size.head_dim))
        self.draw()

    def draw(self) -> None:
        draw_for(self.layer, self.vectors, 0.1)

    def matrix(self, query: Tensor | None) -> Tensor:
        products = self.vectors[0::2] * self.vectors[1::2]
        first, second = products.sum(-1).exp()
        difference = first - second + self.lambda_init
        column = torch.stack((torch.ones_like(difference), -difference))
        pair = column[:, None].expand(2, 2)
        pairs = torch.eye(self.num_heads // 2, device=pair.device, dtype=pair.dtype)
        return torch.kron(pairs, pair)

    def finish(self, out: Tensor) -> Tensor:
        pairs = out.unflatten(1, (-1, 2)).transpose(2, 3)  # (B, H/2, N, 2, D)
        wide = pairs.flatten(3)
        weight = self.weight.to(wide.dtype)
        normed = F.rms_norm(wide, wide.shape[-1:], weight, eps=1e-5)
        scaled = normed * (1 - self.lambda_init)
        heads = scaled.unflatten(3, pairs.shape[3:]).transpose(2, 3)
        return heads.flatten(1, 2)


@register("mix", "dynamic")
class DynamicMixing(Mixing):
    """Dynamically composed weights, after the softmax (Xiao et al. 2024, arXiv 2405.08553): see `Composition`.

    With `keys: false` it is a matrix M(n) of the query's token, which every kernel computes; the key's part is none.
    """

    Config = DynamicOptions
    needs = ()
    injectable = False

    def __init__(self, config: DynamicOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.composition = Composition(config, size)
        self.reason = "no engine mixes weights by tokens of keys" if config.keys else None

    def draw(self) -> None:
        self.composition.draw()

    def remember(self, x: Tensor, scored: Tensor | None) -> Tensor:
        return self.composition.make_notes(x)

    def matrix(self, query: Tensor | None) -> None:
        return None

    def compute_matrix(self, heads: Heads) -> Tensor | None:
        notes = heads.notes[1]
        if self.reason is not None or notes is None:
            return None
        queries = notes if heads.scored is None else heads.scored
        of_queries = notes[:, :, notes.shape[2] - queries.shape[2] :]
        return self.composition.matrix(of_queries)

    def mix_weights(self, weights: Tensor, matrix: Tensor | None, heads: Heads) -> Tensor:
        if matrix is not None:
            return mix_heads(weights, matrix)
        notes = heads.notes[1]
        assert notes is not None
        return self.composition.compose(weights, notes)

    def multiply_adds(self, keys: float) -> float:
        return self.composition.multiply_adds(keys)


# -- outputs -------------------------------------------------------------------------------------------------------------


@contract("gate")
class Gate(nn.Module):
    """Contract of what acts on the heads' outputs, built from `(config, size)`.

    x (B, N, E), outputs (B, H, N, D), values (B, H, M, D), the last N of the queries' own tokens -> (B, H, N, D).
    starts_plain: outputs stay as they are before training. shares: heads that become one, H / shares are merged.
    """

    Config: ClassVar[type | None] = None
    starts_plain: bool = True
    shares: ClassVar[int] = 1

    def __init__(self, config: Any = None, size: HeadSize | None = None) -> None:
        super().__init__()

    def multiply_adds(self) -> int:
        """Multiply-adds of a token: the numbers of all matrices."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)


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
        of_heads = gates.unflatten(-1, (outputs.shape[1], -1))
        return outputs * of_heads.transpose(1, 2).to(outputs.dtype)


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
        first = values.shape[2] - outputs.shape[2]
        own = F.normalize(values[:, :, first:], dim=-1)
        share = (outputs * own).sum(-1, keepdim=True)
        if self.amount is not None:
            share = share * self.amount[:, None, None].to(share.dtype)
        return outputs - share * own


@register("gate", "differential")
class DifferentialGate(Gate):
    """Differential attention V2: each token subtracts the output of every second head (Microsoft, January 2026;
    microsoft/unilm Diff-Transformer-V2).

        O'_i(n) = O_2i(n) - sigmoid(w_i x_n) O_2i+1(n)

    Both heads of a pair share keys and values, so that it is a difference of maps: 2 H heads of queries, H or fewer of keys and
    values (`model.num_key_value_heads`), H outputs. weight w (H, E) starts at 0, where lambda is 1/2; the released layer starts
    as `nn.Linear` does. Not plain attention at the start. An even number of query heads reads each key head.
    """

    starts_plain = False
    shares = 2

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        self.weight = nn.Parameter(torch.zeros(size.num_heads // 2, size.hidden_size))

    def forward(self, x: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
        shares = torch.sigmoid(F.linear(x, self.weight))  # (B, N, H)
        of_heads = shares.transpose(1, 2)[..., None]
        subtracted = outputs[:, 1::2] * of_heads.to(outputs.dtype)
        return outputs[:, 0::2] - subtracted
