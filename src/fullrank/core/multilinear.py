"""`attend` as multi-linear attention: a three-way tensor of queries, keys and values in place of weighted values."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.kernels import forced
from fullrank.kernels.multilinear import multilinear

from .attention import Attend, Attention, Trace
from .cache import DecayedSums
from .config import AttentionConfig, ModelConfig, MultiLinearConfig, stage_name
from .errors import ConfigError, InputError
from .layout import Layout
from .multilinear_decayed import DecayedMap
from .multilinear_reference import leading
from .positions import RelativeBiases, encode_places
from .project import Heads, Needs
from .registry import register
from .score import u_and_v
from .stage import HeadSize


class Cores(nn.Module):
    """C diagonal cores of R entries, `weight` (C, R): g_c = softmax(weight_c), or the entries themselves where they are free.

    Starts as the paper says (Eq. 6): rand(0, 1), then softmax; free ones start at that softmax and are not normalised again.
    As parameters of a scale they never decay.
    """

    no_weight_decay = True

    def __init__(self, count: int, rank: int, free: bool) -> None:
        super().__init__()
        self.free = free
        start = torch.rand(count, rank)
        self.weight = nn.Parameter(start.softmax(-1) if free else start)

    def forward(self) -> Tensor:
        return self.weight if self.free else self.weight.softmax(-1)


class PositionTerm(nn.Module):
    """The second term of the released code: keys of places, and u and v that are added to the queries.

        T_ijm = sum_r g_r (Q_i + u)_r K_jr V_mr  +  sum_r g_r (Q_i + v)_r p_jr V_mr,      p_j = W_p PE(P - 1 - j)

    weight W_p (R, E) without bias; P = max_position_embeddings. As in the code, a place is counted from the last row of the
    output map: the distance to the end, not that to the query. `biases` are u and v, (1, R) each, one pair for all layers of a
    model unless `shared_biases` is false.
    """

    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.longest = size.max_length
        self.weight = nn.Parameter(torch.empty(size.head_dim, size.hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as `nn.Linear` starts
        self.biases: RelativeBiases | None = RelativeBiases(size.num_heads, size.head_dim)

    def factors(
        self, query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both terms as one of rank 2R: [Q + u, Q + v], [K, p], [V, V], [g, g]."""
        u, v = u_and_v(self.biases, layout)
        encodings = layout.encodings
        if encodings is None:
            encodings = encode_places(self.longest, keys.shape[1], self.weight.shape[1], keys)
        places = F.linear(encodings[: keys.shape[1]], self.weight).expand(keys.shape[0], -1, -1)
        both = torch.cat((query + u[0], query + v[0]), -1)
        return (
            both.to(query.dtype), torch.cat((keys, places.to(keys.dtype)), -1), torch.cat((values, values), -1),
            torch.cat((cores, cores), -1),
        )  # fmt: skip


