"""Synthesizers (Tay et al. 2020): attention weights that no query and key agreed on. The fourth backbone of Mixhead Table 1.

Column m of a score belongs to key *position* m, so that padding and a cache change nothing; a text may have any length up
to `model.max_position_embeddings`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.core.errors import InputError
from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.registry import register
from fullrank.core.score_contract import Score


def _check(layout: Layout, longest: int) -> None:
    keys = layout.shape[1]
    if not layout.from_start and (keys > longest or layout.runs is not None or layout.farthest is not None):
        keys = int(layout.key_positions.max()) + 1  # padding takes no position, a gap some
    if keys > longest:
        raise InputError(
            f"a sequence of {keys} tokens, but model.max_position_embeddings is {longest} and a synthesizer scores that many "
            "keys; shorten the segments or train with a larger model.max_position_embeddings"
        )


@register("score", "dense_synthesizer")
class DenseSynthesizer(Score):
    """Each query says by itself how much it wants the key at each position (Synthesizer §3.2; Mixhead §4.1.2).

        A_i(n, m) = (W relu(Q_i(n)) + b)_m

    query (B, H, N, D) -> (B, H, N, M).  `to_positions` is W (P, D) and b (P), shared by the heads; P = max_position_embeddings.
    With the query projection as its first layer this is the "shallow neural network". There are no keys.
    `keep_key_projection`: a layer keeps the key projection that nothing reads, never trained: only so the size is the 248M
    of Mixhead Table 1, whose code was not published; one W and b a layer is what the total allows.
    """

    needs = ("scored",)

    @dataclass(frozen=True)
    class Config:
        keep_key_projection: bool = False

        def __post_init__(self) -> None:
            if type(self.keep_key_projection) is not bool:
                raise ValueError(f"keep_key_projection: true or false, given {self.keep_key_projection!r}")

    def __init__(self, config: Config, size: HeadSize) -> None:
        super().__init__()
        self.idle = ("keys",) if config.keep_key_projection else ()
        self.max_length: int = size.max_length
        self.to_positions = nn.Linear(size.head_dim, size.max_length)

    def forward(self, query: Tensor, layout: Layout) -> Tensor:
        _check(layout, self.max_length)
        weight, bias, hidden = self.to_positions.weight, self.to_positions.bias, torch.relu(query)
        if layout.from_start:
            keys = layout.shape[1]
            return F.linear(hidden, weight[:keys], bias[:keys])
        places = layout.key_positions  # (M,) or (B, M)
        columns, offsets = weight[places], bias[places]
        if places.dim() == 2:
            columns, offsets = columns[:, None], offsets[:, None, None]
        return hidden @ columns.transpose(-1, -2) + offsets


@register("score", "random_synthesizer")
class RandomSynthesizer(Score):
    """One learned matrix of scores per head, the same for every text (Synthesizer §3.3).

        A_i(n, m) = L_i(p_n, p_m)

    -> (1 or B, H, N, M).  `logits` L is (H, P, P), P = max_position_embeddings; it starts at N(0, 1).
    Neither keys nor queries exist, unless position-wise mixing reads the query.
    In cross-attention, queries before the first key share its row.
    """

    needs = ()

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__()
        self.max_length: int = size.max_length
        self.logits = nn.Parameter(torch.randn(size.num_heads, size.max_length, size.max_length))

    def forward(self, layout: Layout) -> Tensor:
        _check(layout, self.max_length)
        queries, keys = layout.shape
        if layout.from_start and queries <= keys:
            return self.logits[None, :, keys - queries : keys, :keys]
        rows = layout.query_positions.clamp_min(0)[..., :, None]
        found = self.logits[:, rows, layout.key_positions[..., None, :]]  # (H, N, M) or (H, B, N, M)
        return found.transpose(0, 1) if found.dim() == 4 else found[None]
