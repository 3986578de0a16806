"""Embeddings of tokens, a vector for each, and of positions: added to vectors, turning heads, or as keys of distances.

Inputs with fewer numbers than a vector for each token stand in `core/compressed_embedding.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import engine, released
from .config import ModelConfig, stage_options
from .draws import make_dropout
from .errors import ConfigError, InputError, RangeError
from .kinds import AdaptiveConfig, AdaptiveInputConfig, InputConfig, MultiLinearConfig, OutputConfig
from .layout import Layout
from .registry import register

Options = TypeVar("Options", bound=InputConfig | OutputConfig)


def with_sizes(
    module: nn.Module,
    config: ModelConfig | InputConfig | OutputConfig,
    kind: type[Options],
    vocab_size: int | None = None,
    hidden_size: int | None = None,
) -> tuple[ModelConfig, Options, int]:
    """Find or build the `ModelConfig` of a layer, and its section of `kind`.

    Args:
        module: layer, which errors name.
        config: model's configuration, or the section of the layer alone.
        kind: class of the section, an input's or an output's.
        vocab_size: entries of the vocabulary V, beside a section alone.
        hidden_size: width E, beside a section alone.

    Returns:
        The model's configuration, its section of `kind`, and its vocab_size.

    Raises:
        ConfigError: sizes are missing or given twice, or the section is of another kind.
    """
    layer = type(module).__name__
    section = "output" if issubclass(kind, OutputConfig) else "input"
    if not isinstance(config, ModelConfig):
        if vocab_size is None or hidden_size is None:
            raise ConfigError(
                f"{layer}: give a ModelConfig, or an {section.title()}Config with vocab_size and hidden_size"
            )
        keys: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_attention_heads": 1}
        if isinstance(config, AdaptiveConfig) and config.tied:  # to an input of the same clusters
            keys["input"] = AdaptiveInputConfig(cutoffs=config.cutoffs or [], div_val=config.div_val or 1)
        config = ModelConfig(**keys | {section: config})
    elif vocab_size is not None or hidden_size is not None:
        raise ConfigError(f"{layer}: a ModelConfig has its own sizes; change them there")
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size: must be a number to build a model (a run takes it from its data)")
    options = getattr(config, section)
    if not isinstance(options, kind):
        raise ConfigError(f"model.{section}.kind: {layer} is for '{kind.kind}', given '{options.kind}'")
    return config, options, config.vocab_size


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W' + b as `torch.nn.functional.linear` does; engines are asked first.

    Args:
        x: (.., E).
        weight: W (V, E).
        bias: b (V,); None without.
    """
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    out = None if is_traced else engine.load().linear(x, weight, bias)
    return F.linear(x, weight, bias) if out is None else out


class Linear(nn.Linear):
    """`torch.nn.Linear` by way of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def start_normal(parameter: Tensor, std: float) -> None:
    """Fill with N(0, std^2), but not on the meta device, where `normal_` imports the compiler, for two seconds."""
    if not parameter.is_meta:
        nn.init.normal_(parameter, std=std)


def check_ids(ids: Tensor, vocab_size: int, name: str) -> None:
    """Check that ids are whole numbers from 0 to vocab_size - 1.

    The range is left to torch in compiled code and on a GPU, for which a check would have to wait.

    Args:
        ids: tensor of any shape.
        vocab_size: number of ids.
        name: what the ids are, which begins the error.

    Raises:
        InputError: ids are neither int64 nor int32.
        RangeError: an id is out of range. It is an InputError and an IndexError.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name}: whole numbers in torch.int64, given {ids.dtype}")
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    try:
        numbers = ids.numpy()  # no operation of torch, which a dispatch mode would have to record
    except RuntimeError:  # a tensor without numbers, as in `torch.func.vmap`
        return
    low, high = numbers.min(), numbers.max()
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RangeError(
            f"{name}: an index from 0 to {vocab_size - 1} (model.vocab_size is {vocab_size}), given {wrong}"
        )


class Input(nn.Module):
    """Contract of an input layer: ids (B, N) int64 to hidden states (B, N, E).

    Registered with `@register("input", name)`, it is built from `(config: ModelConfig)`. Keys of its own stand in a nested
    `Config`, a subclass of `InputConfig`.
    """

    def flops_per_token(self) -> float:
        """Count multiply-adds, each as two, of the vector of one token."""
        return 0.0


