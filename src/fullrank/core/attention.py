"""One block: attention and feed-forward, each with a residual connection, with the norm before or after.

project -> mix_qkv -> permute -> score -> mix_scores -> mask -> normalize -> mix -> dropout -> values -> gate -> merge
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import engine, registry
from .cache import CrossInput, DecayedSums, KeyValues, Past
from .config import AttentionConfig, DropoutConfig, ModelConfig, MultiLinearConfig, WeightedConfig
from .draws import dropout, make_dropout
from .embedding import Linear
from .engine import Problem
from .errors import ConfigError, InputError
from .layout import Layout
from .registry import register
from .stages import (
    Attend,
    Gate,
    Heads,
    HeadSize,
    Matrices,
    Mixing,
    Normalizer,
    Projection,
    Score,
    StochasticCrossHead,
    build_stage,
    check_inputs,
    make_norm,
    repeat_heads,
)
from .trace import LayerTrace, Trace


@register("attend", "weighted")
class WeightedValues(Attend):
    """O_i = dropout(mix(normalize(mask(mix_scores(score(Q_i, K_i)))))) V_i  (Mixhead Eq. 9, 10, 12).

    Heads (query (B, H, N, D), keys and values (B, H, M, D)) -> (B, H, N, D).
    Dropout comes after mixing, as in the released Mixhead code. `forward` is the definition. It asks faster engines first.
    stride: that of the layout, for attention with a pattern.
    """

    def __init__(self, config: WeightedConfig, size: HeadSize, dropout: float) -> None:
        super().__init__()
        self.size = size
        self.score: Score = build_stage("score", config.score, size)
        self.mix_scores: Mixing = build_stage("mix_scores", config.mix_scores, size)
        self.normalize: Normalizer = build_stage("normalize", config.normalize, size)
        self.mix: Mixing = build_stage("mix", config.mix, size)
        self.dropout = dropout
        self.stride = config.stride
        self.needs = (*self.score.needs, *self.mix.needs)
        self.idle = self.score.idle
        self.clamp_length = self.score.clamp_length
        self.shared_projection = self.score.shared_projection
        self.max_length = self.score.max_length

    def forward(self, heads: Heads, layout: Layout, trace: Trace | None = None) -> Tensor:
        score_notes, weight_notes = heads.notes
        scoring = self.mix_scores.compute_matrices(heads, score_notes, layout)
        mixing = self.mix.compute_matrices(heads, weight_notes, layout)
        reason = "a trace asks for attention weights"
        problem = self.problem(heads, layout, scoring, mixing) if trace is None else reason
        if (out := engine.load().attend(problem)) is not None:
            return self.mix.finish(out)
        scores = self.mix_scores.mix_scores(self.scores, heads, layout, scoring)
        if not layout.unrestricted:
            scores = scores.masked_fill(~layout.visible(), float("-inf"))
        weights = self.normalize(scores)
        mixed = self.mix.mix_maps(weights, mixing)
        if trace is not None:
            trace.layers.append(LayerTrace(weights, mixed, mixing.of_queries, self.mix.learned, heads.values))
        dropped = dropout(mixed, self.dropout) if self.training else mixed
        return self.mix.finish(dropped.to(heads.values.dtype) @ heads.values)

    def view(self, layout: Layout) -> Layout:
        if self.stride is not None:
            layout = replace(layout, stride=self.stride)
        return self.score.view(layout)

    def scores(self, heads: Heads, layout: Layout) -> Tensor:
        """Compute the scores before the mask, (B, H, N, M)."""
        scores: Tensor = self.score(*heads.select(self.score.needs), layout)
        scores = scores if layout.distance_bias is None else scores + layout.expand_bias()
        return scores.expand(heads.values.shape[0], -1, -1, -1)

    def remember(self, x: Tensor, scored: Tensor | None) -> tuple[Tensor | None, ...]:
        return self.mix_scores.remember(x, scored), self.mix.remember(x, scored)

    def problem(self, heads: Heads, layout: Layout, scoring: Matrices, mixing: Matrices) -> Problem | str:
        """Describe the call to engines, or give the reason why no engine computes it.

        Args:
            heads: those of the call.
            layout: positions of queries and keys, and the mask.
            scoring: matrices of `mix_scores`.
            mixing: matrices of `mix`.
        """
        stages = (self.score, self.mix_scores, self.mix, self.normalize)
        if reasons := [stage.reason for stage in stages if stage.reason is not None]:
            return reasons[0]
        query, keys, scale, distances = self.score.terms(*heads.select(self.score.needs), layout)
        p = self.dropout if self.training else 0.0
        matrix = None if mixing.of_queries is None else mixing.of_queries.to(heads.values.device)
        return Problem(
            query, keys, heads.values, matrix, distances, layout, scale, self.normalize.engine, p,
            scoring.of_queries, mixing.of_keys, scoring.of_keys, self.mix_scores.convolution,
        )  # fmt: skip


class Attention(nn.Module):
    """Multi-head attention whose stages are chosen by configuration (Mixhead Eq. 8 to 12).

        MultiHead(X) = Flatten(gate(attend(permute(project(X))))) W_O + b

    x (B, N, E), source (B, M, E) -> (B, N, E).  `source` defaults to x: self-attention, causal unless a layout says otherwise.
    With another source and no layout every query sees every key: cross-attention.
    Built from a `ModelConfig`, or from an `AttentionConfig` and the sizes it lacks. layer: its number in a stack, from 0.
    Multi-linear attention has a rank in place of heads: it does not read their number and size.
    Raises ConfigError if a size is missing or given twice.
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
        layer: int = 0,
    ) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "hidden_size": hidden_size, "num_attention_heads": num_attention_heads, "head_dim": head_dim,
        }  # fmt: skip
        if isinstance(config, ModelConfig):
            if {*sizes.values(), dropout, max_position_embeddings} != {None}:
                raise ConfigError(f"{type(self).__name__}: a ModelConfig has its own sizes; change them there")
            model = config
            config = model.attention
        elif isinstance(config, AttentionConfig):
            if isinstance(config, MultiLinearConfig):  # as in a model, heads play no part
                sizes |= {"num_attention_heads": 1, "head_dim": config.rank}
            drops = DropoutConfig(attention=dropout or 0.0)
            longest = 1024 if max_position_embeddings is None else max_position_embeddings
            model = ModelConfig(**sizes, dropout=drops, max_position_embeddings=longest, position="none")
            if problems := [*config.problems_of_heads("attention", *[model.num_attention_heads] * 2)]:
                raise ConfigError(*problems)
        else:
            raise ConfigError(f"{type(self).__name__}: give a ModelConfig or an AttentionConfig, given {config!r}")
        width = model.head_dim
        assert width is not None  # resolved by ModelConfig
        heads = model.num_attention_heads
        groups = heads // (model.num_key_value_heads or heads)
        size = HeadSize(heads, width, model.hidden_size, model.max_position_embeddings, groups, layer)
        weighted = config if isinstance(config, WeightedConfig) else WeightedConfig(bias=config.bias)
        self.hidden_size = size.hidden_size
        self.position = model.position
        self.same_text_stages = weighted.same_text_stages
        self.attend: Attend = registry.lookup("attend", config.kind)(config, size, model.dropout.attention)
        self.project = Projection(model, weighted, self.attend)
        self.permute = StochasticCrossHead(weighted.cross_head)
        self.gate: Gate = build_stage("gate", weighted.gate, size)
        self.merge = self.attend.merge(config.bias, self.gate.shares)

    def forward(
        self,
        x: Tensor,
        source: Tensor | KeyValues | None = None,
        layout: Layout | None = None,
        *,
        past: Past | None = None,
        pasts: list[Past] | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Attend from x to source, after `past`; queries mix heads exactly as in one full pass.

        Args:
            x: inputs of the queries (B, N, E).
            source: hidden states (B, M, E), which may end with x, or their keys and values, projected once for many queries.
            layout: covers past and source.
            past: record of earlier tokens, from `pasts` of the call before.
            pasts: a list that gets the past of the next call.
            trace: collects attention weights.

        Raises:
            InputError: x, source or layout have other sizes, or source is another text than the stages take.
            ValueError: positions are biases of distances (`alibi`, `t5`), which only the layout of a model holds.
        """
        source = x if source is None else source
        check_inputs(x, source, self.hidden_size)
        keys = source.length if isinstance(source, KeyValues) else source.shape[1]
        if past is not None:
            keys += past.length
        shape = (x.shape[1], keys)
        if layout is None:
            layout = Layout.of(*shape, causal=source is x, device=x.device)
        if layout.shape != shape:
            raise InputError(f"the layout is of {layout.shape} queries and keys, the call of {shape}")
        if self.same_text_stages and source is not x and not layout.causal:
            stages = ", ".join(f"{slot}: {name}" for slot, name in self.same_text_stages.items())
            raise InputError(f"attention.{stages} takes queries and keys of one text, given another source; use none")
        if self.position in ("alibi", "t5") and layout.distance_bias is None:
            raise ValueError(f"model.position {self.position}: a layer needs a layout that its model has placed")
        layout = self.attend.view(layout)
        after: Past | None
        if isinstance(past, DecayedSums):
            heads = self.project(x, source, layout)
            out, after = self.attend.attend_after(heads, past, layout)
        else:
            heads, after = self._heads(x, source, layout, past, pasts is not None)
            permuted = self.permute(heads.keys, heads.values, heads.relative)
            keys_of_heads, values, relative = (repeat_heads(part, self.project.groups) for part in permuted)
            heads = replace(heads, keys=keys_of_heads, values=values, relative=relative)
            expanded = self.project.mix_qkv.expand(heads, layout)
            out = self.project.mix_qkv.collapse(self.attend(*expanded, trace))
            out = self.gate(x, out, heads.values)
        if pasts is not None and after is not None:
            pasts.append(after)
        merged: Tensor = self.merge(out.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        return merged

    def _heads(
        self, x: Tensor, source: Tensor | KeyValues, layout: Layout, past: KeyValues | None, keeps: bool
    ) -> tuple[Heads, KeyValues | None]:
        if isinstance(source, KeyValues):
            query, scored = self.project.queries(x, layout)
            return Heads(query, scored, source.keys, source.values), source
        heads = self.project(x, source, layout, None if past is None else past.relative)
        heads = replace(heads, notes=self.attend.remember(source, heads.scored))
        if past is None and not keeps:
            return heads, None
        # the next call reads a table as that of the distances 0, 1, 2 .., so that no other is kept
        table = heads.relative if layout.from_zero else None if past is None else past.relative
        new = KeyValues(heads.keys, heads.values, table, heads.notes)
        after = new if past is None else past.append(new)
        return replace(heads, keys=after.keys, values=after.values, notes=after.notes), after


register("activation", "relu")(torch.relu)
register("activation", "gelu")(F.gelu)


@register("activation", "swiglu")
def swiglu(up: Tensor) -> Tensor:
    """Gate the second half of `up` by the first, through SiLU (SwiGLU, Shazeer 2020).  (..., 2F) -> (..., F)."""
    gate, value = up.chunk(2, dim=-1)
    return F.silu(gate) * value


class FeedForward(nn.Module):
    """FFN(x) = dropout(act(x W_1 + b_1)) W_2 + b_2.  x (B, N, E) -> (B, N, E), inner size F.

    With `swiglu` W_1 makes 2F columns: gate and value.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None  # resolved by ModelConfig
        inner = config.intermediate_size
        columns = 2 * inner if config.hidden_act == "swiglu" else inner
        self.activation: Callable[[Tensor], Tensor] = registry.lookup(
            "activation", config.hidden_act, "model.hidden_act"
        )
        self.up = Linear(config.hidden_size, columns, bias=config.mlp_bias)
        self.down = Linear(inner, config.hidden_size, bias=config.mlp_bias)
        self.dropout = make_dropout(config.dropout.activation, config.dropout.locked)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x))))


