"""The layers of fullrank models: positions, the attention pipeline, multi-linear attention, blocks.

B batch, N queries, M keys, H heads, D size of a head, E width, R rank, C cores, P max_position_embeddings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from .cache_fullrank import NOTHING, Known
from .configuration_fullrank import Settings, stage
from .vocabulary_fullrank import Dropout

# -- who stands where -----------------------------------------------------------------------------------------------------


@dataclass
class View:
    """N queries over M keys, the same for all layers.

    queries (1 or B, N), keys (1 or B, M): positions in the text; padding takes none. mask (B, M): True for tokens, None without
    padding. visible (1 or B, 1, N, M): who is seen. plain: what a fused kernel needs instead of it, "causal" or "all".
    encodings (T, E): sinusoids of the distances `nearest`, nearest + 1, ..; biases: u and v that all layers share.
    mixed: False where Mixhead's released code leaves heads as they are.
    """

    queries: Tensor
    keys: Tensor
    visible: Tensor
    mask: Tensor | None = None
    causal: bool = True
    window: int | None = None
    plain: str | None = None
    encodings: Tensor | None = None
    biases: RelativeBiases | None = None
    mixed: bool = True

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, mask: Tensor | None, causal: bool, window: int | None = None) -> View:
        """A query that would see nothing (it is padding) sees itself, or everything: no weight becomes NaN."""
        n, m, device = queries.shape[1], keys.shape[1], keys.device
        window = None if window is None or m <= window else window
        own, index = torch.arange(m - n, m, device=device)[:, None], torch.arange(m, device=device)
        seen = (index <= own if causal else torch.ones(n, m, dtype=torch.bool, device=device))[None, None]
        if window is not None:
            seen = seen & (keys[:, None] > queries[..., None] - window)[:, None]
        if mask is not None:
            seen = seen & mask[:, None, None]
            seen = seen | (index == own) if causal else seen | ~seen.any(-1, keepdim=True)
        plain = None
        if mask is None and window is None:
            plain = "all" if not causal or n == 1 else "causal" if n == m else None
        return cls(queries, keys, seen, mask, causal, window, plain)

    @property
    def nearest(self) -> int:
        """The smallest distance that is needed; a causal query has no key after it."""
        return 0 if self.causal else 1 - self.queries.shape[1]

    @property
    def distances(self) -> int:
        """T."""
        return self.keys.shape[1] - self.nearest


def angles(positions: Tensor, size: int, theta: float, like: Tensor) -> Tensor:
    """p theta^(-2i / size) for 2i < size, made in fp64; fp32 without whole turns, or fp64 if `like` is."""
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    exponent = torch.arange(0, size, 2, device=positions.device, dtype=wide) / size
    angle = positions.to(wide)[..., None] * torch.exp(-math.log(theta) * exponent)
    return angle if like.dtype == torch.float64 else angle.remainder(2 * math.pi).to(torch.float32)


def sines_then_cosines(positions: Tensor, width: int, like: Tensor) -> Tensor:
    """Transformer-XL's sinusoids, (T,) -> (T, E)."""
    angle = angles(positions, width, 10000.0, like)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)[:, :width].to(like.dtype)


class RelativeBiases(nn.Module):
    """u and v (H, D)."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.zeros(heads, width))
        self.position_bias = nn.Parameter(torch.zeros(heads, width))


class Position(nn.Module):
    """What positions add to embeddings (B, N, E): sinusoids, learned vectors, or nothing; holds u and v that layers share."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.kind, self.width = config.position, config.hidden_size
        if self.kind == "learned":
            self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
        options = stage(config.attention.score)[1]
        self.clamp = options.get("clamp_length")
        self.places = config.max_position_embeddings if config.attention.kind == "multilinear" else None
        self.biases: RelativeBiases | None = None
        if self.kind == "relative" and options.get("shared_biases", True):
            heads, width = config.num_attention_heads, config.head_dim
            self.biases = RelativeBiases(*((1, config.attention.rank) if self.places else (heads, width)))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.kind == "sinusoidal":
            angle = angles(positions, self.width, 10000.0, x)
            return x + torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., : self.width].to(x.dtype)
        if self.kind == "learned":
            if int(positions.max()) >= len(self.weight):
                raise ValueError(f"a text of {int(positions.max()) + 1} tokens, but max_position_embeddings is {len(self.weight)}")
            return x + self.weight[positions]
        return x

    def encodings(self, nearest: int, count: int, like: Tensor) -> Tensor | None:
        """Sinusoids of the distances nearest, nearest + 1, ..; of the places P - 1, P - 2, .. in multi-linear attention."""
        if self.kind != "relative":
            return None
        if self.places is not None:
            return sines_then_cosines(torch.arange(self.places - 1, -1, -1, device=like.device), self.width, like)
        distances = torch.arange(nearest, nearest + count, device=like.device)
        if self.clamp is not None:
            distances = distances.clamp(-self.clamp, self.clamp)
        return sines_then_cosines(distances, self.width, like)


