"""The attention layer: project -> route -> attend -> merge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from fullrank.core import registry
from fullrank.core.attend import Attend
from fullrank.core.config import AttentionConfig, ModelConfig
from fullrank.core.cross_head import SameHead, StochasticCrossHead
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.head_size import HeadSize
from fullrank.core.layout import Layout
from fullrank.core.multilinear_decayed import Summed
from fullrank.core.project import Heads, Projection, Rotary
from fullrank.core.room import Room, append
from fullrank.core.trace import Trace
from fullrank.core.weighted import WeightedValues


class KeyValues(NamedTuple):
    """What was projected for earlier tokens: keys and values (B, H, M, D), and keys of distances (H, T, D).

    keys is None where the score has none, relative where it has no distances; T may be more than is needed yet.
    rooms: where keys and values lie, if tokens may be written behind them.
    """

    keys: Tensor | None
    values: Tensor
    relative: Tensor | None = None
    rooms: tuple[Room | None, Room | None] = (None, None)

    @property
    def length(self) -> int:
        """M."""
        return self.values.shape[2]

    @property
    def texts(self) -> int:
        """B."""
        return self.values.shape[0]

    def rows(self, index: Tensor) -> KeyValues:
        """Those of texts `index` (K,); distances are the same for all texts."""
        keys = None if self.keys is None else self.keys.index_select(0, index)
        return KeyValues(keys, self.values.index_select(0, index), self.relative)

    def first(self, length: int) -> KeyValues:
        """Those of the first `length` tokens."""
        keys = None if self.keys is None else self.keys[:, :, :length]
        return KeyValues(keys, self.values[:, :, :length], self.relative)

    def columns(self, order: Tensor) -> KeyValues:
        """Those of tokens `order` (B, K) of each text."""

        def pick(heads: Tensor) -> Tensor:
            return heads.gather(2, order[:, None, :, None].expand(-1, heads.shape[1], -1, heads.shape[3]))

        return KeyValues(None if self.keys is None else pick(self.keys), pick(self.values), self.relative)


Past = KeyValues | Summed  # of earlier tokens


class Attention(nn.Module):
    """Multi-head attention whose stages are chosen by configuration (Mixhead Eq. 8 to 12).

        MultiHead(X) = Flatten(attend(route(project(X)))) W_O + b

    x (B, N, E), source (B, M, E) -> (B, N, E).  `source` defaults to x (self-attention, causal unless a layout says
    otherwise); with another source and no layout every query sees every key (cross-attention).
    Built from a `ModelConfig`, or from an `AttentionConfig` and the sizes it lacks. The size of a head is independent of
    the width E. Raises ConfigError if a size is missing, or given twice.
    """

    def __init__(
        self,
        config: ModelConfig | AttentionConfig,
        *,
        hidden_size: int | None = None,
        num_attention_heads: int | None = None,
        head_dim: int | None = None,
        dropout: float | None = None,
        max_position_embeddings: int | None = None,
    ) -> None:
        super().__init__()
        rotary = None
        if isinstance(config, ModelConfig):
            given = (hidden_size, num_attention_heads, head_dim, dropout, max_position_embeddings)
            if any(value is not None for value in given):
                raise ConfigError(f"{type(self).__name__}: a ModelConfig has its own sizes; change them there")
            model, config = config, config.attention
            hidden_size, num_attention_heads, head_dim = model.hidden_size, model.num_attention_heads, model.head_dim
            dropout, max_position_embeddings = model.dropout.attention, model.max_position_embeddings
            if model.position == "rotary" and head_dim is not None:
                rotary = Rotary(head_dim, model.rope_theta)
        if config.kind == "multilinear":  # heads play no part
            num_attention_heads, head_dim = 1, config.rank
        if hidden_size is None or num_attention_heads is None:
            needed = "hidden_size" if config.kind == "multilinear" else "hidden_size and num_attention_heads"
            raise ConfigError(f"{type(self).__name__}: give a ModelConfig, or an AttentionConfig with {needed}")
        if head_dim is None:
            if num_attention_heads < 1 or hidden_size % num_attention_heads:
                raise ConfigError(
                    f"hidden_size {hidden_size} is not divisible by num_attention_heads {num_attention_heads}; give head_dim"
                )
            head_dim = hidden_size // num_attention_heads
        if min(hidden_size, num_attention_heads, head_dim) < 1:
            raise ConfigError(
                f"sizes are positive numbers, given hidden_size {hidden_size}, num_attention_heads {num_attention_heads}, "
                f"head_dim {head_dim}"
            )
        longest = 1024 if max_position_embeddings is None else max_position_embeddings
        if not (type(longest) is int and longest > 0):
            raise ConfigError(f"max_position_embeddings: a positive whole number, given {max_position_embeddings!r}")
        size = HeadSize(num_attention_heads, head_dim, hidden_size, longest)
        attend: Attend = registry.lookup("attend", config.kind)(config, size, dropout or 0.0)
        self.project = Projection(attend.size, config.bias, rotary, **attend.projected())
        self.route = StochasticCrossHead(config.cross_head) if config.cross_head > 0 else SameHead()
        self.attend: Any = attend
        self.merge: nn.Module = attend.merge(config.bias)

    def forward(
        self, x: Tensor, source: Tensor | None = None, layout: Layout | None = None, *, trace: Trace | None = None
    ) -> Tensor:
        if layout is None:
            keys = x.shape[1] if source is None else source.shape[1]
            layout = Layout.of(x.shape[1], keys, causal=source is None, device=x.device)
        return self._attend(self.project(x, x if source is None else source, layout), layout, trace)

    def keys_of(self, source: Tensor, layout: Layout) -> KeyValues:
        """What `over` reads of source (B, M, E), projected once for many queries. `layout` is of its keys."""
        return KeyValues(*self.project.keys_and_values(source, layout))

    def over(self, x: Tensor, known: KeyValues, layout: Layout, *, trace: Trace | None = None) -> Tensor:
        """Cross-attention of x (B, N, E) over keys and values that were projected before."""
        query, scored = self.project.queries(x, layout)
        return self._attend(Heads(query, scored, known.keys, known.values), layout, trace)

    def continued(
        self,
        x: Tensor,
        past: Past | None,
        layout: Layout,
        *,
        source: Tensor | None = None,
        trace: Trace | None = None,
        mixed: bool = True,
    ) -> tuple[Tensor, Past]:
        """Self-attention of new tokens x (B, N, E) after `past`; returns the output and the past of the next call.

        `layout` covers past and new keys. The projected queries mix heads exactly as in one full pass. `source`: tokens
        that end with x, where keys and values are to be made of more than x. Without `mixed` heads are left as they are, as
        Mixhead's released code does here.
        Raises InputError where earlier tokens see later ones: then there is no going on.
        """
        if self.attend.sees_future:
            raise InputError(
                "model.attention.causal: as_published lets tokens see later ones, so a text cannot be read piece by piece or "
                "continued; read it whole, or train with 'masked'"
            )
        if isinstance(past, Summed):
            out, after = self.attend.after(self.project(x, x, layout), past, layout, trace)
            return self._merged(out), after
        heads = self.project(x, x if source is None else source, layout, None if past is None else past.relative)
        rooms = (Room.beside(heads.keys), Room.beside(heads.values))
        if past is not None:
            keys, room = None, None
            if heads.keys is not None:
                assert past.keys is not None
                keys, room = append(past.keys, past.rooms[0], heads.keys)
            values, other = append(past.values, past.rooms[1], heads.values)
            heads, rooms = replace(heads, keys=keys, values=values), (room, other)
        # a table of other distances than 0, 1, 2 .. would be read wrongly by the next call
        table = heads.relative if layout.from_zero else None if past is None else past.relative
        out = self._attend(heads, layout, trace, mixed)
        return out, KeyValues(heads.keys, heads.values, table, rooms)

    def past(self) -> Summed | None:
        """What decoding begins with; None: keys and values of no token."""
        found: Summed | None = self.attend.past()
        return found

    def _attend(self, heads: Heads, layout: Layout, trace: Trace | None, mixed: bool = True) -> Tensor:
        queries = layout.shape[0] if heads.query is None else heads.query.shape[2]
        found = (queries, heads.values.shape[2])
        if layout.shape != found:
            raise ValueError(f"the layout is of {layout.shape} queries and keys, the call of {found}")
        relative = None if heads.relative is None else heads.relative[:, : layout.distances]
        keys, values, relative = self.route(heads.keys, heads.values, relative)
        attend = self.attend if mixed or not isinstance(self.attend, WeightedValues) else self.attend.unmixed()
        out = attend(replace(heads, keys=keys, values=values, relative=relative), layout, trace)
        return self._merged(out)

    def _merged(self, out: Tensor) -> Tensor:
        merged: Tensor = self.merge(out.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        return merged


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
