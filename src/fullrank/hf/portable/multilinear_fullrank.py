"""Multi-linear attention: a three-way tensor of queries, keys and values in place of attention weights.

B batch, N queries, M keys, R rank, C cores, S decays, E width, P max_position_embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_fullrank import Settings, stage
from .positions_fullrank import Heads, RelativeBiases, View, check_length, shared_or_own


class Cores(nn.Module):
    """C diagonal cores of R entries: softmax(weight), or weight itself where they are `free`."""

    def __init__(self, own: Settings) -> None:
        super().__init__()
        self.free = own.core_weights == "free"
        self.weight = nn.Parameter(torch.empty(own.cores, own.rank))

    def forward(self) -> Tensor:
        return self.weight if self.free else self.weight.softmax(-1)


class PositionTerm(nn.Module):
    """The second term of the released code, sum_r g_r (Q + v)_r p_r V_r with p_j = W_p PE(P - 1 - j), as a rank of its own."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.attention.rank, config.hidden_size))
        own = not stage(config.attention.score)[1].get("shared_biases", True)
        self.biases = RelativeBiases(1, config.attention.rank) if own else None

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, view: View
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[Q + u, Q + v], [K, p], [V, V], [g, g]; key j stands at position j."""
        u, v = shared_or_own(self.biases, view)
        assert view.encodings is not None
        places = F.linear(view.encodings[: keys.shape[1]], self.weight).expand(len(keys), -1, -1)
        query = torch.cat((query + u[0], query + v[0]), -1)
        return query, torch.cat((keys, places), -1), torch.cat((values, values), -1), torch.cat((cores, cores), -1)


class DecayedMap(nn.Module):
    """W_r(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) (1 - a_s) (1 - b_s) U_sr: an output map of any length, from decayed sums."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        own = config.attention
        self.key_decay = nn.Parameter(torch.empty(own.decays))
        self.value_decay = nn.Parameter(torch.empty(own.decays))
        self.weight = nn.Parameter(torch.empty(own.decays, own.rank, config.hidden_size))

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, view: View) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        distances = (view.queries[..., None] - view.keys[:, None]).abs()  # (1 or B, N, M)
        hidden = ~view.visible[:, 0]

        def sums(tokens: Tensor, decay: Tensor) -> Tensor:
            """A_s(i) = sum_j a_s^(i-j) K_j, (B, N, S, R)."""
            rates = F.logsigmoid(decay.to(wide))
            found = [torch.exp(rate * distances).masked_fill(hidden, 0.0) @ tokens.to(wide) for rate in rates]
            return torch.stack(found, dim=2)

        scaled = (query.to(wide) * cores.to(wide).mean(0))[:, :, None]
        means = torch.sigmoid(-self.key_decay) * torch.sigmoid(-self.value_decay)
        terms = scaled * sums(keys, self.key_decay) * sums(values, self.value_decay)  # (B, N, S, R)
        return (terms.flatten(-2) @ (self.weight * means[:, None, None]).flatten(0, 1).to(wide)).to(query.dtype)


_BLOCK = 1 << 24  # numbers of the tensor T at a time


class MultiLinear(nn.Module):
    """Multi-linear attention (Ma et al. 2019, Eq. 5 to 8): a tensor of queries, keys and values, no softmax.

        T_ijm = (1/C) sum_c sum_r g_cr Q_ir K_jr V_mr for j, m that i sees;   O_i = sum_jm T_ijm W_jm + b

    weight W (P, P, E) has a row for each pair of positions; `decayed` serves any length.
    """

    def __init__(self, config: Settings) -> None:
        super().__init__()
        own, width, longest = config.attention, config.hidden_size, config.max_position_embeddings
        self.sees_future = own.causal == "as_published"
        self.cores = Cores(own)
        self.score = PositionTerm(config) if stage(own.score)[0] == "relative" else None
        decayed = own.output_map == "decayed"
        self.decayed = DecayedMap(config) if decayed else None
        self.weight: Any = None if decayed else nn.Parameter(torch.empty(longest, longest, width))
        self.bias = nn.Parameter(torch.zeros(width)) if own.bias else None

    def forward(self, heads: Heads, view: View, wants_weights: bool) -> tuple[Tensor, None]:
        assert heads.scored is not None
        assert heads.keys is not None
        query, keys, values, cores = heads.scored[:, 0], heads.keys[:, 0], heads.values[:, 0], self.cores()
        if self.decayed is not None:
            out = self.decayed(query, keys, values, cores, view)
        else:
            out = self._pairs(query, keys, values, cores, view)
        return (out if self.bias is None else out + self.bias.to(out.dtype))[:, None], None  # (B, 1, N, E)

    def _pairs(self, query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, view: View) -> Tensor:
        """Keys and values are put at their positions in the text, where W has their rows."""
        check_length(view, self.weight.shape[0])
        if int(view.keys.min()) < 0:
            raise ValueError(
                "a position before the text, for which the output map of multi-linear attention has no row"
            )
        rows, length = len(keys), int(view.keys.max()) + 1
        tokens = torch.ones_like(view.keys, dtype=torch.bool) if view.mask is None else view.mask
        places, tokens = view.keys.expand(rows, -1).masked_fill(~tokens, 0), tokens.expand(rows, -1)

        def put(given: Tensor) -> Tensor:
            empty = given.new_zeros(rows, length, given.shape[2])
            return empty.scatter_add(1, places[..., None].expand_as(given), given.masked_fill(~tokens[..., None], 0.0))

        seen = torch.zeros(rows, length, device=keys.device).scatter_add(1, places, tokens.float())[:, None] > 0
        every, own = torch.arange(length, device=keys.device), view.queries[..., None]
        if view.causal and not self.sees_future:
            seen = seen & (every <= own)
        if view.window is not None:
            seen = seen & (every > own - view.window)
        seen = seen.expand(rows, query.shape[1], -1)
        keys, values = put(keys), put(values)
        if self.score is not None:
            query, keys, values, cores = self.score(query, keys, values, cores, view)
        weight = self.weight[:length, :length].flatten(0, 1)
        scaled, step = query * cores.mean(0), max(1, _BLOCK // (rows * length * length))
        parts = []
        for some, visible in zip(scaled.split(step, 1), seen.split(step, 1), strict=True):
            by_key = torch.where(visible[..., None], some[:, :, None] * keys[:, None], 0.0)  # (B, n, M, R)
            tensor = (by_key @ values[:, None].transpose(-1, -2)).masked_fill(~visible[:, :, None], 0.0)
            parts.append(tensor.flatten(2) @ weight)
        return torch.cat(parts, dim=1)