@register("input", "token")
class TokenEmbedding(Input):
    """One vector per token, times sqrt(E) if `scale_embedding`.  input_ids (B, N) -> (B, N, E); weight (V, E)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        _, _, vocab_size = with_sizes(self, config, InputConfig)
        self.weight = nn.Parameter(torch.empty(vocab_size, config.hidden_size))
        self.scale = config.hidden_size**0.5 if config.scale_embedding else 1.0

    def forward(self, input_ids: Tensor) -> Tensor:
        check_ids(input_ids, self.weight.shape[0], "input ids")
        vectors = F.embedding(input_ids, self.weight)
        return vectors * self.scale if self.scale != 1 else vectors


def angles(positions: Tensor, size: int, theta: float, like: Tensor) -> Tensor:
    """Compute the angles p theta^(-2i / size) for 2i < size, which sinusoids and rotations read.

    The product is made in fp64: in fp32 an angle of 10^6 is off by 0.06.

    Args:
        positions: p (...,).
        size: number of dimensions, two for each angle.
        theta: base.
        like: tensor whose dtype decides between fp64 and fp32.

    Returns:
        Angles (..., ceil(size / 2)), those in fp32 without whole turns.
    """
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64  # mps has no fp64
    exponent = torch.arange(0, size, 2, device=positions.device, dtype=dtype) / size
    rate = torch.exp(-math.log(theta) * exponent)
    angle = positions.to(dtype)[..., None] * rate
    if like.dtype == torch.float64:
        return angle
    return angle.remainder(2 * math.pi).to(torch.float32)


def sines_then_cosines(positions: Tensor, width: int, like: Tensor) -> Tensor:
    """Compute sinusoids as in Transformer-XL, all sines and then all cosines.

        PE(p, i) = sin(p / 10000^(2i/E)),   PE(p, E/2 + i) = cos(p / 10000^(2i/E)),      i < E/2

    Args:
        positions: p (T,).
        width: E.
        like: tensor whose dtype the result has.

    Returns:
        PE (T, E).
    """
    angle = angles(positions, width, 10000.0, like)
    table = torch.cat((angle.sin(), angle.cos()), dim=-1)
    return table[:, :width].to(like.dtype)


# cosines and sines of the angles of rotary positions, (N, D) or (B, N, D) each
Rotation = tuple[Tensor, Tensor]


def make_rotation(positions: Tensor, size: int, theta: float, like: Tensor) -> Rotation:
    """Make the tables of `Rotary`.

    Args:
        positions: (N,) or (B, N).
        size: head size D.
        theta: base of the angles.
        like: tensor whose dtype decides between fp64 and fp32.

    Returns:
        Cosines twice, and negative then positive sines, (N, D) or (B, N, D) each.
    """
    angle = angles(positions, size, theta, like)
    cos, sin = angle.cos(), angle.sin()
    cosines = torch.cat((cos, cos), dim=-1)
    sines = torch.cat((-sin, sin), dim=-1)
    return cosines, sines


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021), half-split pairing as in Llama.

        (x_i, x_{i+D/2}) -> rotated by the angle a_i = p * theta^(-2i/D),   i < D/2
        = (x_i cos a_i - x_{i+D/2} sin a_i,   x_{i+D/2} cos a_i + x_i sin a_i)

    A score of rotated query and key depends on distance only.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, heads: Tensor, positions: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Rotate heads by their positions.

        Args:
            heads: (B, H, N, D).
            positions: (M,) or (B, M), of which the heads have the last N.
            rotation: tables of the last positions, N or more of them; shorter tables, and None, are made anew.

        Returns:
            Rotated heads (B, H, N, D), in their dtype.
        """
        count = heads.shape[2]
        if rotation is None or rotation[0].shape[-2] < count:
            rotation = make_rotation(positions, self.head_dim, self.theta, heads)
        first = rotation[0].shape[-2] - count
        cos, sin = (table[..., first:, :] for table in rotation)
        if cos.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        wide_heads = heads.to(cos.dtype)
        swapped = wide_heads.roll(self.head_dim // 2, dims=-1)
        rotated = wide_heads * cos + swapped * sin
        return rotated.to(heads.dtype)


def list_distances(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """List all distances (T,) within `spans`, the smallest first."""
    return torch.cat([torch.arange(low, high + 1, device=device) for low, high in spans])


def encode_distances(
    layout: Layout, width: int, clamp_length: int | None, like: Tensor, rows: int | None = None
) -> Tensor:
    """Compute sinusoids of all distances within `layout.spans`.

    Args:
        layout: layout of queries and keys.
        width: E.
        clamp_length: greatest distance in tokens, to which others are clamped; None: none is clamped.
        like: tensor whose dtype and device the result has.
        rows: number of consecutive distances from the smallest, for a table that is read again; None: those of the layout.

    Returns:
        Sinusoids (T, E) or (rows, E), of the smallest distance first.
    """
    spans = layout.spans
    if rows is not None:
        smallest = spans[0][0]
        spans = ((smallest, smallest + rows - 1),)
    distances = list_distances(spans, like.device)
    if clamp_length is not None:
        distances = distances.clamp(-clamp_length, clamp_length)
    return sines_then_cosines(distances, width, like)


def encode_positions(longest: int, width: int, like: Tensor) -> Tensor:
    """Compute the position term of multi-linear attention, sinusoids PE(P - 1 - j) for j < P.

    Args:
        longest: greatest number of tokens P.
        width: E.
        like: tensor whose dtype and device the result has.

    Returns:
        Sinusoids (P, E).
    """
    positions = torch.arange(longest - 1, -1, -1, device=like.device)
    return sines_then_cosines(positions, width, like)


def serves(table: Tensor | None, layout: Layout) -> bool:
    """Return whether `table` (H, T or more, D), keys of the distances 0, 1, .., has all that `layout` needs."""
    return table is not None and layout.from_zero and table.shape[1] >= layout.distances


def encodings_of(layout: Layout, clamp_length: int | None, like: Tensor) -> Tensor:
    """Return sinusoids (T, E) of the distances of a layout: those that a model made for all its layers, or new ones.

    Args:
        layout: layout of queries and keys.
        clamp_length: greatest distance in tokens, to which others are clamped; None: none is clamped.
        like: tensor (..., E) whose width, dtype and device new ones have.
    """
    if layout.encodings is not None:
        return layout.encodings
    return encode_distances(layout, like.shape[-1], clamp_length, like)


class RelativeKeys(nn.Module):
    """Keys of distances: R = PE W_R without bias, split into heads (Transformer-XL §3.3).  weight (H D, E).

    encodings of distances PE (T, E) -> (H, T, D).
    """

    def __init__(self, num_heads: int, head_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.empty(num_heads * head_dim, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as `nn.Linear` starts

    def forward(self, encodings: Tensor) -> Tensor:
        keys = linear(encodings, self.weight)
        by_head = keys.unflatten(-1, (self.num_heads, -1))
        return by_head.transpose(0, 1)


class RelativeBiases(nn.Module):
    """u and v of Transformer-XL: `content_bias` and `position_bias`, (H, D) each, added to every query.

    One pair for all layers of a model, which its position holds, or one for each layer. They never decay.
    """

    no_weight_decay = True

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, head_dim))


@register("position", "none")
class Position(nn.Module):
    """Contract of a position, built from a `ModelConfig`: what it adds to hidden states, to heads and to the layout.

    By itself it adds nothing: order is known only through the causal mask.
    max_length: the longest sequence, None without limit. clamp_length: distances beyond it count as it, None: none do.
    biases: u and v that all layers share, None where there are none.
    """

    max_length: int | None = None
    clamp_length: int | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.biases: RelativeBiases | None = None

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Add positions (N,) or (B, N) to hidden states (B, N, E); by default nothing."""
        return hidden

    def check(self, length: int) -> None:
        """Raise InputError if a sequence of `length` tokens has no position."""
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"a sequence of {length} tokens, but model.max_position_embeddings is {self.max_length} and positions are "
                "learned; shorten the segments or train with a larger model.max_position_embeddings"
            )

    def place(self, layout: Layout, like: Tensor, distance_keys: Tensor | None = None, cached: bool = False) -> Layout:
        """Return the layout with everything that layers read of positions, made once for all of them.

        Args:
            layout: layout of queries and keys.
            like: hidden states, whose dtype and device the tables have.
            distance_keys: keys of distances (H, T or more, D) of earlier calls, which are not made again; None without.
            cached: whether keys of this call will be read again, as in a cache.
        """
        return layout


@register("position", "rotary")
class RotaryPosition(Position):
    """Nothing is added: every attention layer rotates its queries and keys (`Rotary`), by the same tables.

    A cache holds keys that are rotated already, so that its calls get tables of the new ones only.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.head_dim is not None
        self.size = config.head_dim
        self.theta = config.rope_theta

    def place(self, layout: Layout, like: Tensor, distance_keys: Tensor | None = None, cached: bool = False) -> Layout:
        positions = layout.query_positions if cached else layout.key_positions
        rotation = make_rotation(positions, self.size, self.theta, like)
        return replace(layout, rotation=rotation)


@register("position", "sinusoidal")
class Sinusoidal(Position):
    """Fixed sinusoids (Vaswani et al. 2017, §3.5).

        PE(p, 2i) = sin(p / 10000^(2i/E)),   PE(p, 2i+1) = cos(p / 10000^(2i/E))

    hidden (B, N, E), positions (N,) or (B, N) -> hidden + PE.  No parameters and no longest position.
    Differs from fairseq: its sines and cosines stand in two halves (a permutation of the dimensions) and positions start at 2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.size = config.hidden_size

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        angle = angles(positions, self.size, 10000.0, hidden)
        pairs = torch.stack((angle.sin(), angle.cos()), dim=-1)
        table = pairs.flatten(-2)[..., : self.size]
        return hidden + table.to(hidden.dtype)


@register("position", "learned")
class Learned(Position):
    """One learned vector for each of `max_position_embeddings` positions; longer sequences are refused.

    hidden (B, N, E), positions (N,) or (B, N) -> hidden + weight[positions].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.max_length = config.max_position_embeddings
        self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden + self.weight[positions]


@register("position", "relative")
class Relative(Position):
    """Transformer-XL's positions: nothing is added; the score of every layer reads the distance of query and key.

    Holds what all layers have in common: the sinusoids of distances, and u and v (`biases`, None where each layer has its
    own). Sinusoids are dropped out like embeddings, one draw for all layers, as in Transformer-XL.
    Multi-linear attention reads sinusoids of positions, (P, E), instead of distances. A cache gets a table of more distances
    than needed, so that it is not made again for every token.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        options = stage_options(config.attention.score)
        self.size = config.hidden_size
        self.clamp_length = options.get("clamp_length")
        self.as_published = options.get("as_published") is True
        self.num_positions: int | None = None  # of the position term of multi-linear attention
        assert config.head_dim is not None
        heads = config.num_attention_heads
        width = config.head_dim
        if isinstance(config.attention, MultiLinearConfig):
            self.num_positions = config.max_position_embeddings
            heads = 1
            width = config.attention.rank
        shared = options.get("shared_biases", True) and not options.get("shared_projection", False)
        self.biases = RelativeBiases(heads, width) if shared else None
        self.dropout = make_dropout(config.dropout.embedding, config.dropout.locked, shared=True)

    def place(self, layout: Layout, like: Tensor, distance_keys: Tensor | None = None, cached: bool = False) -> Layout:
        if self.as_published:
            layout = released.FromLast(**vars(layout))
        encodings = None
        if self.num_positions is not None:
            encodings = encode_positions(self.num_positions, self.size, like)
        elif not serves(distance_keys, layout):
            rows = None
            if cached and layout.from_zero:
                next_power = 1 << (layout.distances - 1).bit_length()
                rows = max(64, next_power)
            encodings = encode_distances(layout, self.size, self.clamp_length, like, rows)
        if encodings is not None:
            encodings = self.dropout(encodings)
        return replace(layout, encodings=encodings)


class DistanceBias(Position):
    """Base of positions that add a number of each head and distance to the scores: A_i(n, m) + b_i(p_n - p_m).

    The bias belongs to the head of the query, whatever keys cross-head attention gives it.
    """

    def bias(self, distances: Tensor, causal: bool, like: Tensor) -> Tensor:
        """Return the bias b (T, H) of each distance and head.

        Args:
            distances: (T,), query minus key position in tokens.
            causal: False if queries see later keys, too.
            like: tensor whose dtype decides between fp32 and fp64.
        """
        raise NotImplementedError(f"{type(self).__name__} must define bias(distances, causal, like)")

    def place(self, layout: Layout, like: Tensor, distance_keys: Tensor | None = None, cached: bool = False) -> Layout:
        distances = list_distances(layout.spans, like.device)
        bias = self.bias(distances, layout.causal, like)
        return replace(layout, distance_bias=bias)


@register("position", "alibi")
class Alibi(DistanceBias):
    """ALiBi (Press et al. 2022): every head loses interest with the distance, each at a slope of its own.

        b_i(p) = -c 2^(-8 i / H) |p|,   i = 1 .. H

    No parameters. Where H is no power of two, the slopes are those of the power P below it, then every other one of 2 P, as in
    the authors' code. c is `alibi_scale`: 1, or 1 / sqrt(D) as in Falcon, which scales the biases with the scores.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.num_heads = config.num_attention_heads
        self.scale = config.alibi_scale

    def bias(self, distances: Tensor, causal: bool, like: Tensor) -> Tensor:
        dtype = torch.promote_types(like.dtype, torch.float32)
        power = 1 << (self.num_heads.bit_length() - 1)
        head = torch.arange(self.num_heads, device=like.device, dtype=dtype)
        regular = (head + 1) / power
        between = (head - power + 0.5) / power
        exponent = torch.where(head < power, regular, between)
        slopes = -self.scale * 2 ** (-8 * exponent)
        return slopes * distances.abs().to(dtype)[:, None]


def bucket_distances(distances: Tensor, buckets: int, longest: int, causal: bool) -> Tensor:
    """Sort distances into T5's buckets (Raffel et al. 2020, §2.1).

    Each short distance has a bucket of its own; further ones are logarithmically wider. The logarithm is that of fp32, whose
    rounding decides between two buckets in T5's code.

    Args:
        distances: (..), query minus key position in tokens.
        buckets: number of buckets.
        longest: distance from which on all share the last bucket.
        causal: whether keys after the query count as distance 0. Otherwise the second half of the buckets is theirs.

    Returns:
        Buckets (..), int64 from 0 to buckets - 1.
    """
    lengths = distances.clamp_min(0) if causal else distances.abs()
    offset: Tensor | int = 0
    if not causal:
        buckets //= 2
        offset = (distances < 0) * buckets
    exact_buckets = buckets // 2
    orders = torch.log(lengths.clamp_min(1).float() / exact_buckets)
    beyond = orders / math.log(longest / exact_buckets) * (buckets - exact_buckets)
    wide_buckets = (exact_buckets + beyond.long()).clamp_max(buckets - 1)
    return offset + torch.where(lengths < exact_buckets, lengths, wide_buckets)


@register("position", "t5")
class T5Bias(DistanceBias):
    """T5's relative bias (Raffel et al. 2020, §2.1): a learned number of each head and bucket of distances, for all layers.

        b_i(p) = W[bucket(p), i]

    `relative_attention_bias` W (buckets, H) starts at N(0, 1/E), as in T5, and never decays. The encoder and the decoder of a
    translation model have one each. T5 does not scale its scores: `model.attention.score: {name: dot_product, scale: 1}`.
    """

    no_weight_decay = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        buckets = config.relative_attention_num_buckets
        self.longest = config.relative_attention_max_distance
        self.relative_attention_bias = nn.Parameter(torch.empty(buckets, config.num_attention_heads))
        start_normal(self.relative_attention_bias, config.hidden_size**-0.5)

    def bias(self, distances: Tensor, causal: bool, like: Tensor) -> Tensor:
        rows = bucket_distances(distances, len(self.relative_attention_bias), self.longest, causal)
        return F.embedding(rows, self.relative_attention_bias)