class Block(nn.Module):
    """Pre-norm: x + f(norm(x)); post-norm: norm(x + f(x)).  (B, N, E) -> (B, N, E).

    f is attention, then cross-attention if there is a source, then feed-forward.
    """

    def __init__(self, config: ModelConfig, cross: ModelConfig | None = None, layer: int = 0) -> None:
        super().__init__()
        self.attention = Attention(config, layer=layer)
        self.feed_forward = FeedForward(config)
        self.attention_norm = make_norm(config)
        self.feed_forward_norm = make_norm(config)
        self.dropout = make_dropout(config.dropout.residual, config.dropout.locked)
        self.pre_norm = config.norm == "pre"
        self.cross_attention: Attention | None = None
        if cross is not None:
            self.cross_attention = Attention(cross, layer=layer)
            self.cross_attention_norm = make_norm(config)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        *,
        past: Past | None = None,
        memory: Tensor | None = None,
        cross: CrossInput | None = None,
        pasts: list[Past] | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Map x by attention, cross-attention and feed-forward.

        Args:
            x: inputs of the block (B, N, E).
            layout: covers past or memory, and x.
            past: as of `Attention`.
            memory: inputs of the block at earlier tokens (B, M, E), which x attends to, too.
            cross: input of cross-attention; None without a source.
            pasts: as of `Attention`.
            trace: collects attention weights.
        """

        def attend(h: Tensor) -> Tensor:
            read = None
            if memory is not None:
                before = self.attention_norm(memory) if self.pre_norm else memory
                read = torch.cat((before.to(h.dtype), h), dim=1)
            return self.attention(h, read, layout, past=past, pasts=pasts, trace=trace)

        x = self._residual(x, self.attention_norm, attend)
        if cross is not None:
            assert self.cross_attention is not None
            attend_across = partial(self.cross_attention, source=cross[0], layout=cross[1], trace=trace)
            x = self._residual(x, self.cross_attention_norm, attend_across)
        return self._residual(x, self.feed_forward_norm, self.feed_forward)

    def _residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(layer(norm(x)))
        return norm(x + self.dropout(layer(x)))
