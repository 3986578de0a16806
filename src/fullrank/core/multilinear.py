"""Multi-linear attention: a tensor of queries, keys and values in place of attention weights (Ma et al. 2019, §3)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import engine
from .attention import Attention
from .cache import DecayedSums
from .config import AttentionConfig, ModelConfig, MultiLinearConfig, stage_name
from .embedding import RelativeBiases, encode_positions
from .engine import Pairs, Tokens
from .errors import ConfigError, InputError
from .layout import Layout, measure_distances
from .registry import register
from .released import PositionTerm, see_all
from .stages import Attend, Heads, HeadSize
from .trace import Trace

_LONGEST = 64.0  # tokens; where the slowest decays start


def multilinear(problem: Pairs) -> Tensor:
    """Compute O_i = sum_jm T_ijm W_jm (B, N, E): split, concatenate and output matrix (Eq. 5, 6 and 8).

        T_ijm = sum_r q_ir K_jr V_mr    for keys j and values m that query i sees, else 0;      q_ir = Q_ir (1/C) sum_c g_cr

    The C cores are diagonal and share Q, K and V, so that they are one core, their mean.
    The authors' output matrix (E, M^2), keys major and values minor, is `weight.permute(2, 0, 1).flatten(1)`.
    """
    if (out := engine.load().multilinear_pairs(problem)) is not None:
        return out
    queries = problem.query.shape[1]
    length = problem.keys.shape[1]
    visible = problem.visible
    if visible is None and problem.causal:
        position = torch.arange(length, device=problem.query.device)
        visible = (position <= position[length - queries :, None])[None]
    tensor = torch.einsum("bir,bjr,bmr->bijm", problem.query, problem.keys, problem.values)
    if visible is not None:
        visible_pairs = visible[..., :, None] & visible[..., None, :]
        tensor = tensor.masked_fill(~visible_pairs, 0.0)
    return tensor.flatten(2) @ problem.weight[:length, :length].flatten(0, 1)


class Cores(nn.Module):
    """C diagonal cores of R entries, `weight` (C, R): g_c = softmax(weight_c), or the entries themselves if they are free.

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


def compute_decayed_sums(tokens: Tensor, log_decay: Tensor, layout: Layout, state: Tensor | None = None) -> Tensor:
    """Compute the decayed sums A of tokens x.

        A_s(i) = sum_j a_s^|p_i - p_j| x_j  +  a_s^(p_i - p) state_s        over the keys j that query i sees

    Distances are those in the text: padding counts nothing, and tokens that a skipped layer left out count as distance.

    Args:
        tokens: x (B, M, R), the last keys of the layout.
        log_decay: log a (S,).
        layout: layout of queries and keys, earlier ones included.
        state: sums (B, S, R) at p, the position of the key before the tokens; None without earlier tokens.

    Returns:
        A (B, N, S, R).
    """
    queries, keys = layout.shape
    earlier = keys - tokens.shape[1]
    problem: Tokens | str = (
        "no queries, or a layout that is not causal or has padding, a window, or rows of different positions"
    )
    runs = layout.runs
    has_runs = runs is not None and (state is None or len(runs) == 1)
    if queries and has_runs and layout.causal and layout.key_mask is None and not layout.narrow:
        before = layout.query_positions[0] - 1 - layout.key_positions[earlier : keys - queries]
        problem = Tokens(tokens, log_decay, before, state)
    if (sums := engine.load().compute_decayed_sums(problem)) is not None:
        return sums
    distances = measure_distances(layout.query_positions, layout.key_positions[..., earlier:]).abs()
    powers = torch.exp(log_decay[:, None, None, None] * distances)  # (S, 1 or B, N, M)
    powers = powers.masked_fill(~layout.visible()[:, 0, :, earlier:], 0.0)
    sums = (powers @ tokens).permute(1, 2, 0, 3)
    if state is None:
        return sums
    elapsed = layout.query_positions - layout.key_positions[..., earlier - 1, None]  # (N,) or (B, N)
    powers = torch.exp(log_decay[:, None] * elapsed[..., None, None])
    return sums + powers * state[:, None]