@register("attend", "multilinear")
class MultiLinear(Attend):
    """Multi-linear attention (Ma et al. 2019, Eq. 5 to 8), the output map included.

        T_ijm = (1/C) sum_c sum_r g_cr Q_ir K_jr V_mr            for j, m <= i (`masked`), else 0
        O_i   = sum_jm T_ijm W_jm + b                            `pairs`: split, concatenate, W_O
        O_i   = sum_jm sum_r g_r Q_ir K_jr V_mr W_r(i, j, m) + b   `decayed`: see `DecayedMap`

    Heads: query (B, 1, N, R), keys and values (B, 1, M, R) -> (B, 1, N, E). There is no softmax and no scale in it. With one
    core it is the paper's single-block attention (§3.1). weight W is (P, P, E), P = max_position_embeddings; a text of M <= P
    tokens uses its leading part, and longer ones are refused. `causal: as_published` leaves the mask out.
    Rows are those of positions in the text: padding takes none, a rest of the layer leaves some out.
    Raises InputError for texts longer than P, and where attention weights are asked for.
    """

    def __init__(self, config: MultiLinearConfig, size: HeadSize, dropout: float) -> None:
        super().__init__()
        if dropout:
            raise ConfigError(
                f"dropout: multi-linear attention has no attention weights to drop, given {dropout}; leave it out"
            )
        self.size = HeadSize(1, config.rank, size.hidden_size, size.max_length)
        self.sees_future, self.needs = config.sees_future, Needs(("scored", "keys"))
        self.cores = Cores(config.cores, config.rank, config.core_weights == "free")
        self.score = PositionTerm(self.size) if stage_name(config.score) == "relative" else None
        self.decayed: DecayedMap | None = None
        self.weight: nn.Parameter | None = None
        if config.output_map == "decayed":
            assert config.decays is not None
            self.decayed = DecayedMap(config.decays, self.size)
        else:
            self.max_length = size.max_length
            self.weight = nn.Parameter(torch.empty(size.max_length, size.max_length, size.hidden_size))
            nn.init.uniform_(self.weight, -1 / size.max_length, 1 / size.max_length)  # as `nn.Linear` starts
        self.bias = nn.Parameter(torch.zeros(size.hidden_size)) if config.bias else None

    def merge(self, bias: bool) -> nn.Module:
        """What follows: nothing, the output map is here."""
        return nn.Identity()

    def forward(self, heads: Heads, layout: Layout, trace: Trace | None = None) -> Tensor:
        query, keys, values = self._factors(heads, trace)
        if self.decayed is not None:
            return self._finished(self.decayed(query, keys, values, self.cores(), layout))
        return self._finished(self._pairs(query, keys, values, layout))

    def use_shared_biases(self) -> None:
        if self.score is not None:
            self.score.biases = None

    def past(self) -> DecayedSums | None:
        return None if self.decayed is None else DecayedSums()

    def after(self, heads: Heads, past: DecayedSums, layout: Layout, trace: Trace | None) -> tuple[Tensor, DecayedSums]:
        """New tokens after sums over `past.length` earlier ones; `layout` covers both. Also returns the new sums."""
        assert self.decayed is not None
        query, keys, values = self._factors(heads, trace)
        out, after = self.decayed.after(query, keys, values, self.cores(), layout, past)
        return self._finished(out), after

    def _factors(self, heads: Heads, trace: Trace | None) -> tuple[Tensor, Tensor, Tensor]:
        if trace is not None and not trace.partial:
            raise InputError(
                "multi-linear attention has no attention weights to collect: penalties (train.orthogonality, train.overlap) "
                "and analyses of weights go with model.attention.kind: weighted"
            )
        if (name := forced()) not in (None, "reference", "multilinear"):
            raise InputError(
                f"kernel '{name}' cannot compute multi-linear attention; use kernel 'auto', 'multilinear' or 'reference'"
            )
        assert heads.scored is not None
        assert heads.keys is not None
        return heads.scored[:, 0], heads.keys[:, 0], heads.values[:, 0]

    def _finished(self, out: Tensor) -> Tensor:
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out[:, None]  # (B, 1, N, E)

    def _pairs(self, query: Tensor, keys: Tensor, values: Tensor, layout: Layout) -> Tensor:
        assert self.weight is not None
        causal = layout.causal and not self.sees_future
        if not layout.from_start or layout.narrow:
            return self._placed(query, keys, values, layout, causal)
        leading(self.weight, layout.shape[1])  # too long: said before anything is computed
        cores = self.cores()
        if self.score is not None:
            query, keys, values, cores = self.score.factors(query, keys, values, cores, layout)
        return multilinear(query, keys, values, cores, self.weight, causal=causal, key_mask=layout.key_mask)

    def _placed(self, query: Tensor, keys: Tensor, values: Tensor, layout: Layout, causal: bool) -> Tensor:
        """Keys and values are put at their positions in the text; no token stands where there was padding or a rest."""
        assert self.weight is not None
        rows, places = keys.shape[0], layout.key_positions.expand(keys.shape[0], -1)
        seen = torch.ones_like(places, dtype=torch.bool) if layout.key_mask is None else layout.key_mask
        index = places.masked_fill(~seen, 0)[..., None]
        first, last = index.aminmax()
        if first < 0:
            raise InputError(
                "a position before the text, for which model.attention.output_map: pairs has no row (the labels of gaps: "
                "drifting reach there); choose gaps: true, or output_map: decayed"
            )
        length = int(last) + 1
        leading(self.weight, length)

        def put(tokens: Tensor) -> Tensor:
            empty = tokens.new_zeros(rows, length, tokens.shape[2])
            return empty.scatter_add(
                1, index.expand(-1, -1, tokens.shape[2]), tokens.masked_fill(~seen[..., None], 0.0)
            )

        there = torch.zeros(rows, length, dtype=torch.int32, device=keys.device)
        occupied = there.scatter_add(1, index[..., 0], seen.to(torch.int32)) > 0
        own = layout.query_positions.expand(rows, -1)
        together = causal and not layout.narrow and query.shape[1] == keys.shape[1]
        keys, values = put(keys), put(values)
        query = put(query) if together else query
        cores = self.cores()
        if self.score is not None:
            query, keys, values, cores = self.score.factors(query, keys, values, cores, layout)
        visible = None
        if layout.narrow or (causal and not together):
            every = torch.arange(length, device=keys.device)
            visible = every <= own[..., None] if causal else torch.ones_like(every, dtype=torch.bool)
            if layout.window is not None:
                visible = visible & (every > own[..., None] - layout.window)
        out = multilinear(query, keys, values, cores, self.weight, causal=causal, key_mask=occupied, visible=visible)
        if not together:
            return out
        return out.gather(1, own.clamp_max(length - 1)[..., None].expand(-1, -1, out.shape[2]))


