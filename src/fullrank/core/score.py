"""Synthesizers: scores that read learned positions in place of keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .embedding import linear
from .errors import InputError
from .kinds import DenseSynthesizerOptions
from .layout import Layout
from .registry import register
from .stages import HeadSize, Score


@register("score", "dense_synthesizer")
class DenseSynthesizer(Score):
    """Each query says by itself how much it wants the key at each position (Tay et al. 2020, §3.2; Mixhead §4.1.2).

        A_i(n, m) = (W relu(Q_i(n)) + b)_m

    query (B, H, N, D) -> (B, H, N, M).  `to_positions` is W (P, D) and b (P), shared by the heads; P = max_position_embeddings.
    Column m belongs to key *position* m, so that padding and a cache change nothing. There are no keys: with the query
    projection as its first layer this is the "shallow neural network".
    `keep_key_projection`: a layer has a key projection that nothing reads and that is never trained. Only so the size is the
    248M of Mixhead Table 1, whose code was not published. That total allows one W and b a layer.
    """

    needs = ("scored",)

    Config = DenseSynthesizerOptions

    def __init__(self, config: DenseSynthesizerOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.idle = ("keys",) if config.keep_key_projection else ()
        self.max_length: int = size.max_length
        self.to_positions = nn.Linear(size.head_dim, size.max_length)

    def forward(self, query: Tensor, layout: Layout) -> Tensor:
        _check_length(layout, self.max_length)
        weight, bias = self.to_positions.weight, self.to_positions.bias
        hidden = torch.relu(query)
        if layout.from_start:
            keys = layout.shape[1]
            return linear(hidden, weight[:keys], bias[:keys])
        positions = torch.atleast_2d(layout.key_positions)
        columns = weight[positions][:, None]  # (1 or B, 1, M, D)
        offsets = bias[positions][:, None, None]
        return hidden @ columns.mT + offsets


@register("score", "random_synthesizer")
class RandomSynthesizer(Score):
    """One learned matrix of scores per head, the same for every text (Tay et al. 2020, §3.3).

        A_i(n, m) = L_i(p_n, p_m)

    -> (1 or B, H, N, M).  `logits` L is (H, P, P), P = max_position_embeddings; it starts at N(0, 1).
    Neither keys nor queries exist, unless position-wise mixing reads the query.
    In cross-attention, queries before the first key share its row.
    """

    needs = ()

    def __init__(self, config: None, size: HeadSize) -> None:
        super().__init__(config, size)
        self.max_length: int = size.max_length
        self.logits = nn.Parameter(torch.randn(size.num_heads, size.max_length, size.max_length))

    def forward(self, layout: Layout) -> Tensor:
        _check_length(layout, self.max_length)
        queries, keys = layout.shape
        if layout.from_start and queries <= keys:
            return self.logits[None, :, keys - queries : keys, :keys]
        rows = layout.query_positions.clamp_min(0)[..., :, None]
        scores = self.logits[:, rows, layout.key_positions[..., None, :]]  # (H, N, M) or (H, B, N, M)
        return scores.transpose(0, 1) if scores.dim() == 4 else scores[None]


def _check_length(layout: Layout, longest: int) -> None:
    keys = layout.shape[1]
    if not layout.from_start and (keys > longest or layout.runs is not None or layout.farthest is not None):
        keys = int(layout.key_positions.max()) + 1  # padding takes no position, a gap some
    if keys > longest:
        raise InputError(
            f"a sequence of {keys} tokens, but model.max_position_embeddings is {longest} and a synthesizer scores that many "
            "keys; shorten the segments or train with a larger model.max_position_embeddings"
        )