class DecayedMap(nn.Module):
    """W_r(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr,  with  U_sr = (1 - a_s) (1 - b_s) U'_sr: a map of any length.

        O_i = sum_jm sum_r g_r Q_ir K_jr V_mr W_r(i, j, m) = sum_s sum_r g_r Q_ir A_sr(i) B_sr(i) U_sr
        A_s(i) = sum_{j<=i} a_s^(i-j) K_j,      B_s(i) = sum_{m<=i} b_s^(i-m) V_m

    weight U' is (S, R, E); a = sigmoid(key_decay) and b = sigmoid(value_decay), (S,) each. The factor makes decayed means of
    the sums, bounded at any length. Starts with time scales 1 / (1 - a) from 1 to 64 tokens, those of the values every second
    one first (one decay alone: 8 tokens). Without a causal layout distances have no sign. docs/derivations/multilinear.md
    """

    def __init__(self, count: int, size: HeadSize) -> None:
        super().__init__()
        fraction = torch.arange(count) / (count - 1) if count > 1 else torch.tensor([0.5])
        scale = _LONGEST ** (0.999 * fraction + 0.001)  # above 1: a decay of 0 could not learn
        start = torch.log(scale - 1)  # the logit of a = 1 - 1 / scale
        alternating = torch.cat((start[0::2], start[1::2]))
        self.key_decay = nn.Parameter(start)
        self.value_decay = nn.Parameter(alternating)
        self.weight = nn.Parameter(torch.empty(count, size.head_dim, size.hidden_size))
        bound = size.head_dim / math.sqrt(count * size.head_dim)  # cores are means over R
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, core: Tensor, layout: Layout, past: DecayedSums
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute O, and the decayed sums that it is made of.

        Args:
            query: Q (B, N, R).
            keys: K (B, M, R), the last keys of the layout.
            values: V (B, M, R).
            core: g (R,).
            layout: layout of queries and keys, earlier ones included.
            past: sums over earlier tokens.

        Returns:
            O (B, N, E), and A and B (B, N, S, R) in fp32 at least.
        """
        dtype = torch.promote_types(query.dtype, torch.float32)  # sums are fp32 at least, whatever autocast says
        with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):
            log_key_decay = F.logsigmoid(self.key_decay).to(dtype)
            log_value_decay = F.logsigmoid(self.value_decay).to(dtype)
            a = compute_decayed_sums(keys.to(dtype), log_key_decay, layout, past.keys)
            b = compute_decayed_sums(values.to(dtype), log_value_decay, layout, past.values)
        weighted_query = query.to(dtype) * core.to(dtype)
        features = weighted_query[:, :, None] * a * b  # (B, N, S, R)
        means = torch.sigmoid(-self.key_decay) * torch.sigmoid(-self.value_decay)
        weight = self.weight * means[:, None, None].to(self.weight.dtype)
        out = features.flatten(2).to(weight.dtype) @ weight.flatten(0, 1)
        return out, a, b


@register("attend", "multilinear")
class MultiLinear(Attend):
    """Multi-linear attention (Ma et al. 2019, Eq. 5 to 8), the output map included.

        T_ijm = (1/C) sum_c sum_r g_cr Q_ir K_jr V_mr            for j, m <= i (`masked`), else 0
        O_i   = sum_jm T_ijm W_jm + b                            `pairs`: split, concatenate, W_O
        O_i   = sum_jm sum_r g_r Q_ir K_jr V_mr W_r(i, j, m) + b   `decayed`: see `DecayedMap`

    Heads: query (B, 1, N, R), keys and values (B, 1, M, R) -> (B, 1, N, E), without softmax and scale. With one core it is the
    paper's single-block attention (§3.1). weight W is (P, P, E), P = max_position_embeddings, of which a text of M <= P tokens
    uses the leading part: rows are positions in the text. `causal: as_published` leaves the mask out.
    Raises InputError for texts longer than P. Sums of `decayed` cannot be parted again: to continue a text with a layout that
    is not causal or has a window raises InputError, too. A trace collects nothing of it, since it has no weights.
    """

    def __init__(self, config: MultiLinearConfig, size: HeadSize, dropout: float) -> None:
        super().__init__()
        if dropout:
            raise ConfigError(
                f"dropout: multi-linear attention has no attention weights to drop, given {dropout}; leave it out"
            )
        self.size = HeadSize(1, config.rank, size.hidden_size, size.max_length)
        self.sees_future = config.sees_future
        self.cores = Cores(config.cores, config.rank, config.core_weights == "free")
        self.score: PositionTerm | None = None
        if stage_name(config.score) == "relative":
            biases = RelativeBiases(1, config.rank)
            self.score = PositionTerm(config.rank, size.hidden_size, biases)
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

    def view(self, layout: Layout) -> Layout:
        return see_all(layout) if self.sees_future else layout

    def merge(self, bias: bool, shares: int = 1) -> nn.Module:
        return nn.Identity()

    def forward(self, heads: Heads, layout: Layout, trace: Trace | None = None) -> Tensor:
        if self.decayed is None:
            return self._with_bias(self._pairs(layout, *_factors(heads)))
        out, _, _ = self.decayed(*_factors(heads), self.cores().mean(0), layout, DecayedSums())
        return self._with_bias(out)

    def past(self) -> DecayedSums | None:
        return None if self.decayed is None else DecayedSums()

    def attend_after(self, heads: Heads, past: DecayedSums, layout: Layout) -> tuple[Tensor, DecayedSums]:
        assert self.decayed is not None
        if not layout.causal or layout.narrow:
            raise InputError(
                "multi-linear attention with output_map decayed keeps sums over all earlier tokens: a text is continued with a "
                "causal layout without window; read it in one pass, or begin with past=None"
            )
        query, keys, values = _factors(heads)
        new = keys.shape[1]
        if layout.key_mask is not None:  # the sums after the last token hold no padding
            mask = layout.key_mask[:, past.length :]
            keys = _hide(keys, mask)
            values = _hide(values, mask)
        out, a, b = self.decayed(query, keys, values, self.cores().mean(0), layout, past)
        sums = past
        if new:
            sums = DecayedSums(a[:, -1].clone(), b[:, -1].clone(), past.length + new)
        return self._with_bias(out), sums

    def _with_bias(self, out: Tensor) -> Tensor:
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out[:, None]  # (B, 1, N, E)

    def _pairs(self, layout: Layout, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self.weight is not None
        mask = layout.key_mask
        at_end = layout.from_start or (layout.runs is not None and mask is None)  # the queries are the last positions
        if not layout.from_start:
            keys, values, mask = _place_tokens(layout, keys, values)
        length = keys.shape[1]
        if length > self.size.max_length:
            raise InputError(
                f"{length} positions, but the output matrix of multi-linear attention has a column for each pair of "
                f"{self.size.max_length} positions; use shorter segments, a larger max_position_embeddings, or "
                "output_map: decayed"
            )
        core = self.cores().mean(0)
        if self.score is not None:
            encodings = layout.encodings
            if encodings is None:
                encodings = encode_positions(self.size.max_length, self.size.hidden_size, keys)
            query, keys, values, core = self.score.factors(query, keys, values, core, encodings)
        if mask is not None:
            keys = _hide(keys, mask)
            values = _hide(values, mask)
        visible = None
        if layout.narrow or (layout.causal and not at_end):
            positions = torch.arange(length, device=keys.device)
            distances = measure_distances(layout.query_positions, positions)
            visible = distances < (layout.window or length)
            if layout.causal:
                visible = visible & (distances >= 0)
        return multilinear(Pairs(query * core, keys, values, self.weight, layout.causal, visible))


def _factors(heads: Heads) -> Any:
    """Return query, keys and values of the one head."""
    return [part[:, 0] for part in heads.select(("scored", "keys", "values"))]


def _hide(tokens: Tensor, mask: Tensor) -> Tensor:
    """Set tokens (B, M, R) to 0 where `mask` (B, M) is False."""
    return tokens.masked_fill(~mask[..., None], 0.0)


def _place_tokens(layout: Layout, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put keys and values (B, M, R) at their positions in the text, (B, T, R); elsewhere they are 0.

    Returns them, and a mask (B, T), True where there is a token. Raises InputError for a position before the text.
    """
    positions = layout.key_positions.expand(len(keys), -1)
    mask = layout.key_mask
    if mask is None:
        mask = torch.ones_like(positions, dtype=torch.bool)
    index = positions.masked_fill(~mask, 0)
    if index.min() < 0:
        raise InputError(
            "a position before the text, for which model.attention.output_map: pairs has no row (the labels of gaps: "
            "drifting reach there); choose gaps: true, or output_map: decayed"
        )
    ones = torch.ones_like(keys[..., :1])
    tokens = torch.cat((keys, values, ones), dim=-1)
    length = int(index.max()) + 1
    empty = tokens.new_zeros(len(keys), length, tokens.shape[2])
    indices = index[..., None].expand_as(tokens)
    placed = empty.scatter_add(1, indices, _hide(tokens, mask))
    rank = keys.shape[2]
    placed_keys, placed_values, counts = placed.split((rank, rank, 1), dim=-1)
    return placed_keys, placed_values, counts[..., 0] > 0


