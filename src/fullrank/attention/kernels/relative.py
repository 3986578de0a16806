"""Relative attention of contiguous causal text, a block of query rows at a time, for every normaliser and mixing.

    A = S + shift(T),      S = (Q + u) K^T / sqrt(D),      T = (Q + v) R^T / sqrt(D)
    O = W V,               W = dropout(mix(normalize(A)))

Row n of T is wanted from distance p_n on downwards. With R in descending order and one idle row behind it, the rows of T laid
out one after the other hold row n of shift(T) at N - 1 + n M: the shift is a view (docs/derivations/relative_attention.md),
in both directions. A block of rows stays in cache, leaves out the keys after its last row, and is computed again in the
backward pass, where normaliser and mixing differentiate themselves and the rest is written out:

    dV = W^T dO,  dK = dA^T (Q + u) / sqrt(D),  dR = shift^T(dA)^T (Q + v) / sqrt(D),  dQ = (dA K + shift^T(dA) R) / sqrt(D)

Memory: nothing of size N M is kept, except the dropout masks (one byte an entry). Scores and normalisers are fp32 (or fp64).
Limits: no double backward, no functorch transforms; a compiler gets the same shift on all rows at once instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullrank.attention.dropout import keep_mask
from fullrank.attention.kernels.reference import reference, weigh
from fullrank.attention.layout import Layout
from fullrank.attention.project import Heads
from fullrank.attention.relative import shifted_scores
from fullrank.attention.trace import Trace

if TYPE_CHECKING:
    from fullrank.attention.weighted import WeightedValues

_ROWS = {"cpu": 64}  # query rows of a block, at most; elsewhere 512
_NUMBERS = {"cpu": 2**17}  # about so many scores in a block, so that it stays in cache; elsewhere 2^25


def relative(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """Relative score, any row-wise normaliser and mixing; (B, H, N, D). Other layouts are left to the reference."""
    if (
        not layout.contiguous
        or layout.window is not None
        or not layout.causal
        or layout.key_mask is not None
        or attend.score.as_published
    ):
        return reference(attend, heads, layout, trace)
    query, keys, distances = heads.scored, heads.keys, heads.relative
    assert query is not None
    assert keys is not None
    assert distances is not None
    if torch.compiler.is_compiling():
        return weigh(attend, shifted_scores(attend.score, query, keys, distances), heads, layout, trace)
    u, v = attend.score.u_and_v()
    inner = (*attend.normalize.parameters(), *attend.mix.parameters())
    reads = heads.query if "query" in attend.mix.needs else None
    needed = distances[:, : keys.shape[2]]
    out: Tensor = _Blocks.apply(attend, reads, query, keys, heads.values, needed, u, v, *inner)
    return out


@dataclass(frozen=True)
class _Block:
    """Texts and query rows of one block, and how many keys its last row sees."""

    texts: slice
    rows: slice
    seen: int


def _blocks(query: Tensor, keys: Tensor) -> Iterator[_Block]:
    batch, heads, queries, length = *query.shape[:3], keys.shape[2]
    count = max(1, -(-queries // _ROWS.get(query.device.type, 512)))  # blocks of nearly as many rows each
    ends, rows = [queries * i // count for i in range(count + 1)], max(1, -(-queries // count))
    texts = max(1, _NUMBERS.get(query.device.type, 2**25) // (heads * rows * length))
    for text in range(0, batch, texts):
        for row, end in pairwise(ends):
            yield _Block(slice(text, min(text + texts, batch)), slice(row, end), length - queries + end)


class _Scores:
    """The scores of one block, with what their gradients read. Heads of all texts of a block stand in one dimension G."""

    def __init__(self, block: _Block, query: Tensor, keys: Tensor, descending: Tensor, u: Tensor, v: Tensor) -> None:
        self.scale, self.seen = query.shape[-1] ** -0.5, block.seen
        part = query[block.texts, :, block.rows]  # (b, H, n, D)
        self.shape = part.shape
        self.content = ((part + u[:, None]) * self.scale).to(query.dtype).flatten(0, 1)  # (G, n, D)
        self.position = ((part + v[:, None]) * self.scale).to(query.dtype).flatten(0, 1)
        self.keys = keys[block.texts, :, : block.seen].flatten(0, 1)  # (G, m, D)
        far = descending[:, descending.shape[1] - block.seen - 1 :]  # (H, m + 1, D), the last row idle
        self.distances = far if part.shape[0] == 1 else far.expand(part.shape[0], -1, -1, -1).flatten(0, 1)

    def hidden(self, of: Tensor) -> Tensor:
        """The corner (.., n, n) of scores in which alone there are keys after their query, and which of it they are."""
        return torch.ones(self.shape[2], self.shape[2], dtype=torch.bool, device=of.device).triu_(1)

    def forward(self) -> Tensor:
        """Masked, (b, H, n, m), in fp32 at least."""
        (batch, heads, rows, _), seen = self.shape, self.seen
        raw = torch.bmm(self.position, self.distances.transpose(1, 2)).view(-1, rows * (seen + 1))
        shifted = raw[:, rows - 1 : rows - 1 + rows * seen].unflatten(1, (rows, seen))
        scores = torch.baddbmm(shifted, self.content, self.keys.transpose(1, 2))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores[:, :, seen - rows :].masked_fill_(self.hidden(scores), float("-inf"))
        return scores.view(batch, heads, rows, seen)

    def backward(self, d_scores: Tensor, d_keys: Tensor, d_distances: Tensor) -> tuple[Tensor, Tensor]:
        """Adds to d_keys (b, H, m, D) and d_distances (H, m + 1, D); gradients at Q + u and at Q + v, (b, H, n, D) each."""
        (batch, heads, rows, _), seen = self.shape, self.seen
        flat = d_scores.to(self.content.dtype).reshape(-1, rows, seen)
        flat[:, :, seen - rows :].masked_fill_(self.hidden(flat), 0.0)
        at_content = torch.bmm(flat, self.keys).mul_(self.scale)
        _add_product(d_keys, flat.transpose(1, 2), self.content)
        raw = flat.new_zeros(flat.shape[0], rows * (seen + 1))
        raw[:, rows - 1 : rows - 1 + rows * seen] = flat.view(-1, rows * seen)
        raw = raw.view(-1, rows, seen + 1)
        at_position = torch.bmm(raw, self.distances).mul_(self.scale)
        if batch == 1:
            _add_product(d_distances[None], raw.transpose(1, 2), self.position)
        else:
            d_distances += torch.bmm(raw.transpose(1, 2), self.position).view(batch, heads, seen + 1, -1).sum(0)
        return at_content.view(self.shape), at_position.view(self.shape)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attend: WeightedValues,
        mixing_query: Tensor | None,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        distances: Tensor,
        u: Tensor,
        v: Tensor,
        *inner: Tensor,
    ) -> Tensor:
        device = query.device.type
        # what the stages themselves compute follows autocast, the products here do not
        ctx.autocast = (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.attend, ctx.p = attend, attend.dropout if attend.training else 0.0
        keys, values = keys.contiguous(), values.contiguous()
        descending = torch.cat((distances.flip(1), torch.zeros_like(distances[:, :1])), dim=1)  # (H, M + 1, D)
        out = torch.empty_like(query)
        kept = []
        with torch.autocast(device, enabled=False):
            for block in _blocks(query, keys):
                scores = _Scores(block, query, keys, descending, u, v).forward()
                mixed = _stages(attend, scores, _part(mixing_query, block), ctx.autocast).to(values.dtype)
                if ctx.p:
                    kept.append(_draw(mixed, ctx.p))
                    mixed = mixed * kept[-1] / (1 - ctx.p)
                out[block.texts, :, block.rows] = mixed @ values[block.texts, :, : block.seen]
        # the parameters of the stages are saved for the check that nobody changed them before the backward pass
        ctx.save_for_backward(mixing_query, query, keys, values, descending, u, v, *inner, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("this attention kernel has no second derivative; use fullrank.kernel('reference')")
        mixing_query, query, keys, values, descending, u, v, *rest = ctx.saved_tensors
        inner = [*ctx.attend.normalize.parameters(), *ctx.attend.mix.parameters()]
        kept = rest[len(inner) :]
        wide = torch.promote_types(query.dtype, torch.float32)
        d_query = torch.empty_like(query, dtype=wide)
        d_mixing = None if mixing_query is None or not ctx.needs_input_grad[1] else torch.zeros_like(mixing_query)
        d_keys, d_values, d_far = (torch.zeros_like(x, dtype=wide) for x in (keys, values, descending))
        d_u, d_v = torch.zeros_like(u, dtype=wide), torch.zeros_like(v, dtype=wide)
        learned = [parameter for parameter in inner if parameter.requires_grad]
        d_learned = [torch.zeros_like(parameter) for parameter in learned]
        with torch.autocast(query.device.type, enabled=False):
            for i, block in enumerate(_blocks(query, keys)):
                parts = _Scores(block, query, keys, descending, u, v)
                scores = parts.forward().requires_grad_()
                reads = _part(mixing_query, block)
                reads = reads if reads is None else reads.detach().requires_grad_(d_mixing is not None)
                with torch.enable_grad():
                    mixed = _stages(ctx.attend, scores, reads, ctx.autocast)
                dropped = mixed.detach().to(values.dtype)
                at_values, at_out = values[block.texts, :, : block.seen], cotangent[block.texts, :, block.rows]
                d_mixed = at_out @ at_values.transpose(-1, -2)
                if ctx.p:
                    dropped, d_mixed = dropped * kept[i] / (1 - ctx.p), d_mixed * kept[i] / (1 - ctx.p)
                into = d_values[block.texts, :, : block.seen]
                _add_product(into, dropped.flatten(0, 1).transpose(1, 2), at_out.flatten(0, 1))
                wanted = [scores, *([] if d_mixing is None else [reads]), *learned]
                found = torch.autograd.grad(mixed, wanted, d_mixed.to(mixed.dtype), allow_unused=True)
                if d_mixing is not None and found[1] is not None:
                    d_mixing[block.texts, :, block.rows] = found[1]
                for total, part in zip(d_learned, found[len(found) - len(learned) :], strict=True):
                    if part is not None:
                        total += part
                far = d_far[:, d_far.shape[1] - block.seen - 1 :]
                at_content, at_position = parts.backward(found[0], d_keys[block.texts, :, : block.seen], far)
                d_u += at_content.sum((0, 2))
                d_v += at_position.sum((0, 2))
                d_query[block.texts, :, block.rows] = at_content + at_position
        d_distances = d_far[:, :-1].flip(1)
        by_parameter = {id(parameter): d for parameter, d in zip(learned, d_learned, strict=True)}
        return (
            None,
            d_mixing,
            d_query.to(query.dtype),
            d_keys.to(keys.dtype),
            d_values.to(values.dtype),
            d_distances.to(query.dtype),
            d_u.to(u.dtype),
            d_v.to(v.dtype),
            *(by_parameter.get(id(parameter)) for parameter in inner),
        )


def _draw(like: Tensor, p: float) -> Tensor:
    """True where dropout keeps an entry."""
    kept = keep_mask(like.shape, p, like)
    return torch.rand_like(like, dtype=torch.float32) >= p if kept is None else kept.bool()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (b, H, m, D) += a b, of (b H, m, n) and (b H, n, D)."""
    if total.dtype == a.dtype:
        total.flatten(0, 1).baddbmm_(a, b)  # a view: texts and heads lie evenly
    else:
        total += torch.bmm(a, b).view(total.shape)


def _part(query: Tensor | None, block: _Block) -> Tensor | None:
    return None if query is None else query[block.texts, :, block.rows]


def _stages(attend: WeightedValues, scores: Tensor, query: Tensor | None, autocast: tuple[torch.dtype, bool]) -> Tensor:
    dtype, enabled = autocast
    with torch.autocast(scores.device.type, dtype=dtype) if enabled else contextlib.nullcontext():
        mixed: Tensor = attend.mix(attend.normalize(scores), query)
    return mixed
