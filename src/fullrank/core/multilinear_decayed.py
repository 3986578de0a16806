"""The output map of multi-linear attention that no length is tied into, and the sums that stand for a text in it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.kernels.multilinear_decayed import DecayedState, absorb, decayed_multilinear, mapped
from fullrank.kernels.precision import device_kind, product_dtype

from .cache import DecayedSums
from .errors import InputError
from .layout import Layout
from .stage import HeadSize

_LONGEST = 64.0  # tokens; where the slowest decays start


class DecayedMap(nn.Module):
    """W_r(i, j, m) = sum_s a_s^(i-j) b_s^(i-m) U_sr,  with  U_sr = (1 - a_s) (1 - b_s) U'_sr.

        O_i = sum_s sum_r g_r Q_ir A_sr(i) B_sr(i) U_sr
        A_s(i) = sum_{j<=i} a_s^(i-j) K_j,      B_s(i) = sum_{m<=i} b_s^(i-m) V_m

    query (B, N, R), keys and values (B, M, R) -> (B, N, E). weight U' is (S, R, E); a = sigmoid(key_decay) and b =
    sigmoid(value_decay), (S,) each. The factor makes decayed means of the sums, so that outputs stay bounded at any length.
    Starts with time scales 1 / (1 - a) from 1 to 64 tokens; those of the values come in another order, every second one first,
    so that most pairs differ (one decay alone: 8 tokens). For finite numbers: infinite ones also reach earlier tokens.
    Distances are those in the text: padding counts nothing, and tokens that a resting layer left out count as distance.
    Between tokens that may see each other both ways (no causal layout) distances have no sign. docs/derivations/multilinear.md
    """

    def __init__(self, count: int, size: HeadSize) -> None:
        super().__init__()
        share = torch.arange(count) / (count - 1) if count > 1 else torch.tensor([0.5])
        scale = _LONGEST ** (0.999 * share + 0.001)  # above 1: a decay of 0 could not learn
        start = torch.log(scale - 1)  # the logit of a = 1 - 1 / scale
        self.key_decay = nn.Parameter(start)
        self.value_decay = nn.Parameter(start[_spread(count)].clone())
        self.weight = nn.Parameter(torch.empty(count, size.head_dim, size.hidden_size))
        bound = size.head_dim / math.sqrt(count * size.head_dim)  # cores are means over R
        nn.init.uniform_(self.weight, -bound, bound)

    def log_decays(self) -> tuple[Tensor, Tensor]:
        """log a and log b."""
        return F.logsigmoid(self.key_decay), F.logsigmoid(self.value_decay)

    def map(self) -> Tensor:
        """U (S, R, E)."""
        means = torch.sigmoid(-self.key_decay) * torch.sigmoid(-self.value_decay)
        return self.weight * means[:, None, None].to(self.weight.dtype)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, layout: Layout) -> Tensor:
        """The queries of a causal layout are its last keys."""
        if not layout.causal or layout.key_mask is not None or layout.narrow or layout.runs is None:
            distances = layout.query_positions[..., :, None] - layout.key_positions[..., None, :]  # (N, M) or (B, N, M)
            distances = distances.abs() if distances.dim() == 3 else distances.abs()[None]
            found = self._sums(keys, values, distances, layout.visible()[:, 0])
            return self._out(query, found, cores)
        state, past = None, keys.shape[1] - query.shape[1]
        if past:  # also in pieces, with gaps between them
            before = layout.query_positions[0] - 1 - layout.key_positions[:past]
            state = self._wide(lambda part, log: absorb(part[:, :past], log, None, before), keys, values)
        return decayed_multilinear(
            query, keys[:, past:], values[:, past:], cores, self.log_decays(), self.map(), state=state
        )[0]

    def after(
        self, query: Tensor, keys: Tensor, values: Tensor, cores: Tensor, layout: Layout, past: DecayedSums
    ) -> tuple[Tensor, DecayedSums]:
        """New tokens, (B, N, R) each, after `past`; `layout` covers both.

        Raises InputError for a layout that is not causal or has a window: sums cannot be parted again.
        """
        if not layout.causal or layout.narrow:
            raise InputError(
                "multi-linear attention with output_map decayed keeps sums over all earlier tokens: a text is continued with a "
                "causal layout without window; read it in one pass, or begin with past=None"
            )
        new, length = query.shape[1], past.length + query.shape[1]
        state = None
        if past.keys is not None and past.values is not None:
            wide = torch.promote_types(query.dtype, torch.float32)
            state = DecayedState(past.keys.to(wide), past.values.to(wide))
        if (layout.key_mask is None and layout.contiguous) or not new:
            out, last = decayed_multilinear(query, keys, values, cores, self.log_decays(), self.map(), state=state)
            return out, DecayedSums(last.keys, last.values, length)
        places = layout.key_positions.expand(query.shape[0], -1)  # (B, M)
        own = places[:, past.length :]
        seen = torch.ones(1, new, new, dtype=torch.bool, device=query.device).tril()
        if layout.key_mask is not None:
            seen = layout.key_mask[:, None, past.length :] & seen
        found = self._sums(keys, values, (own[:, :, None] - own[:, None, :]).clamp_min(0), seen)
        if state is not None:
            since = own - places[:, past.length - 1, None]  # (B, N)
            before = self._wide(lambda part, log: torch.exp(log * since[..., None])[..., None] * part[:, None], *state)
            found = DecayedState(*(a + b for a, b in zip(found, before, strict=True)))
        now = DecayedSums(found.keys[:, -1], found.values[:, -1], length)
        return self._out(query, found, cores), now

    def _wide(self, compute: Callable[[Tensor, Tensor], Tensor], keys: Tensor, values: Tensor) -> DecayedState:
        """`compute` of keys and log a, and of values and log b, in fp32 at least whatever autocast says."""
        dtype = torch.promote_types(keys.dtype, torch.float32)
        with torch.autocast(device_kind(keys), enabled=False):
            log_a, log_b = (log.to(dtype) for log in self.log_decays())
            return DecayedState(compute(keys.to(dtype), log_a), compute(values.to(dtype), log_b))

    def _sums(self, keys: Tensor, values: Tensor, distances: Tensor, seen: Tensor) -> DecayedState:
        """A and B of every query, (B, N, S, R), from distances and who sees whom, (1 or B, N, M) each."""

        def total(tokens: Tensor, log: Tensor) -> Tensor:
            powers = torch.exp(log[:, None, None, None] * distances).masked_fill(~seen, 0.0)  # (S, 1 or B, N, M)
            return (powers @ tokens).permute(1, 2, 0, 3)

        return self._wide(total, keys, values)

    def _out(self, query: Tensor, sums: DecayedState, cores: Tensor) -> Tensor:
        weight = self.map()
        weight = weight.to(product_dtype(query, weight))
        with torch.autocast(device_kind(query), enabled=False):
            scaled = query.to(sums.keys.dtype) * cores.to(sums.keys.dtype).mean(0)
            return mapped(scaled[:, :, None] * sums.keys * sums.values, weight)


def _spread(count: int) -> Tensor:
    """An order of 0 .. S - 1 in which neighbours lie far apart: first the even numbers, then the odd ones."""
    return torch.cat((torch.arange(0, count, 2), torch.arange(1, count, 2)))