class MultiLinearAttention(Attention):
    """Multi-linear attention as a layer by itself (Ma et al. 2019, §3.2): see `MultiLinear` for its equation.

        MultiLinearAttention(hidden_size=256, rank=40, cores=2, max_position_embeddings=80)

    x (B, N, E), source (B, M, E) -> (B, N, E), masked like `Attention`: causal unless a layout or another source says
    otherwise. Built from a `ModelConfig` or an `AttentionConfig` of kind `multilinear`, or from keys of such a section. The
    output map of pairs has max_position_embeddings^2 x E numbers, and 1,024 is what is taken where none is given.
    Raises ConfigError for another kind, and for keys given twice.
    """

    def __init__(
        self,
        config: ModelConfig | AttentionConfig | None = None,
        *,
        hidden_size: int | None = None,
        max_position_embeddings: int | None = None,
        **keys: Any,
    ) -> None:
        if config is None:
            config = AttentionConfig(kind="multilinear", **keys)
        elif keys:
            raise ConfigError(f"MultiLinearAttention: the configuration has {', '.join(keys)}; change them there")
        attention = config.attention if isinstance(config, ModelConfig) else config
        if attention.kind != "multilinear":
            raise ConfigError(
                f"MultiLinearAttention: model.attention.kind must be 'multilinear', given '{attention.kind}'"
            )
        super().__init__(config, hidden_size=hidden_size, max_position_embeddings=max_position_embeddings)