class MultiLinearAttention(Attention):
    """Multi-linear attention as a layer by itself (Ma et al. 2019, §3.2): see `MultiLinear` for its equation.

        MultiLinearAttention(hidden_size=256, rank=40, cores=2, max_position_embeddings=80)

    x (B, N, E), source (B, M, E) -> (B, N, E), masked like `Attention`: causal unless a layout or another source says
    otherwise. Built from a `ModelConfig` or an `AttentionConfig` of kind `multilinear`, or from its keys. The output map of
    pairs has max_position_embeddings^2 x E numbers, and 1,024 is what is taken where no max_position_embeddings is given.
    Heads may be given as for `Attention`; they play no part.
    Raises ConfigError for another kind, and for keys given twice.
    """

    def __init__(
        self,
        config: ModelConfig | AttentionConfig | None = None,
        *,
        hidden_size: int | None = None,
        max_position_embeddings: int | None = None,
        rank: int | None = None,
        cores: int | None = None,
        causal: Literal["masked", "as_published"] | None = None,
        core_weights: Literal["softmax", "free"] | None = None,
        output_map: Literal["pairs", "decayed"] | None = None,
        decays: int | None = None,
        bias: bool | None = None,
        num_attention_heads: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        keys = {
            "rank": rank, "cores": cores, "causal": causal, "core_weights": core_weights, "output_map": output_map,
            "decays": decays, "bias": bias,
        }  # fmt: skip
        given: dict[str, Any] = {key: value for key, value in keys.items() if value is not None}
        if config is None:
            config = AttentionConfig(kind="multilinear", **given)
        elif given:
            raise ConfigError(f"MultiLinearAttention: the configuration has {', '.join(given)}; change them there")
        attention = config.attention if isinstance(config, ModelConfig) else config
        if attention.kind != "multilinear":
            raise ConfigError(
                f"MultiLinearAttention: model.attention.kind must be 'multilinear', given '{attention.kind}'"
            )
        super().__init__(
            config,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
        )
