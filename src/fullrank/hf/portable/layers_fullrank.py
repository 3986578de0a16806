"""The layers of fullrank models: scores, mixing of heads, attention, feed-forward, blocks.

B batch, N queries, M keys, H heads, D size of a head, E width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from .cache_fullrank import NOTHING, Known
from .configuration_fullrank import Settings, stage
from .multilinear_fullrank import MultiLinear
from .positions_fullrank import Heads, RelativeBiases, View, angles, check_length, shared_or_own
from .vocabulary_fullrank import Dropout


class DotProduct(nn.Module):
    """A = Q K^T / sqrt(D)."""

    needs = ("scored", "keys")

    def __init__(self, config: Settings, options: dict) -> None:
        super().__init__()

    def forward(self, query: Tensor, keys: Tensor, relative: None, view: View) -> Tensor:
        return (query * query.shape[-1] ** -0.5) @ keys.transpose(-1, -2)


class XLRelative(nn.Module):
    """A(n, m) = ((Q(n) + u) . K(m)  +  (Q(n) + v) . R(p_n - p_m)) / sqrt(D)  (Dai et al. 2019, §3.3).

    `as_published` (Skip Cross-head) takes the distance of the key to the last token of the block instead.
    """

    needs = ("scored", "keys", "relative")

    def __init__(self, config: Settings, options: dict) -> None:
        super().__init__()
        self.as_published = options.get("as_published", False)
        own = not options.get("shared_biases", True)
        self.biases = RelativeBiases(config.num_attention_heads, config.head_dim) if own else None

    def forward(self, query: Tensor, keys: Tensor, relative: Tensor, view: View) -> Tensor:
        scale = query.shape[-1] ** -0.5
        content, position = ((query + bias[:, None]) * scale for bias in shared_or_own(self.biases, view))
        by_distance = position.to(query.dtype) @ relative.transpose(-1, -2)  # (B, H, N, T)
        places = view.queries[:, -1:] if self.as_published else view.queries
        row = (places[..., None] - view.keys[:, None] - view.nearest).clamp(0, relative.shape[1] - 1)
        row = row[:, None].expand(*query.shape[:3], keys.shape[2])
        return content.to(query.dtype) @ keys.transpose(-1, -2) + by_distance.gather(-1, row)


class DenseSynthesizer(nn.Module):
    """A(n, m) = (W relu(Q(n)) + b)_m  (Tay et al. 2020)."""

    needs = ("scored",)

    def __init__(self, config: Settings, options: dict) -> None:
        super().__init__()
        self.idle = options.get("keep_key_projection", False)
        self.to_positions = nn.Linear(config.head_dim, config.max_position_embeddings)

    def forward(self, query: Tensor, keys: None, relative: None, view: View) -> Tensor:
        weight, bias = self.to_positions.weight, self.to_positions.bias
        check_length(view, len(weight))
        columns, offsets = weight[view.keys][:, None], bias[view.keys][:, None, None]
        return torch.relu(query) @ columns.transpose(-1, -2) + offsets


class RandomSynthesizer(nn.Module):
    """A_i(n, m) = L_i(p_n, p_m), the same for every text."""

    needs = ()

    def __init__(self, config: Settings, options: dict) -> None:
        super().__init__()
        longest = config.max_position_embeddings
        self.logits = nn.Parameter(torch.empty(config.num_attention_heads, longest, longest))

    def forward(self, query: None, keys: None, relative: None, view: View) -> Tensor:
        check_length(view, self.logits.shape[1])
        rows = view.queries.clamp_min(0)[..., None]
        return self.logits[:, rows, view.keys[:, None]].transpose(0, 1)  # (1 or B, H, N, M)


SCORES: dict[str, Any] = {
    "dot_product": DotProduct,
    "relative": XLRelative,
    "dense_synthesizer": DenseSynthesizer,
    "random_synthesizer": RandomSynthesizer,
}


class Mixing(nn.Module):
    """Mixhead: P'_i(n) = sum_j m_ji(n) P_j(n) (Eq. 12). weights (B, H, N, M), query (B, H, N, D) as projected.

    m is `mixing` (A), or Q(n) `from_query` + `mixing` (B, `position_wise`); fixed random numbers; or 1/H (`average`).
    """

    def __init__(self, kind: str, heads: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "position_wise":
            self.from_query = nn.Parameter(torch.zeros(width, heads))
        if kind in ("position_wise", "position_independent"):
            self.mixing = nn.Parameter(torch.eye(heads))
        if kind == "random":
            self.register_buffer("mixing", torch.eye(heads))

    def forward(self, weights: Tensor, query: Tensor | None) -> Tensor:
        if self.kind == "average":
            return weights.mean(dim=1, keepdim=True).expand_as(weights)
        if self.kind == "position_wise":
            assert query is not None
            mixing = query.transpose(1, 2) @ self.from_query.to(query.dtype) + self.mixing.to(query.dtype)
            return torch.einsum("bjnm,bnji->binm", weights, mixing.to(weights.dtype))
        if self.kind == "none":
            return weights
        return torch.einsum("bjnm,ji->binm", weights, self.mixing.to(weights.dtype))


MIXES = ("none", "position_independent", "position_wise", "random", "average")


class WeightedValues(nn.Module):
    """score -> mask -> normalize -> mix -> dropout -> weighted values  (Mixhead Eq. 9, 10, 12, 21)."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        name, options = stage(config.attention.score)
        self.score = SCORES[name](config, options)
        self.normalize = stage(config.attention.normalize)[0]
        self.mix = Mixing(stage(config.attention.mix)[0], config.num_attention_heads, config.head_dim)
        self.p = config.dropout.attention

    def forward(self, heads: Heads, view: View, wants_weights: bool) -> tuple[Tensor, Tensor | None]:
        """(B, H, N, D), and the mixed weights (B, H, N, M) where they are wanted."""
        p = self.p if self.training else 0.0
        mixes = self.mix.kind != "none" and view.mixed
        if isinstance(self.score, DotProduct) and self.normalize == "softmax" and not mixes and not wants_weights:
            assert heads.scored is not None
            assert heads.keys is not None
            return F.scaled_dot_product_attention(
                heads.scored, heads.keys, heads.values,
                attn_mask=None if view.plain else view.visible, dropout_p=p, is_causal=view.plain == "causal",
            ), None  # fmt: skip
        scores = self.score(heads.scored, heads.keys, heads.relative, view)
        scores = scores.expand(heads.values.shape[0], -1, -1, -1).masked_fill(~view.visible, float("-inf"))
        if self.normalize == "sigsoftmax":
            scores = scores + F.logsigmoid(scores)
        weights = torch.softmax(scores, dim=-1)
        if mixes:
            weights = self.mix(weights, heads.query)
        return F.dropout(weights, p).to(heads.values.dtype) @ heads.values, weights if wants_weights else None


