"""The attention layer: project -> permute heads -> score -> mask -> normalize -> mix -> weighted values -> gate -> merge."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import engine, registry
from .cache import Buffer, DecayedSums, KeyValues, Past, append
from .config import AttentionConfig, ModelConfig, MultiLinearConfig, WeightedConfig
from .cross_head import StochasticCrossHead
from .dropout import Dropout, dropout
from .embedding import check_tensors
from .engine import Problem
from .errors import ConfigError, InputError
from .layout import Layout
from .mix import Mixing, mix_heads
from .normalize import Normalizer
from .positions import Rotary
from .project import Heads, Needs, Projection
from .registry import contract, register
from .score import Score
from .stage import HeadSize, build_stage


@dataclass(frozen=True)
class LayerTrace:
    """One layer's attention: weights before and after mixing (B, H, N, M), mixing (H, H) or (B, N, H, H) or None.

    learned: the mixing has parameters. values (B, H, M, D): what the mixed weights are summed over.
    """

    weights: Tensor
    mixed: Tensor
    mixing: Tensor | None
    learned: bool = True
    values: Tensor | None = None


class Trace:
    """Collector of one `LayerTrace` per attention layer, in the order in which the layers run, for penalties and analysis.

    partial: layers without attention weights are left out; otherwise they refuse to be traced.
    states: where a list is given, the inputs (B, N, E) of the blocks. last: the input of the vocabulary layer (B, N, E), before
    its dropout; hidden: after it, where the loss reads it. weights: False collects no attention; tracing attention takes the
    definition instead of an engine.
    """

    # no dataclass: a sharded model (FSDP2) copies those among its arguments
    def __init__(
        self,
        layers: list[LayerTrace] | None = None,
        partial: bool = False,
        states: list[Tensor] | None = None,
        weights: bool = True,
    ) -> None:
        self.layers = [] if layers is None else layers
        self.partial, self.states, self.weights = partial, states, weights
        self.last: Tensor | None = None
        self.hidden: Tensor | None = None

    def enter(self, x: Tensor) -> Trace | None:
        """Record the input x (B, N, E) of a block; the trace for its attention."""
        if self.states is not None:
            self.states.append(x)
        return self if self.weights else None


@contract("attend")
class Attend(nn.Module):
    """Contract of the slot `attend`, built from `(config: AttentionConfig, size: HeadSize, dropout: float)`.

    Heads -> (B, H, N, D'). size: of the heads that are projected. needs: the heads that are read.
    max_length: the greatest number of keys, None without limit. sees_future: the causal mask is left out.
    """

    size: HeadSize
    needs: Needs = Needs()
    max_length: int | None = None
    sees_future: bool = False

    def merge(self, bias: bool) -> nn.Module:
        """The layer that follows: W_O over the heads side by side, (B, N, H D) -> (B, N, E)."""
        return nn.Linear(self.size.num_heads * self.size.head_dim, self.size.hidden_size, bias=bias)

    def past(self) -> DecayedSums | None:
        """The past before the first token; None: keys and values are kept."""
        return None

    def after(self, heads: Heads, past: DecayedSums, layout: Layout, trace: Trace | None) -> tuple[Tensor, DecayedSums]:
        """New tokens after sums over earlier ones, for a class whose `past` gives sums."""
        raise NotImplementedError(f"{type(self).__name__} keeps no sums")

    def use_shared_biases(self) -> None:
        """Read u and v of relative positions from the layout instead of an own pair."""


@register("attend", "weighted")
class WeightedValues(Attend):
    """O_i = dropout(mix(normalize(mask(score(Q_i, K_i))))) V_i  (Mixhead Eq. 9, 10, 12).

    Heads (query (B, H, N, D), keys and values (B, H, M, D)) -> (B, H, N, D).
    Dropout comes after mixing, as in the released Mixhead code. `forward` is the definition; it asks faster engines first.
    stride: the layout's, of attention with a pattern.
    """

    def __init__(self, config: WeightedConfig, size: HeadSize, dropout: float) -> None:
        super().__init__()
        self.size = size
        self.score: Score = build_stage("score", config.score, size)
        self.normalize: Normalizer = build_stage("normalize", config.normalize, size)
        self.mix: Mixing = build_stage("mix", config.mix, size)
        self.dropout, self.max_length, self.stride = dropout, self.score.max_length, config.stride
        self.needs = Needs(
            self.score.needs, self.mix.needs, self.score.idle, self.score.clamp_length, self.score.shared_projection
        )

    def forward(self, heads: Heads, layout: Layout, trace: Trace | None = None) -> Tensor:
        layout = layout if self.stride is None else replace(layout, stride=self.stride)
        mixing = self.mix.matrix(heads.query)
        problem = "a trace asks for attention weights" if trace is not None else self.problem(heads, layout, mixing)
        if (out := engine.load().attend(problem)) is not None:
            return out
        scores = self.scores(heads, layout)
        if not layout.unrestricted:
            scores = scores.masked_fill(~layout.visible(), float("-inf"))
        weights = self.normalize(scores)
        mixed = mix_heads(weights, mixing)
        if trace is not None:
            trace.layers.append(LayerTrace(weights, mixed, mixing, self.mix.learned, heads.values))
        dropped = dropout(mixed, self.dropout) if self.training else mixed
        return dropped.to(heads.values.dtype) @ heads.values

    def scores(self, heads: Heads, layout: Layout) -> Tensor:
        """The scores before the mask, (B, H, N, M)."""
        scores: Tensor = self.score(*self._needed(heads), layout)
        return scores.expand(heads.values.shape[0], -1, -1, -1)

    def problem(self, heads: Heads, layout: Layout, mixing: Tensor | None) -> Problem | str:
        """The call as engines see it; a string is the reason for which no engine computes it."""
        terms = self.score.terms(*self._needed(heads), layout)
        if isinstance(terms, str):
            return terms
        if self.normalize.engine is None:
            return f"no engine knows the normaliser {type(self.normalize).__name__}"
        p = self.dropout if self.training else 0.0
        mixing = None if mixing is None else mixing.to(heads.values.device)
        return Problem(
            terms.query, terms.keys, heads.values, mixing, terms.distances, layout, terms.scale, self.normalize.engine, p
        )  # fmt: skip

    def _needed(self, heads: Heads) -> list[Tensor]:
        return [getattr(heads, name) for name in self.score.needs]

    def use_shared_biases(self) -> None:
        self.score.biases = None


class HeadGate(nn.Module):
    """Output gate: each query scales the output of each head (Qiu et al. 2025, arXiv 2505.06708, headwise, after the values).

        O'_i(n) = 2 sigmoid(w_i x_n) O_i(n)

    x (B, N, E), heads (B, H, N, D) -> (B, H, N, D).  weight w (H, E) starts at 0, where every gate is 1: plain attention.
    Differs from the paper: the factor 2, without which heads start at half of their output.
    """

    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size.num_heads, size.hidden_size))

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        gates = 2 * torch.sigmoid(F.linear(x, self.weight))  # (B, N, H)
        return heads * gates.transpose(1, 2)[..., None].to(heads.dtype)


class Attention(nn.Module):
    """Multi-head attention whose stages are chosen by configuration (Mixhead Eq. 8 to 12).

        MultiHead(X) = Flatten(gate(attend(permute(project(X))))) W_O + b

    x (B, N, E), source (B, M, E) -> (B, N, E).  `source` defaults to x (self-attention, causal unless a layout says
    otherwise); with another source and no layout every query sees every key (cross-attention).
    In a model with value residuals the values are V' = (1 - a) V + a V_1 (Zhou et al. 2025, arXiv 2410.17897), V_1 those of
    the first layer and a (`first_share`) a number of the layer that starts at 1/2; the first layer has none.
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
        rotary, projected = None, None
        if isinstance(config, ModelConfig):
            sizes = (hidden_size, num_attention_heads, head_dim, dropout, max_position_embeddings)
            if any(value is not None for value in sizes):
                raise ConfigError(f"{type(self).__name__}: a ModelConfig has its own sizes; change them there")
            model, config = config, config.attention
            hidden_size, num_attention_heads, head_dim = model.hidden_size, model.num_attention_heads, model.head_dim
            dropout, max_position_embeddings = model.dropout.attention, model.max_position_embeddings
            projected = Dropout(model.dropout.projection, model.dropout.locked)
            if model.position == "rotary" and head_dim is not None:
                rotary = Rotary(head_dim, model.rope_theta)
        if not isinstance(config, AttentionConfig):
            raise ConfigError(f"{type(self).__name__}: give a ModelConfig or an AttentionConfig, given {config!r}")
        size = self._size(config, hidden_size, num_attention_heads, head_dim, max_position_embeddings)
        attend: Attend = registry.lookup("attend", config.kind)(config, size, dropout or 0.0)
        self.hidden_size = size.hidden_size
        self.project = Projection(attend.size, config.bias, rotary, attend.needs, projected)
        self.permute = StochasticCrossHead(config.cross_head if isinstance(config, WeightedConfig) else 0.0)
        self.attend = attend
        self.merge = attend.merge(config.bias)
        gated = isinstance(config, WeightedConfig) and config.gate == "head"
        self.gate = HeadGate(size) if gated else None
        self.register_parameter("first_share", None)

    def _size(
        self,
        config: AttentionConfig,
        hidden_size: int | None,
        heads: int | None,
        head_dim: int | None,
        longest: int | None,
    ) -> HeadSize:
        if isinstance(config, MultiLinearConfig):  # heads play no part
            heads, head_dim = 1, config.rank
        if hidden_size is None or heads is None:
            needed = "hidden_size" if isinstance(config, MultiLinearConfig) else "hidden_size and num_attention_heads"
            raise ConfigError(f"{type(self).__name__}: give a ModelConfig, or an AttentionConfig with {needed}")
        if head_dim is None:
            if heads < 1 or hidden_size % heads:
                raise ConfigError(
                    f"hidden_size {hidden_size} is not divisible by num_attention_heads {heads}; give head_dim"
                )
            head_dim = hidden_size // heads
        if not all(type(size) is int and size > 0 for size in (hidden_size, heads, head_dim)):
            raise ConfigError(
                f"sizes are positive whole numbers, given hidden_size {hidden_size}, num_attention_heads {heads}, "
                f"head_dim {head_dim}"
            )
        longest = 1024 if longest is None else longest
        if not (type(longest) is int and longest > 0):
            raise ConfigError(f"max_position_embeddings: a positive whole number, given {longest!r}")
        return HeadSize(heads, head_dim, hidden_size, longest)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        layout: Layout | None = None,
        *,
        trace: Trace | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        """first (B, H, M, D): values of the first layer at the tokens of `source`, for value residuals."""
        check_tensors(x=x, source=source)
        for name, given in (("x", x), ("source", source)):
            fits = given is None or (given.dim() == 3 and given.shape[::2] == (len(x), self.hidden_size))
            if given is not None and not (fits and given.is_floating_point()):
                raise InputError(
                    f"{name} must be numbers (B, N, {self.hidden_size}), with one B for x and source; given {given.dtype} "
                    f"{tuple(given.shape)}"
                )
        if layout is None:
            keys = x.shape[1] if source is None else source.shape[1]
            layout = Layout.of(x.shape[1], keys, causal=source is None, device=x.device)
        source = x if source is None else source
        if layout.shape != (shape := (x.shape[1], source.shape[1])):
            raise InputError(f"the layout is of {layout.shape} queries and keys, the call of {shape}")
        return self._attend(x, self._with_first(self.project(x, source, layout), first), layout, trace)

    def _with_first(self, heads: Heads, first: Tensor | None) -> Heads:
        """Value residual: V' = (1 - a) V + a V_1; the last tokens of `first` are those of V."""
        if first is None or self.first_share is None:
            return heads
        own, share = heads.values, self.first_share.to(heads.values.dtype)
        values = (1 - share) * own + share * first[:, :, first.shape[2] - own.shape[2] :]
        return Heads(heads.query, heads.scored, heads.keys, values, heads.relative)

    def _attend(self, x: Tensor, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
        relative = None if heads.relative is None else heads.relative[:, : layout.distances]
        keys, values, relative = self.permute(heads.keys, heads.values, relative)
        out = self.attend(Heads(heads.query, heads.scored, keys, values, relative), layout, trace)
        return self._merge(out if self.gate is None else self.gate(x, out))

    def _merge(self, out: Tensor) -> Tensor:
        merged: Tensor = self.merge(out.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        return merged

    # -- after earlier tokens, and over a projected source --------------------------------------------------------------

    def continued(
        self,
        x: Tensor,
        past: Past | None,
        layout: Layout,
        *,
        source: Tensor | None = None,
        trace: Trace | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Past]:
        """Self-attention of new tokens x (B, N, E) after `past`; returns the output and the past of the next call.

        `layout` covers past and new keys. The projected queries mix heads exactly as in one full pass. source: tokens
        that end with x, where keys and values are to be made of more than x. first: as of `forward`.
        Raises InputError where earlier tokens see later ones: such a text cannot be continued.
        """
        if self.attend.sees_future:
            raise InputError(
                "model.attention.causal: as_published lets tokens see later ones, so a text cannot be read piece by piece or "
                "continued; read it whole, or train with 'masked'"
            )
        if isinstance(past, DecayedSums):
            out, sums = self.attend.after(self.project(x, x, layout), past, layout, trace)
            return self._merge(out), sums
        heads = self.project(x, x if source is None else source, layout, None if past is None else past.relative)
        heads = self._with_first(heads, first)
        buffers = (Buffer.full(heads.keys), Buffer.full(heads.values))
        if past is not None:
            keys, key_buffer = None, None
            if heads.keys is not None:
                assert past.keys is not None
                keys, key_buffer = append(past.keys, past.buffers[0], heads.keys)
            values, value_buffer = append(past.values, past.buffers[1], heads.values)
            heads, buffers = Heads(heads.query, heads.scored, keys, values, heads.relative), (key_buffer, value_buffer)
        # a table of other distances than 0, 1, 2 .. would be read wrongly by the next call
        table = heads.relative if layout.from_zero else None if past is None else past.relative
        return self._attend(x, heads, layout, trace), KeyValues(heads.keys, heads.values, table, buffers)

    def keys_of(self, source: Tensor, layout: Layout) -> KeyValues:
        """Keys and values of source (B, M, E) for `over`, projected once for many queries; `layout` is of its keys."""
        return KeyValues(*self.project.keys_and_values(source, layout))

    def over(self, x: Tensor, known: KeyValues, layout: Layout, *, trace: Trace | None = None) -> Tensor:
        """Cross-attention of x (B, N, E) over keys and values that were projected before."""
        query, scored = self.project.queries(x, layout)
        return self._attend(x, Heads(query, scored, known.keys, known.values), layout, trace)

    def values_of(self, source: Tensor) -> Tensor:
        """Values (B, H, M, D) of source (B, M, E), which later layers of the model read."""
        return self.project.split(self.project.dropout(self.project.value(source)))

    def read_first_values(self) -> None:
        """Give the layer a share of the first layer's values."""
        self.first_share = nn.Parameter(torch.full((1,), 0.5))

    def past(self) -> DecayedSums | None:
        """The past before the first token; None: keys and values of no token."""
        return self.attend.past()

    @property
    def max_length(self) -> int | None:
        """The greatest number of keys, None if there is no limit."""
        return self.attend.max_length

    def use_shared_biases(self) -> None:
        """Read u and v of relative positions from the layout, as the layers of a model do that share one pair."""
        self.attend.use_shared_biases()
