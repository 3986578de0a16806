"""Mixers of the heads' vectors, one class each: of queries, keys and values, and of outputs.

mix_qkv     Q', K', V' = mix_qkv(Q, K, V) before norms, rotation and cache
gate        O' = gate(x, O, V)            after the values

Mixers of scores and weights stand in `core/mixers.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .embedding import Rotary, linear
from .kinds import ExclusiveOptions, InterleavedOptions, KnockingOptions
from .layout import Layout
from .registry import register
from .stages import VALUE, Gate, Heads, HeadSize, ProjectedMixing, make_identity, multiply

# -- queries, keys and values --------------------------------------------------------------------------------------------


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
        maps = make_identity(size.head_dim).repeat(3, 1, 1)
        if not self.linear:
            maps[1] = 0
        self.maps = nn.Parameter(maps)

    def map_heads(self, heads: Tensor, part: int) -> Tensor:
        if self.linear:
            return self._map(heads, part)
        if part != VALUE:
            return heads
        raised = self._map(heads, 0)
        gates = torch.sigmoid(self._map(heads, 1))
        return self._map(2 * raised * gates, 2)

    def _map(self, heads: Tensor, number: int) -> Tensor:
        matrix = self.maps[number]
        return heads @ matrix.to(heads.dtype)

    def multiply_adds(self) -> tuple[int, int]:
        query_cost = self.size.num_heads * self.maps[0].numel()
        key_cost = query_cost // self.size.groups
        if self.linear:
            return query_cost, 2 * key_cost
        return 0, 3 * key_cost


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
        self.pseudo_heads = config.pseudo_heads
        identity = make_identity(size.num_heads)
        single = identity[..., None]
        mixing = single.repeat(3, 1, 1, config.pseudo_heads)
        collapsing = mixing[0].clone()
        collapsing[..., :-1] = 0
        self.mixing = nn.Parameter(mixing)
        self.collapsing = nn.Parameter(collapsing)

    def map_heads(self, heads: Tensor, part: int) -> Tensor:
        return multiply("bjnd,jip->binpd", heads, self.mixing[part])

    def rotate(self, heads: Tensor, rotary: Rotary, positions: Tensor, layout: Layout) -> Tensor:
        first = positions.shape[-1] - heads.shape[2]
        positions = positions[..., first:]
        tokens = heads.flatten(2, 3)
        rotated = rotary(tokens, self._place(positions))
        return rotated.view_as(heads)

    def _place(self, positions: Tensor) -> Tensor:
        """Compute virtual positions (N P,) or (B, N P) of positions (N,) or (B, N)."""
        count = self.pseudo_heads
        first = positions[..., None] * count
        within = torch.arange(count, device=positions.device)
        return (first + within).flatten(-2)

    def expand(self, heads: Heads, layout: Layout) -> tuple[Heads, Layout]:
        parts = (heads.query, heads.scored, heads.keys, heads.values)
        tokens = map(self._lay_side_by_side, parts)
        return Heads(*tokens), self._expand_layout(layout)

    def _lay_side_by_side(self, heads: Tensor | None) -> Any:
        """Lay virtual tokens one after the other: (B, H, N, P D) or (B, H, N, P, D) -> (B, H, N P, D); None stays None."""
        if heads is None:
            return None
        joined = heads.flatten(3)
        tokens = joined.unflatten(3, (self.pseudo_heads, -1))
        return tokens.flatten(2, 3)

    def _expand_layout(self, layout: Layout) -> Layout:
        count = self.pseudo_heads
        key_mask = layout.key_mask
        documents = layout.documents
        runs = layout.runs
        return replace(
            layout,
            query_positions=self._place(layout.query_positions),
            key_positions=self._place(layout.key_positions),
            key_mask=None if key_mask is None else key_mask.repeat_interleave(count, dim=1),
            documents=None if documents is None else documents.repeat_interleave(count, dim=1),
            runs=None if runs is None else tuple((start * count, size * count) for start, size in runs),
            window=None if layout.window is None else layout.window * count,
            farthest=None if layout.farthest is None else layout.farthest * count + count - 1,
        )

    def collapse(self, out: Tensor) -> Tensor:
        tokens = out.unflatten(2, (-1, self.pseudo_heads))
        return multiply("bjnpd,ijp->bind", tokens, self.collapsing)

    def multiply_adds(self) -> tuple[int, int]:
        cost = self.collapsing.numel() * self.size.head_dim
        return 2 * cost, 2 * cost


# -- outputs -------------------------------------------------------------------------------------------------------------


@register("gate", "head")
class HeadGate(Gate):
    """Output gate: each query scales the output of each head (Qiu et al. 2025, arXiv 2505.06708, headwise, after the values).

        O'_i(n) = 2 sigmoid(w_i x_n) O_i(n)

    weight w (H, E) starts at 0, where every gate is 1: plain attention.
    Differs from the paper: the factor 2, without which heads start at half of their output.
    """

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        weight = torch.zeros(self.count_gates(size), size.hidden_size)
        self.weight = nn.Parameter(weight)

    def count_gates(self, size: HeadSize) -> int:
        """Return the number of gates of a token."""
        return size.num_heads // self.shares

    def compute_gates(self, x: Tensor, outputs: Tensor) -> Tensor:
        """Compute the gates sigmoid(W x) of inputs x (B, N, E) for outputs (B, H, N, D), (B, H, N, 1 or D)."""
        gates = torch.sigmoid(linear(x, self.weight))
        heads = outputs.shape[1]
        by_head = gates.unflatten(-1, (heads, -1))
        return by_head.transpose(1, 2).to(outputs.dtype)

    def forward(self, x: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
        gates = self.compute_gates(x, outputs)
        return 2 * gates * outputs


@register("gate", "elementwise")
class ElementwiseGate(HeadGate):
    """Output gate: each query scales every number of each head's output (Qiu et al. 2025, elementwise, after the values).

        O'_i(n) = 2 sigmoid(W_i x_n) * O_i(n)

    weight W (H D, E) starts at 0, where every gate is 1: plain attention.  Differs from the paper as `HeadGate` does.
    """

    def count_gates(self, size: HeadSize) -> int:
        return size.num_heads * size.head_dim


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
        self.amount: nn.Parameter | None = None
        if config.learned:
            self.amount = nn.Parameter(torch.zeros(size.num_heads))

    def forward(self, x: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
        count = outputs.shape[2]
        own_values = values.narrow(2, -count, count)
        direction = F.normalize(own_values, dim=-1)
        share = (outputs * direction).sum(-1, keepdim=True)
        if self.amount is not None:
            amount = self.amount.to(share.dtype)
            share = share * amount[:, None, None]
        return outputs - share * direction


@register("gate", "differential")
class DifferentialGate(HeadGate):
    """Differential attention V2: each token subtracts the output of every second head.

    Published by Microsoft in January 2026 (microsoft/unilm, Diff-Transformer-V2).

        O'_i(n) = O_2i(n) - sigmoid(w_i x_n) O_2i+1(n)

    Both heads of a pair share keys and values, so that it is a difference of maps: 2 H heads of queries, H or fewer of keys and
    values (`model.num_key_value_heads`), H outputs. weight w (H, E) starts at 0, where lambda is 1/2; the released layer starts
    as `nn.Linear` does. Not plain attention at the start. An even number of query heads reads each key head.
    """

    shares = 2

    def forward(self, x: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
        first = outputs[:, 0::2]
        second = outputs[:, 1::2]
        share = self.compute_gates(x, second)
        return first - share * second