class RelativeKeys(nn.Module):
    """R = PE W_R: keys of distances (H, T, D)."""

    def __init__(self, heads: int, width: int, hidden_size: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * width, hidden_size))

    def forward(self, encodings: Tensor) -> Tensor:
        return F.linear(encodings, self.weight).unflatten(-1, (self.heads, -1)).transpose(0, 1)


class Projection(nn.Module):
    """Q, K, V = X W + b, split into heads, rotated where positions are rotary."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        own, heads, width = config.attention, config.num_attention_heads, config.head_dim
        needs, idle = ("scored", "keys"), False
        if own.kind == "multilinear":
            heads, width = 1, own.rank
        else:
            score, options = stage(own.score)
            needs, idle = SCORES[score].needs, options.get("keep_key_projection", False)
        self.shape, self.reads_keys = (heads, width), "keys" in needs
        self.theta = config.rope_theta if config.position == "rotary" else None
        asks = "scored" in needs or (own.kind != "multilinear" and stage(own.mix)[0] == "position_wise")

        def linear() -> nn.Linear:
            return nn.Linear(config.hidden_size, heads * width, bias=own.bias)

        self.query = linear() if asks else None
        self.key = linear() if self.reads_keys or idle else None
        self.value = linear()
        self.relative = RelativeKeys(heads, width, config.hidden_size) if "relative" in needs else None

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, self.shape).transpose(1, 2)  # (B, H, N, D)

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Half-split pairs as in Llama."""
        if self.theta is None:
            return heads
        angle = angles(positions, self.shape[1], self.theta, heads)[:, None]
        cos, sin = angle.cos(), angle.sin()
        low, high = heads.to(angle.dtype).chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