# -- scores and mixing ----------------------------------------------------------------------------------------------------


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
        biases = view.biases if self.biases is None else self.biases
        assert biases is not None
        scale = query.shape[-1] ** -0.5
        content, position = ((query + b[:, None]) * scale for b in (biases.content_bias, biases.position_bias))
        by_distance = position.to(query.dtype) @ relative.transpose(-1, -2)  # (B, H, N, T)
        places = view.queries[:, -1:] if self.as_published else view.queries
        row = (places[..., None] - view.keys[:, None] - view.nearest).clamp(0, relative.shape[1] - 1)
        row = row[:, None].expand(*query.shape[:3], keys.shape[2])
        return content.to(query.dtype) @ keys.transpose(-1, -2) + by_distance.gather(-1, row)


def _check(view: View, longest: int) -> None:
    """ValueError where a text is longer than a table of positions."""
    if (length := int(view.keys.max()) + 1) > longest:
        raise ValueError(f"a text of {length} tokens, but max_position_embeddings is {longest}")


class DenseSynthesizer(nn.Module):
    """A(n, m) = (W relu(Q(n)) + b)_m  (Tay et al. 2020)."""

    needs = ("scored",)

    def __init__(self, config: Settings, options: dict) -> None:
        super().__init__()
        self.idle = options.get("keep_key_projection", False)
        self.to_positions = nn.Linear(config.head_dim, config.max_position_embeddings)

    def forward(self, query: Tensor, keys: None, relative: None, view: View) -> Tensor:
        weight, bias = self.to_positions.weight, self.to_positions.bias
        _check(view, len(weight))
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
        _check(view, self.logits.shape[1])
        rows = view.queries.clamp_min(0)[..., None]
        return self.logits[:, rows, view.keys[:, None]].transpose(0, 1)  # (1 or B, H, N, M)


SCORES = {
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


# -- multi-linear attention -----------------------------------------------------------------------------------------------


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
        biases = view.biases if self.biases is None else self.biases
        assert biases is not None
        assert view.encodings is not None
        places = F.linear(view.encodings[: keys.shape[1]], self.weight).expand(len(keys), -1, -1)
        query = torch.cat((query + biases.content_bias[0], query + biases.position_bias[0]), -1)
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
        self.weight = None if decayed else nn.Parameter(torch.empty(longest, longest, width))
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
        _check(view, self.weight.shape[0])
        if int(view.keys.min()) < 0:
            raise ValueError("a position before the text, for which the output map of multi-linear attention has no row")
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


# -- attention layer and block --------------------------------------------------------------------------------------------


@dataclass
class Heads:
    """query (B, H, N, D) is as projected, for mixing; scored meets keys (B, H, M, D); relative (H, T, D) of distances."""

    query: Tensor | None
    scored: Tensor | None
    keys: Tensor | None
    values: Tensor
    relative: Tensor | None


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
        moved = [None if h is None else h.index_select(-3, order) for h in (heads.keys, heads.values, heads.relative)]
        return Heads(heads.query, heads.scored, *moved)


class Attention(nn.Module):
    """MultiHead(X) = Flatten(attend(cross_head(project(X)))) W_O + b."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.project = Projection(config)
        own = config.attention
        self.route = CrossHead(own.cross_head)
        if own.kind == "multilinear":
            self.attend, self.merge = MultiLinear(config), nn.Identity()
        else:
            self.attend = WeightedValues(config)
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


ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "swiglu": None}


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

        known: of earlier tokens. source (B, M, E), across: what a decoder reads, and who sees what of it; source_known: its keys
        and values.
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
            keys = None if keys is None else torch.cat((known.keys.to(keys.dtype), keys), dim=2)
        elif known.hidden is not None:
            before = self.attention_norm(known.hidden) if self.pre_norm else known.hidden
            keys, values = attention.heads_of(torch.cat((before.to(h.dtype), h), dim=1), view.keys)
        else:
            keys, values = attention.heads_of(h, new)
        relative = known.relative
        if attention.project.relative is not None and view.encodings is not None:
            relative = attention.project.relative(view.encodings)
        return Known(None, keys, values, relative)
