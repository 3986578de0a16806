"""Stages of attention: projection to heads, the permutation of heads, scores, normalisers and the mixing of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import draws, registry, released
from .cache import DecayedSums, KeyValues
from .config import ModelConfig, Stage, WeightedConfig, stage_name, stage_options
from .draws import make_dropout
from .embedding import Linear, RelativeBiases, RelativeKeys, Rotary, encodings_of, serves, sines_then_cosines
from .engine import Distances
from .errors import ConfigError, InputError
from .kinds import DotProductOptions, LearnedMixingOptions, RelativeOptions
from .layout import Layout, measure_distances
from .registry import register
from .trace import Trace


class AttentionStage(nn.Module):
    """Base of the stages of attention, built from `(config, size)`.

    config: the stage's `Config`, None without one. size: the heads that it is built for.
    no_weight_decay: its parameters never decay, because that would pull them towards zero, not towards plain attention.
    reason: why no engine computes attention with this stage; None if engines do.
    """

    Config: ClassVar[type | None] = None
    reason: str | None = None
    no_weight_decay: ClassVar[bool] = False

    def __init__(self, config: Any = None, size: HeadSize | None = None) -> None:
        super().__init__()
        self.size: Any = size


@dataclass(frozen=True)
class HeadSize:
    """H attention heads of D dimensions over a model of width E, sequences of at most `max_length` tokens.

    groups: H / G, the heads of queries that read each of the G heads of keys and values.
    layer: the number of the layer in its stack, from 0.
    """

    num_heads: int
    head_dim: int
    hidden_size: int
    max_length: int
    groups: int = 1
    layer: int = 0


def build_stage(slot: str, stage: Stage, size: HeadSize) -> Any:
    """Build the module that `stage` names.

    Args:
        slot: the slot of attention, such as `mix`.
        stage: a name, or a name with options; these fill the nested `Config` of the class, if it has one.
        size: the heads that it is built for.

    Raises:
        ConfigError: the name is unknown, or its class extends no stage.
    """
    key = f"model.attention.{slot}"
    kind: Any = registry.lookup(slot, stage_name(stage), key)
    if not (isinstance(kind, type) and issubclass(kind, AttentionStage)):
        raise ConfigError(
            f"{key}: '{stage_name(stage)}' is registered as {kind!r}, which does not extend the base class of its slot, "
            "such as `Mixing` for `mix` (docs/add_a_mechanism.md lists them)"
        )
    built = kind(kind.Config(**stage_options(stage)) if kind.Config else None, size)
    built.size = size  # also of a class whose constructor did not hand it on
    return built


@dataclass(frozen=True)
class Heads:
    """The tensors that attention works on; None stands for one that no stage of the layer reads.

    query (B, H, N, D): the query as projected, which mixing reads.
    scored (B, H, N, D): the query that meets the keys.
    keys, values (B, H, M, D): there are always values.
    relative (H, T, D): keys of the distances in `layout.spans`.
    notes: what `mix_scores` and `mix` remember of each key's token, (B, C, M, F) each. The last N are tokens of the queries.
    Grouped queries share G heads of keys, values and keys of distances. These are projected, kept and permuted as G heads, and
    repeated before the score (`repeat_heads`).
    """

    query: Tensor | None
    scored: Tensor | None
    keys: Tensor | None
    values: Tensor
    relative: Tensor | None = None
    notes: tuple[Tensor | None, ...] = (None, None)

    def select(self, names: tuple[str, ...]) -> list[Any]:
        """Return the fields of these names, in their order."""
        return [getattr(self, name) for name in names]


register("norm_type", "layer_norm")(nn.LayerNorm)
register("norm_type", "rms_norm")(nn.RMSNorm)


def make_norm(config: ModelConfig) -> nn.Module:
    """Build a norm over the width E, before or after a sub-layer or after the last layer.

    LayerNorm, or RMSNorm: x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019).
    """
    kind = registry.lookup("norm_type", config.norm_type)
    norm: nn.Module = kind(config.hidden_size, eps=config.layer_norm_eps)
    return norm


class Attend(nn.Module):
    """Contract of the slot `attend`, built from `(config: AttentionConfig, size: HeadSize, dropout: float)`.

    Heads -> (B, H, N, D').
    size: of the heads that are projected.
    needs: the fields of `Heads` that are read.
    idle: fields that are allocated, but never trained or computed.
    clamp_length, shared_projection: as in `Score`.
    max_length: the greatest number of keys, None without limit.
    sees_future: the causal mask is left out.
    """

    size: HeadSize
    needs: tuple[str, ...] = ("scored", "keys")
    idle: tuple[str, ...] = ()
    clamp_length: int | None = None
    shared_projection: bool = False
    max_length: int | None = None
    sees_future: bool = False

    def forward(self, heads: Heads, layout: Layout, trace: Trace | None = None) -> Tensor:
        """Attend from queries to keys.

        Args:
            heads: the fields that `needs` names, and values.
            layout: positions of queries and keys, and the mask.
            trace: collects attention weights, where there are any.

        Returns:
            Outputs (B, H, N, D').
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def merge(self, bias: bool, shares: int = 1) -> nn.Module:
        """Build the layer that follows: W_O over the heads side by side, (B, N, H D / shares) -> (B, N, E)."""
        width = self.size.num_heads * self.size.head_dim // shares
        return Linear(width, self.size.hidden_size, bias=bias)

    def view(self, layout: Layout) -> Layout:
        """Return the layout as this class reads it."""
        return layout

    def past(self) -> DecayedSums | None:
        """Return the sums before the first token, empty; None for a class that keeps keys and values."""
        return None

    def attend_after(self, heads: Heads, past: DecayedSums, layout: Layout) -> tuple[Tensor, DecayedSums]:
        """Attend from new tokens to sums over earlier ones and to each other.

        Only a class whose `past` gives sums has it.

        Args:
            heads: those of the new tokens.
            past: sums over the earlier tokens.
            layout: covers both.

        Returns:
            Outputs (B, H, N, D'), and the sums for the next call.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no sums")

    def remember(self, x: Tensor, scored: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute what stages keep of the tokens of the keys (`Heads.notes`), from their inputs x and queries."""
        return None, None


QUERY, KEY, VALUE = range(3)  # parts of what is projected


@register("mix_qkv", "none")
class ProjectedMixing(AttentionStage):
    """Contract of a mixing of projected heads, before norms, rotation, scores and cache.

    Queries (B, H, N, D), keys and values (B, H, M, D) are mapped part by part. With `pseudo_heads` P > 1 they become
    (B, H, N, P, D), P tokens at each position. `expand` lays these side by side for attention. `collapse` joins its outputs.
    This class leaves heads as they are.
    """

    no_weight_decay = True
    pseudo_heads: int = 1

    def map_heads(self, heads: Tensor, part: int) -> Tensor:
        """Map all heads of a part: QUERY, KEY or VALUE."""
        return heads

    def rotate(self, heads: Tensor, rotary: Rotary, positions: Tensor, layout: Layout) -> Tensor:
        """Rotate mapped heads by their positions.

        Args:
            heads: mapped queries or keys.
            rotary: the rotation of the model.
            positions: those of the layout; the tokens stand at the last ones of them.
            layout: may hold tables of the rotation, made once for all layers.

        Returns:
            Rotated heads, of the same shape.
        """
        return rotary(heads, positions, layout.rotation)

    def expand(self, heads: Heads, layout: Layout) -> tuple[Heads, Layout]:
        """Turn heads and layout into those that attention computes."""
        return heads, layout

    def collapse(self, out: Tensor) -> Tensor:
        """Join the outputs of attention to (B, H, N, D)."""
        return out

    def multiply_adds(self) -> tuple[int, int]:
        """Count the multiply-adds of a token's query and output, and of its key and value."""
        return 0, 0


@register("gate", "none")
class Gate(AttentionStage):
    """Contract of what acts on the heads' outputs; this class leaves them as they are.

    shares: the number of heads that become one; H / shares heads are merged.
    """

    shares: ClassVar[int] = 1

    def forward(self, x: Tensor, outputs: Tensor, values: Tensor) -> Tensor:
        """Map the heads' outputs.

        Args:
            x: inputs of the queries (B, N, E).
            outputs: outputs of attention (B, H, N, D).
            values: (B, H, M, D); the last N are those of the queries' own tokens.

        Returns:
            Outputs (B, H / shares, N, D).
        """
        return outputs

    def multiply_adds(self) -> int:
        """Count the multiply-adds of a token: one for each entry of a matrix."""
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        return sum(matrix.numel() for matrix in matrices)


def multiply(equation: str, heads: Tensor, parameter: Tensor) -> Tensor:
    """Multiply by `torch.einsum` in the dtype of the heads, for parameters that are kept in another one.

    Args:
        equation: as of `torch.einsum`, the heads first.
        heads: a tensor in the dtype of the call.
        parameter: a tensor in its own dtype.

    Returns:
        The product in the dtype of the heads.
    """
    return torch.einsum(equation, heads, parameter.to(heads.dtype))


class SeparateLinear(Linear):
    """A linear layer that is drawn apart: no other parameter starts differently because of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with draws.draw_apart():
            super().__init__(*args, **options)


class Projection(nn.Module):
    """Q, K, V = X W + b, split into heads (Mixhead Eq. 8), Q and K normed if asked for, then rotated; R = PE W_R.

    x (B, N, E), source (B, M, E) -> query, scored (B, H, N, D), keys, values (B, G, M, D) and relative (G, T, D).
    With `shared_projection` R = PE W_K, and PE(0) W_Q is added to the queries that meet keys.
    Dropout comes first, then `mix_qkv`, then the norms, then the rotation.
    With `qk_norm` all heads of queries share a norm over the D dimensions of a head, and all heads of keys another (Qwen3).
    Keys of distances have no norm.
    Only what the stages need is allocated. A query that only mixing reads starts from random numbers of its own. So all other
    parameters start as they do without mixing.
    """

    def __init__(self, model: ModelConfig, config: WeightedConfig, attend: Attend) -> None:
        super().__init__()
        size = attend.size
        needs = attend.needs
        bias = config.bias
        inner = size.num_heads * size.head_dim
        shared = inner // size.groups
        self.num_heads = size.num_heads
        self.head_dim = size.head_dim
        self.groups = size.groups
        self.reads_keys = "keys" in needs
        self.query: nn.Linear | None = None
        if "scored" in needs:
            self.query = Linear(size.hidden_size, inner, bias=bias)
        elif "query" in needs:
            self.query = SeparateLinear(size.hidden_size, inner, bias=bias)
        self.key: nn.Linear | None = None
        if self.reads_keys or "keys" in attend.idle:
            self.key = Linear(size.hidden_size, shared, bias=bias).requires_grad_(self.reads_keys)
        self.value = Linear(size.hidden_size, shared, bias=bias)
        self.relative: RelativeKeys | None = None
        self.reads_distances = "relative" in needs
        self.shared_projection = attend.shared_projection
        self.clamp_length = attend.clamp_length
        if self.reads_distances and not self.shared_projection:
            self.relative = RelativeKeys(size.num_heads // size.groups, size.head_dim, size.hidden_size)
        make_head_norm = partial(nn.RMSNorm, size.head_dim, eps=model.layer_norm_eps)
        self.query_norm = make_head_norm() if config.qk_norm else None
        self.key_norm = make_head_norm() if config.qk_norm else None
        self.rotary = Rotary(size.head_dim, model.rope_theta) if model.position == "rotary" else None
        self.mix_qkv: ProjectedMixing = build_stage("mix_qkv", config.mix_qkv, size)
        drops = model.dropout
        self.dropout = make_dropout(drops.projection, drops.locked)
        self.distance_dropout = make_dropout(drops.projection, drops.locked, shared=True)

    def layers(self) -> list[nn.Linear]:
        """List the layers of queries, keys and values that there are, values last."""
        return [layer for layer in (self.query, self.key, self.value) if layer is not None]

    def split(self, x: Tensor) -> Tensor:
        """Split the last dimension into heads."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or G, N, D)

    def forward(self, x: Tensor, source: Tensor, layout: Layout, relative: Tensor | None = None) -> Heads:
        """Project x and source to heads; keys, values and keys of distances are grouped.

        Args:
            x: inputs of the queries (B, N, E).
            source: inputs of the keys and values (B, M, E).
            layout: places the queries; the keys projected here are the last ones of it.
            relative: keys of the distances 0, 1, .. of an earlier call (G, T or more, D); None computes them.
        """
        query, scored = self.queries(x, layout)
        keys, values = self.keys_and_values(source, layout)
        if relative is not None and relative.dtype != values.dtype:
            relative = None  # made in another precision
        if self.reads_distances and not serves(relative, layout):
            encodings = encodings_of(layout, self.clamp_length, x)
            relative = (
                self._project_as_tokens(encodings, self.key) if self.relative is None else self.relative(encodings)
            )
        if self.shared_projection:
            assert scored is not None
            if layout.encodings is None:
                zero = sines_then_cosines(torch.zeros(1, device=x.device), x.shape[-1], x)
            else:
                zero = layout.encodings[-layout.spans[0][0]][None]
            scored = scored + self._project_as_tokens(zero, self.query)
        return Heads(query, scored, keys, values, relative)

    def _project_as_tokens(self, encodings: Tensor, layer: Any) -> Tensor:
        """Project encodings of distances (T, E) to keys (G, T, D) or queries (H, T, D), by the layer of tokens."""
        projected = self.distance_dropout(layer(encodings)[None])
        return self.split(projected)[0]

    def queries(self, x: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        """Project x (B, N, E) to queries; return them as projected, then normed and rotated, both None without a projection."""
        if self.query is None:
            return None, None
        query = self._make_heads(self.query, x, QUERY)
        return query, self._norm_and_rotate(query, self.query_norm, layout.query_positions, layout)

    def keys_and_values(self, source: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor]:
        """Project source (B, M, E) to keys and values, the last ones of `layout`."""
        keys: Tensor | None = None
        if self.key is not None and self.reads_keys:
            mapped = self._make_heads(self.key, source, KEY)
            rotated = self._norm_and_rotate(mapped, self.key_norm, layout.key_positions, layout)
            keys = rotated.flatten(3)  # P tokens at a position are one key in a cache
        values = self._make_heads(self.value, source, VALUE)
        return keys, values.flatten(3)

    def _make_heads(self, layer: nn.Linear, x: Tensor, part: int) -> Tensor:
        heads = self.split(self.dropout(layer(x)))
        return self.mix_qkv.map_heads(heads, part)

    def _norm_and_rotate(self, heads: Tensor, norm: nn.Module | None, positions: Tensor, layout: Layout) -> Tensor:
        normed = heads if norm is None else norm(heads)
        return normed if self.rotary is None else self.mix_qkv.rotate(normed, self.rotary, positions, layout)


def check_inputs(x: Tensor, source: Tensor | KeyValues, hidden_size: int) -> None:
    """Check what a layer projects.

    Args:
        x: inputs of the queries (B, N, E).
        source: inputs of the keys and values (B, M, E), or these as they were projected.
        hidden_size: the width E of the layer.

    Raises:
        InputError: inputs have another shape, or are no floating-point numbers.
    """
    for name, hidden in (("x", x), ("source", source)):
        if isinstance(hidden, Tensor) and not (
            hidden.dim() == 3 and hidden.shape[::2] == (len(x), hidden_size) and hidden.is_floating_point()
        ):
            description = f"given {hidden.dtype} {tuple(hidden.shape)}"
            raise InputError(f"{name} must be numbers (B, N, {hidden_size}), one B for x and source; {description}")


def repeat_heads(heads: Tensor | None, groups: int) -> Any:
    """Repeat each head of keys or values for every query head that reads it.

    (.., G, M, D) -> (.., H, M, D) with H = G groups (grouped queries, Ainslie et al. 2023); None stays None.
    Query head i reads head i // groups.
    """
    return heads if heads is None or groups == 1 else heads.repeat_interleave(groups, dim=-3)


class StochasticCrossHead(nn.Module):
    """Stochastic cross-head attention (Skip Cross-head §2.2).

    In training, with probability `beta` per layer and pass, one permutation of the heads is drawn. Keys, relative keys and
    values are permuted alike. In evaluation no heads are permuted. Queries stay where they are, and so do the biases u and v of
    relative attention, which are added to queries. With grouped queries the G shared heads are permuted.
    heads: (..., H, M, D) each, None for what a score does not read -> the same shapes.
    """

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, *heads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = [tensor for tensor in heads if tensor is not None]
        if self.beta == 0 or not self.training:
            return heads
        count = tensors[0].shape[-3]
        device = tensors[0].device
        if not torch.compiler.is_compiling() and draws.current is not None:
            drawn = draws.current.permutation(count, self.beta)
            if drawn is None:
                return heads
            order = drawn.to(device, non_blocking=True)
        else:
            permuted = torch.rand((), device=device) < self.beta  # stays a tensor: no branch, no synchronisation
            others = torch.randperm(count, device=device)
            order = torch.where(permuted, others, torch.arange(count, device=device))
        return tuple(None if tensor is None else tensor.index_select(-3, order) for tensor in heads)


class Score(AttentionStage):
    """Contract of a score, called with the heads that it `needs` and the layout.

    It returns (B, H, N, M) before the mask, or (1, H, N, M) if all sequences have the same scores. One that engines compute
    gives its `terms` alone.
    needs: the fields of `Heads` that it reads, in the order of its arguments; nothing else is projected.
    idle: fields that are allocated all the same, and never trained.
    max_length: the greatest M; None if there is no limit.
    clamp_length: keys that are farther count as that far, for scores that read distances.
    biases: u and v of relative scores.
    shared_projection: distances are projected as tokens are, and queries have u = v, the query of distance 0, added.
    """

    reason: str | None = "no engine knows this score"
    needs: ClassVar[tuple[str, ...]] = ("scored", "keys")
    idle: tuple[str, ...] = ()
    max_length: int | None = None
    clamp_length: int | None = None
    biases: RelativeBiases | None
    shared_projection: bool = False

    def view(self, layout: Layout) -> Layout:
        """Return the layout as the score reads it."""
        return layout

    def terms(self, *needed: Any) -> tuple[Tensor, Tensor, float, Distances | None]:
        """Return query, keys, scale and distances of the score as an engine reads it (`Problem`).

        The arguments are those of a call.
        """
        raise NotImplementedError(f"{type(self).__name__} must define terms, or forward")

    def forward(self, *needed: Any) -> Tensor:
        """Compute the scores A (B, H, N, M) before the mask, of content, or of content and distance.

        A(n, m) = s Q(n) . K(m),   with distances  s ((Q(n) + u) . K(m) + (Q(n) + v) . R(p_n - p_m))
        """
        query, keys, scale, distances = self.terms(*needed)
        if distances is None:
            return (query * scale) @ keys.mT
        content = (query + distances.u[:, None]) * scale
        position = (query + distances.v[:, None]) * scale
        by_distance = position.to(query.dtype) @ distances.keys.mT  # (B, H, N, T)
        layout = needed[-1]
        apart = measure_distances(layout.origins, layout.key_positions)
        rows = layout.distance_rows(apart)
        index = rows[:, None].expand(*query.shape[:3], -1)
        return content.to(query.dtype) @ keys.mT + by_distance.gather(-1, index)


@register("score", "dot_product")
class DotProduct(Score):
    """Scaled dot product (Mixhead Eq. 9).

        A_i = Q_i K_i^T / sqrt(D),   or times `scale`

    query (B, H, N, D), keys (B, H, M, D) -> (B, H, N, M).
    """

    reason = None
    Config = DotProductOptions

    def __init__(self, config: DotProductOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.scale = config.scale or size.head_dim**-0.5

    def terms(self, query: Tensor, keys: Tensor, layout: Layout) -> tuple[Tensor, Tensor, float, None]:
        return query, keys, self.scale, None


@register("score", "relative")
class XLRelative(Score):
    """Transformer-XL's score of content and distance (Dai et al. 2019, §3.3; Skip Cross-head app. A, Eq. 15).

        A(n, m) = ((Q(n) + u) . K(m)  +  (Q(n) + v) . R(p_n - p_m)) / sqrt(D)

    query (B, H, N, D), keys (B, H, M, D), relative (H, T, D): the keys R of the distances in `layout.spans` -> (B, H, N, M).
    p are positions in the text: every token between query and key counts, seen or not.
    `shared_biases`: u and v are one pair for all layers of a model, stored with it once, as in Transformer-XL's base models.
    Otherwise each layer has its own, and so has a layer without a model.
    `clamp_length`: farther keys count as that far.
    `shared_projection`: there is no W_R and no u, v of its own; R(p) = PE(p) W_K and u = v = PE(0) W_Q, as in the published
    Penn Treebank code of Transformer-XL.
    `as_published`: the distance to the last query of the block, for comparison only (`released.FromLast`).
    """

    needs = ("scored", "keys", "relative")

    Config = RelativeOptions

    def __init__(self, config: RelativeOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.scale = size.head_dim**-0.5
        self.clamp_length = config.clamp_length
        self.as_published = config.as_published
        self.reason = "no engine knows relative scores as_published" if config.as_published else None
        self.shared_projection = config.shared_projection
        self.biases: RelativeBiases | None = None
        if not self.shared_projection:
            self.biases = RelativeBiases(size.num_heads, size.head_dim)

    def view(self, layout: Layout) -> Layout:
        return released.FromLast(**vars(layout)) if self.as_published else layout

    def terms(
        self, query: Tensor, keys: Tensor, relative: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor, float, Distances]:
        if self.biases is None:  # the query has them already
            u = v = query.new_zeros(query.shape[1], query.shape[3])
        else:
            u, v = self.biases.content_bias, self.biases.position_bias
        return query, keys, self.scale, Distances(relative[:, : layout.distances], u, v)


class Normalizer(AttentionStage):
    """Contract of a normaliser. engine: the name by which engines know what it computes, if they do."""

    reason: str | None = "no engine knows this normaliser"
    engine: ClassVar[str] = ""


@register("normalize", "softmax")
class Softmax(Normalizer):
    """softmax(a)_m = exp(a_m) / sum_k exp(a_k)  (Mixhead Eq. 9)."""

    reason = None
    engine = "softmax"

    def forward(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)


@register("normalize", "sigsoftmax")
class SigSoftmax(Normalizer):
    """Sigsoftmax (Mixhead Eq. 21; Kanai et al. 2018).

        sigsoftmax(a)_m = exp(a_m) sigmoid(a_m) / sum_k exp(a_k) sigmoid(a_k) = softmax(a + log sigmoid(a))_m

    The right-hand form never overflows. Unlike softmax it is not invariant to a shift of `a`, so the maximum must not be
    subtracted before the sigmoid (the paper's footnote 5 leaves that open).
    """

    reason = None
    engine = "sigsoftmax"

    def forward(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores + F.logsigmoid(scores), dim=-1)


def mix_heads(weights: Tensor, matrix: Tensor | None, of_keys: Tensor | None = None) -> Tensor:
    """Mix the heads of attention weights (Mixhead Eq. 12).

        P'_i(n, m) = sum_j M_ji(n) P_j(n, m),   with K of each key  sum_j (M_ji(n) + K_ji(m)) P_j(n, m)

    Args:
        weights: P (B, H, N, M).
        matrix: M, (H, H) or (B, N, H, H); None for M = I.
        of_keys: K (B, M, H, H), added to M; None without.

    Returns:
        Mixed weights P' (B, H, N, M).

    Raises:
        ValueError: the matrix is of other heads, or of other queries.
    """
    if of_keys is not None:
        return mix_heads(weights, matrix) + torch.einsum("bjnm,bmji->binm", weights, of_keys.to(weights))
    if matrix is None:
        return weights
    heads, queries = weights.shape[1:3]
    if matrix.shape[-2:] != (heads, heads) or (matrix.dim() == 4 and matrix.shape[1] != queries):
        raise ValueError(
            f"a mixing of shape {tuple(matrix.shape)} does not fit weights (B, H, N, M) {tuple(weights.shape)}: it must be "
            "(H, H) or (B, N, H, H)"
        )
    equation = "bjnm,ji->binm" if matrix.dim() == 2 else "bjnm,bnji->binm"
    return torch.einsum(equation, weights, matrix.to(weights))


class Matrices(NamedTuple):
    """The matrices that mix heads in a call: M (H, H) or (B, N, H, H), None for I, and one that each key adds, (B, M, H, H)."""

    of_queries: Tensor | None
    of_keys: Tensor | None = None


class Mixing(AttentionStage):
    """Contract of a mixing of the heads' maps: of weights (slot `mix`), or of scores before the mask (`mix_scores`).

    A mixing is its matrices, or else it gives `reason` and `mix_maps`, and the definition computes it.

    needs: ("query",) if the matrix depends on the query; otherwise no query has to be projected for it.
    starts_plain: attention is plain before training, if no option says otherwise.
    injectable: it goes into models of Hugging Face, whose weights alone are mixed.
    """

    needs: ClassVar[tuple[str, ...]] = ("query",)
    starts_plain: ClassVar[bool] = True
    no_weight_decay = True
    injectable: ClassVar[bool] = True

    def remember(self, x: Tensor, scored: Tensor | None) -> Tensor | None:
        """Compute notes of each token (B, C, N, F) from its inputs x (B, N, E) and queries.

        `compute_matrices` gets the notes of all keys back.
        """
        return None

    def compute_matrices(self, heads: Heads, notes: Tensor | None, layout: Layout) -> Matrices:
        """Compute the matrices of a call.

        Args:
            heads: those of the call; their query is read where `needs` says so.
            notes: what `remember` returned for the tokens of all keys (B, C, M, F); None without.
            layout: positions of queries and keys.

        Returns:
            The matrices of queries and keys.
        """
        return Matrices(self.matrix(heads.query))

    @property
    def convolution(self) -> Tensor | None:
        """The kernel (H, Q, C) of a convolution of scores, in place of matrices."""
        return None

    def matrix(self, query: Tensor | None) -> Tensor | None:
        """Return M as (H, H), or (B, N, H, H) where it depends on the query (B, H, N, D); None is M = I.

        The query is the projected one with its bias, before scale and rotation. Without a query, a matrix that depends on it
        is the part that all positions share.
        """
        raise NotImplementedError(f"{type(self).__name__} has no matrix(query)")

    def mix_maps(self, maps: Tensor, matrices: Matrices) -> Tensor:
        """Mix maps P (B, H, N, M) to P' (B, H, N, M) by the matrices of the call."""
        return mix_heads(maps, *matrices)

    def mix_scores(
        self, score: Callable[[Heads, Layout], Tensor], heads: Heads, layout: Layout, matrices: Matrices
    ) -> Tensor:
        """Compute the mixed scores of a call, before the mask.

        What is read of hidden keys must not reach the scores of visible ones.

        Args:
            score: gives the scores (B, H, N, M) of any heads and layout.
            heads: those of the call.
            layout: positions of queries and keys.
            matrices: those of the call.

        Returns:
            Mixed scores (B, H, N, M).
        """
        return self.mix_maps(score(heads, layout), matrices)

    def finish(self, out: Tensor) -> Tensor:
        """Map the weighted values (B, H, N, D) to the same shape; by default leave them as they are."""
        return out

    def multiply_adds(self, keys: float) -> float:
        """Count the multiply-adds of a query that sees so many keys: those of a matrix."""
        heads: int = self.size.num_heads
        return heads**2 * keys

    @property
    def learned(self) -> bool:
        """True where the matrix has parameters, so that penalties can change it."""
        return next(self.parameters(), None) is not None

    def draw(self) -> None:
        """Draw anew what starts at random, from the CPU's random numbers: the same on every device."""


def starts_plain(stage: Stage) -> bool:
    """Return whether the mixing that `stage` names is the identity before training."""
    identity = stage_options(stage).get("start", "identity") == "identity"
    return identity and bool(registry.lookup("mix", stage_name(stage)).starts_plain)


def make_identity(size: int) -> Tensor:
    """Make I; on the meta device `torch.eye` would import the compiler, which takes seconds."""
    return torch.zeros(size, size).fill_diagonal_(1)


def fill_with_normal(matrix: Tensor, std: float) -> None:
    """Fill with N(0, std^2), from the CPU's random numbers."""
    with torch.no_grad():
        matrix.copy_(torch.randn(matrix.shape, device="cpu") * std)


class LearnedMixing(Mixing):
    """`mixing` (H, H), a parameter that starts as `start` says (§3.2): as I, N(0, 1/H), or 1/H everywhere."""

    Config = LearnedMixingOptions

    def __init__(self, config: LearnedMixingOptions, size: HeadSize) -> None:
        super().__init__(config, size)
        self.begin(config, size.num_heads)

    def begin(self, config: LearnedMixingOptions, heads: int) -> None:
        """Make `mixing` and start it."""
        self.start = config.start
        uniform = torch.full((heads, heads), 1 / heads)
        self.mixing = nn.Parameter(uniform if self.start == "uniform" else make_identity(heads))
        with torch.random.fork_rng(devices=[]):  # other parameters start as they do without mixing
            self.draw()

    def draw(self) -> None:
        if self.start == "random":
            fill_with_normal(self.mixing, len(self.mixing) ** -0.5)


@register("mix_scores", "none")
@register("mix", "none")
class KeepHeads(Mixing):
    """Plain multi-head attention: every head keeps its own weights (M = I)."""

    needs = ()

    def matrix(self, query: Tensor | None) -> None:
        return None

    def multiply_adds(self, keys: float) -> float:
        return 0.0


@register("mix_scores", "talking_heads")
@register("mix", "talking_heads")
@register("mix", "position_independent")
class PositionIndependentMixing(LearnedMixing):
    """Mixhead A: one learned mixing for all positions (Mixhead §3.1, Eq. 12).

        P'_i = sum_j m_ji P_j

    `mixing` is (H, H).
    Starts at M = I: plain multi-head attention (§3.2), or as `start` says.  Rows need not sum to one and may be negative
    (§3.3).
    Talking heads (Shazeer et al. 2020, arXiv 2003.02436, §3) are the same matrix: of weights P_w, of scores P_l. They differ
    from that paper in their start, and there are as many heads of scores as of weights.
    """

    needs = ()

    def matrix(self, query: Tensor | None) -> Tensor:
        return self.mixing


@register("mix", "position_wise")
class PositionWiseMixing(LearnedMixing):
    """Mixhead B: each query decides how the heads exchange attention (Mixhead §3.1, Eq. 12).

        P'_i(n) = sum_j m_ji(n) P_j(n)      with  m_ji(n) = sum_d Q_j(n)_d W_di + B_ji

    query (B, H, N, D) -> M (B, N, H, H).  `from_query` W is (D, H), `mixing` B is (H, H).
    Row j of M(n) reads the query of head j, the source; W is shared by all heads.
    Starts at W = 0, B = I: plain multi-head attention (§3.2); B may start otherwise, as `start` says.  Rows need not sum to
    one and may be negative (§3.3).
    Differs from the released code: none of its other mixing types, and the query is unscaled in decoding too.
    """

    def __init__(self, config: LearnedMixingOptions, size: HeadSize) -> None:
        Mixing.__init__(self, config, size)
        self.from_query = nn.Parameter(torch.zeros(size.head_dim, size.num_heads))
        self.begin(config, size.num_heads)

    def matrix(self, query: Tensor | None) -> Tensor:
        """Return M(n) (B, N, H, H), or without a query B, the part that all positions share."""
        if query is None:
            return self.mixing
        by_token = query.transpose(1, 2)  # (B, N, H, D), which is how a projection lies in memory
        product = by_token @ self.from_query.to(query.dtype)
        return product + self.mixing.to(query.dtype)

    def multiply_adds(self, keys: float) -> float:
        cost_of_matrix = self.from_query.numel() * len(self.mixing)
        return cost_of_matrix + super().multiply_adds(keys)