class CrossHead(nn.Module):
    """Stochastic cross-head attention: in training, with probability beta, heads of keys and values are permuted."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, heads: Heads) -> Heads:
        if not self.training or self.beta == 0:
            return heads
        count, device = heads.values.shape[1], heads.values.device
        drawn = torch.rand((), device=device) < self.beta
        order = torch.where(drawn, torch.randperm(count, device=device), torch.arange(count, device=device))
        keys, relative = (None if h is None else h.index_select(-3, order) for h in (heads.keys, heads.relative))
        return Heads(heads.query, heads.scored, keys, heads.values.index_select(-3, order), relative)


class Attention(nn.Module):
    """MultiHead(X) = Flatten(attend(cross_head(project(X)))) W_O + b."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.project: Any = Projection(config)
        own = config.attention
        self.route = CrossHead(own.cross_head)
        self.attend: Any = MultiLinear(config) if own.kind == "multilinear" else WeightedValues(config)
        self.merge: nn.Module = nn.Identity()
        if own.kind != "multilinear":
            self.merge = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=own.bias)

    def heads_of(self, source: Tensor, positions: Tensor) -> tuple[Tensor | None, Tensor]:
        """Keys and values (B, H, M, D) of source (B, M, E)."""
        project = self.project
        keys = project.rotated(project.split(project.key(source)), positions) if project.reads_keys else None
        return keys, project.split(project.value(source))

    def forward(self, x: Tensor, known: Known, view: View, wants_weights: bool) -> tuple[Tensor, Tensor | None]:
        """x (B, N, E) over keys and values -> (B, N, E), and attention weights (B, H, N, M) where they are wanted."""
        project = self.project
        relative = None if known.relative is None else known.relative[:, : view.distances]
        assert known.values is not None
        query = None if project.query is None else project.split(project.query(x))
        scored = None if query is None else project.rotated(query, view.queries)
        heads = self.route(Heads(query, scored, known.keys, known.values, relative))
        out, weights = self.attend(heads, view, wants_weights)
        return self.merge(out.transpose(1, 2).flatten(2)), weights


class FeedForward(nn.Module):
    """FFN(x) = dropout(act(x W_1 + b_1)) W_2 + b_2; swiglu has gate and value side by side in W_1."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.kind, inner = config.hidden_act, config.intermediate_size
        self.up = nn.Linear(config.hidden_size, 2 * inner if self.kind == "swiglu" else inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)
        self.dropout = Dropout(config.dropout.activation, config.dropout.locked)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.kind == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = ACTIVATIONS[self.kind](x)
        return self.down(self.dropout(x))


ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu}


class Block(GradientCheckpointingLayer):
    """Pre-norm: x + f(norm(x)); post-norm: norm(x + f(x)); f is attention, cross-attention if there is a source, FFN."""

    def __init__(self, config: Settings, cross: Settings | None = None) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.cross_attention = None if cross is None else Attention(cross)
        if cross is not None:
            self.cross_attention_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = Dropout(config.dropout.residual, config.dropout.locked)
        self.pre_norm = config.norm == "pre"

    def forward(
        self,
        x: Tensor,
        view: View,
        known: Known = NOTHING,
        source: Tensor | None = None,
        across: View | None = None,
        source_known: Known = NOTHING,
        wants_weights: bool = False,
    ) -> tuple[Tensor, Known, Known, tuple[Tensor | None, Tensor | None]]:
        """x (B, N, E) -> (B, N, E); what the next call may know of its tokens and of the source; attention weights.

        known: of earlier tokens. source (B, M, E), across: what a decoder reads, and who sees what of it; source_known: its
        keys and values.
        """
        h = self.attention_norm(x) if self.pre_norm else x
        made = self._made(h, view, known)
        out, weights = self.attention(h, made, view, wants_weights)
        x = self._added(x, out, self.attention_norm)
        seen: Tensor | None = None
        if self.cross_attention is not None and source is not None:
            assert across is not None
            h = self.cross_attention_norm(x) if self.pre_norm else x
            if source_known.values is None:
                source_known = Known(None, *self.cross_attention.heads_of(source, across.keys))
            out, seen = self.cross_attention(h, source_known, across, wants_weights)
            x = self._added(x, out, self.cross_attention_norm)
        h = self.feed_forward_norm(x) if self.pre_norm else x
        return self._added(x, self.feed_forward(h), self.feed_forward_norm), made, source_known, (weights, seen)

    def _added(self, x: Tensor, out: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(out)
        return x if self.pre_norm else norm(x)

    def _made(self, h: Tensor, view: View, known: Known) -> Known:
        """Keys and values of earlier tokens, projected before or from their hidden states, then those of h (B, N, E)."""
        attention, new = self.attention, view.keys[:, -h.shape[1] :]
        if known.values is not None:
            keys, values = attention.heads_of(h, new)
            values = torch.cat((known.values.to(values.dtype), values), dim=2)
            if keys is not None and known.keys is not None:
                keys = torch.cat((known.keys.to(keys.dtype), keys), dim=2)
        elif known.hidden is not None:
            before = self.attention_norm(known.hidden) if self.pre_norm else known.hidden
            keys, values = attention.heads_of(torch.cat((before.to(h.dtype), h), dim=1), view.keys)
        else:
            keys, values = attention.heads_of(h, new)
        relative = known.relative
        if attention.project.relative is not None and view.encodings is not None:
            relative = attention.project.relative(view.encodings)
        return Known(None, keys, values, relative)
