"""What the papers' released code does otherwise than the definition, for comparison only; keys of the configuration choose it.

| key | released code | departure |
| --- | --- | --- |
| `model.attention.score: {name: relative, as_published: true}` | Skip Cross-head | distances to the last query: `FromLast` |
| `model.memory_start: zeros` | Skip Cross-head | an empty memory is zeros that are attended: `start_memory` |
| `train.phases.gaps: drifting` | Skip Cross-head | the memory of a layer drifts with every skip: `DriftingMemory` |
| `model.attention.causal: as_published` | Tensorized Transformer | no mask: `see_all` |
| `model.attention.score: relative` of `kind: multilinear` | Tensorized Transformer | a term of positions: `PositionTerm` |
| `model.decoder.released_decoding` | Mixhead | translations are written without mixing: `remove_mixing` |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import KeyValues
from .config import ModelConfig
from .layout import Layout
from .memory import LayerMemory, Memory, MemoryState
from .registry import lookup, with_parts


@dataclass(frozen=True)
class FromLast(Layout):
    """A layout whose distances are those of the last query, R(p_last - p_m), whatever the query; no window bounds them.

    A query does not know how far a key is, and the weights of a token change with what is appended to its block, so that
    decoding token by token is another function.
    """

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return replace(Layout(**vars(self)), window=None).spans

    @property
    def origins(self) -> Tensor:
        return self.query_positions[..., -1:]


def start_memory(config: ModelConfig, memory: Memory, x: Tensor) -> Memory:
    """Return `memory`, or at the start of a text a memory of zeros at the positions -M .. -1.

    Args:
        config: its `memory_length` is M.
        memory: of the segment before.
        x: vectors of the segment (B, N, E), whose rows, dtype and device the zeros take.
    """
    if memory.length > 0:
        return memory
    size = config.memory_length
    hidden = x.new_zeros(len(x), 1, size, x.shape[-1])
    zeros = LayerMemory(KeyValues(None, hidden), ((-size, size),))
    return replace(memory, layers=(zeros,) * len(memory.layers))


class DriftingMemory(Memory):
    """A memory whose layers stand before the segment, back by all tokens at which the layer was ever skipped.

    They stay back after the layer ran again.
    """

    def place(self, layer: LayerMemory, segment: MemoryState) -> LayerMemory:
        size = layer.tokens
        back = layer.skipped
        if size == 0:
            return layer
        if segment.mask is None:
            return replace(layer, runs=((segment.first - back - size, size),))
        before = torch.arange(-size, 0, device=segment.positions.device)
        positions = segment.positions[:, :1] + before - back
        mask = layer.mask
        if mask is None:
            mask = torch.ones_like(positions, dtype=torch.bool)
        return replace(layer, runs=None, positions=positions, mask=mask)


def remove_mixing(decoder: nn.Module) -> Any:
    """Return the decoder without mixing in its self-attention; it shares all parameters."""
    blocks = nn.ModuleList()
    for block in decoder.get_submodule("blocks").children():
        attention: Any = block.attention
        if hasattr(attention.attend, "mix"):
            keep_heads = lookup("mix", "none")(None, attention.attend.size)
            plain = with_parts(attention.attend, mix=keep_heads)
            attention = with_parts(attention, attend=plain)
            block = with_parts(block, attention=attention)
        blocks.append(block)
    return with_parts(decoder, blocks=blocks)


def see_all(layout: Layout) -> Layout:
    """Drop the causal mask of the layout: every query sees every key, also those that it has to predict."""
    return replace(layout, causal=False)


class PositionTerm(nn.Module):
    """The second term of the released code: keys of positions, and u and v that are added to the queries.

        T_ijm = sum_r g_r (Q_i + u)_r K_jr V_mr  +  sum_r g_r (Q_i + v)_r p_jr V_mr,      p_j = W_p PE(P - 1 - j)

    weight W_p (R, E) without bias; P = max_position_embeddings. As in the code, a position is counted from the last row of the
    output map: the distance to the end, not that to the query.
    biases: u and v, (1, R) each, one pair for all layers of a model unless `shared_biases` is false.
    """

    def __init__(self, rank: int, hidden_size: int, biases: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rank, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as `nn.Linear` starts
        self.biases: Any = biases

    def factors(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        core: Tensor,
        encodings: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write both terms as one of rank 2R: [Q + u, Q + v], [K, p], [V, V], [g, g].

        Args:
            query: Q (B, N, R).
            keys: K (B, M, R); key j is at position j.
            values: V (B, M, R).
            core: g (R,).
            encodings: PE(P - 1 - j) of the positions j = 0, 1, .. (M or more, E).

        Returns:
            Query, keys, values and core of rank 2R.
        """
        u, v = self.biases.content_bias[0], self.biases.position_bias[0]
        rows, count, _ = keys.shape
        positions = F.linear(encodings[:count], self.weight).to(keys.dtype)
        query = torch.cat((query + u, query + v), -1).to(query.dtype)
        keys = torch.cat((keys, positions.expand(rows, -1, -1)), -1)
        values = torch.cat((values, values), -1)
        return query, keys, values, torch.cat((core, core))
