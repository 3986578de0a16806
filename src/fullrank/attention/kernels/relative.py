"""Relative attention of causal text, a block of query rows at a time, for every normaliser and mixing.

    A = S + shift(T),      S = (Q + u) K^T / sqrt(D),      T = (Q + v) R^T / sqrt(D)
    O = W V,               W = dropout(mix(normalize(A)))

The shift is a view of T in both directions, also for keys with gaps between them and within a window (`attention/shift.py`,
docs/derivations/relative_attention.md). A block of rows stays in cache, leaves out the keys that none of its rows sees, and
is computed again in the backward pass, where normaliser and mixing differentiate themselves and the rest is written out:

    dV = W^T dO,  dK = dA^T (Q + u) / sqrt(D),  dR = shift^T(dA)^T (Q + v) / sqrt(D),  dQ = (dA K + shift^T(dA) R) / sqrt(D)

Memory: nothing of size N M is kept, except the dropout masks (one byte an entry). Scores and normalisers are fp32 (or fp64).
Limits: no double backward, no functorch transforms; a compiler gets the same shift on all rows at once instead.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.attention.dropout import keep_mask
from fullrank.attention.kernels.blocks import Block, Scores, add_product, blocks, table_rows
from fullrank.attention.kernels.precision import refuse_second_order
from fullrank.attention.kernels.reference import reference, weigh
from fullrank.attention.layout import Layout
from fullrank.attention.mix import KeepHeads
from fullrank.attention.normalize import Softmax
from fullrank.attention.project import Heads
from fullrank.attention.relative import shifted_scores
from fullrank.attention.shift import descending, kept_descending
from fullrank.attention.trace import Trace

if TYPE_CHECKING:
    from fullrank.attention.weighted import WeightedValues

_EVALUATION_ROWS = {torch.bfloat16: 128, torch.float16: 128}  # on a CPU; otherwise as in training


def relative(attend: WeightedValues, heads: Heads, layout: Layout, trace: Trace | None) -> Tensor:
    """Relative score, any row-wise normaliser and mixing; (B, H, N, D).

    Left to the reference: layouts without runs (padding, rows that differ), queries that see later keys, `as_published`,
    the device `meta`, which knows no autocast, and batches of no texts.
    """
    other = layout.runs is None or not layout.causal or layout.key_mask is not None
    if other or attend.score.as_published or heads.values.is_meta or heads.values.numel() == 0:
        return reference(attend, heads, layout, trace)
    query, keys, distances = heads.scored, heads.keys, heads.relative
    assert query is not None
    assert keys is not None
    assert distances is not None
    if torch.compiler.is_compiling():
        return weigh(attend, shifted_scores(attend.score, query, keys, distances, layout), heads, layout, trace)
    u, v = attend.score.u_and_v()
    reads = heads.query if "query" in attend.mix.needs else None
    needed = distances[:, : layout.distances]
    if not torch.is_grad_enabled() and not (attend.training and attend.dropout):
        return _evaluate(attend, layout, reads, query, keys, heads.values, needed, u, v)
    inner = (*attend.normalize.parameters(), *attend.mix.parameters())
    out: Tensor = _Blocks.apply(attend, layout, reads, query, keys, heads.values, needed, u, v, *inner)
    return out


def _evaluate(
    attend: WeightedValues,
    layout: Layout,
    mixing_query: Tensor | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    distances: Tensor,
    u: Tensor,
    v: Tensor,
) -> Tensor:
    """Without gradients and dropout. Plain attention needs no fp32 copy of its scores: softmax is fp32 inside."""
    device = query.device.type
    autocast = (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    plain = _is_plain(attend)
    with torch.autocast(device, enabled=False):
        if query.shape[2] == 1:
            scores, seen = _one_query(query, keys, distances, u, v)
            weights = torch.softmax(scores, -1) if plain else _weights(attend, scores, mixing_query, autocast)
            return weights.to(values.dtype) @ values[:, :, seen]
        fused = plain and device == "cpu" and query.dtype in (torch.float32, torch.float64)
        found = blocks(query, layout, _EVALUATION_ROWS.get(query.dtype) if device == "cpu" else None)
        table, out = kept_descending(distances, table_rows(found)), torch.empty_like(query)
        for block in found:
            parts, at_values = Scores(block, query, keys, table, u, v), values[block.texts, :, block.keys]
            if fused:
                bias, at_keys = parts.hide(parts.bias(), float("-inf")), keys[block.texts, :, block.keys]
                content = parts.content.view(parts.shape)
                seen_values = F.scaled_dot_product_attention(content, at_keys, at_values, attn_mask=bias, scale=1.0)
            else:
                scores = parts.forward()
                if plain:
                    weights = torch.softmax(scores, -1)
                else:
                    weights = _weights(attend, scores, _part(mixing_query, block), autocast)
                seen_values = weights.to(values.dtype) @ at_values
            out[block.texts, :, block.rows] = seen_values
        return out


def _one_query(query: Tensor, keys: Tensor, distances: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, slice]:
    """Scores (B, H, 1, T) of the last T keys, those in sight: every distance is that of one key, so nothing is shifted."""
    scale, seen = query.shape[-1] ** -0.5, slice(keys.shape[2] - distances.shape[1], None)
    content = ((query + u[:, None]) * scale).to(query.dtype)
    position = ((query + v[:, None]) * scale).to(query.dtype)[:, :, 0].transpose(0, 1)  # (H, B, D)
    by_distance = torch.bmm(position, distances.transpose(1, 2)).flip(-1)
    scores = by_distance.transpose(0, 1).contiguous()[:, :, None]  # (B, H, 1, T)
    scores.flatten(0, 1).baddbmm_(content.flatten(0, 1), keys[:, :, seen].flatten(0, 1).transpose(1, 2))
    return scores, seen


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attend: WeightedValues,
        layout: Layout,
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
        ctx.blocks = blocks(query, layout)
        keys, values = keys.contiguous(), values.contiguous()
        table = descending(distances, table_rows(ctx.blocks))
        out = torch.empty_like(query)
        kept = []
        with torch.autocast(device, enabled=False):
            for block in ctx.blocks:
                scores = Scores(block, query, keys, table, u, v).forward()
                mixed = _weights(attend, scores, _part(mixing_query, block), ctx.autocast).to(values.dtype)
                if ctx.p:
                    kept.append(_draw(mixed, ctx.p))
                    mixed = (mixed * kept[-1]).div_(1 - ctx.p)
                out[block.texts, :, block.rows] = mixed @ values[block.texts, :, block.keys]
                del scores, mixed  # before the next block needs the room
        # the parameters of the stages are saved for the check that nobody changed them before the backward pass
        ctx.save_for_backward(mixing_query, query, keys, values, table, u, v, *inner, *kept)
        ctx.distances = distances.shape[1]
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("this attention kernel", "keeps the weights")
        mixing_query, query, keys, values, table, u, v, *rest = ctx.saved_tensors
        inner = [*ctx.attend.normalize.parameters(), *ctx.attend.mix.parameters()]
        kept = rest[len(inner) :]
        wide = torch.promote_types(query.dtype, torch.float32)
        total = _Gradients(
            mixing_query=None
            if mixing_query is None or not ctx.needs_input_grad[2]
            else torch.zeros_like(mixing_query),
            query=torch.empty_like(query, dtype=wide),
            keys=torch.zeros_like(keys, dtype=wide),
            values=torch.zeros_like(values, dtype=wide),
            table=torch.zeros_like(table, dtype=wide),
            u=torch.zeros_like(u, dtype=wide),
            v=torch.zeros_like(v, dtype=wide),
            learned={id(parameter): torch.zeros_like(parameter) for parameter in inner if parameter.requires_grad},
        )
        with torch.autocast(query.device.type, enabled=False):
            for i, block in enumerate(ctx.blocks):
                parts = Scores(block, query, keys, table, u, v)
                drop = (kept[i], ctx.p) if ctx.p else None
                _differentiate(
                    ctx.attend, ctx.autocast, parts, _part(mixing_query, block), values, cotangent, drop, total
                )
        learned = (total.learned.get(id(parameter)) for parameter in inner)
        return (
            None,
            None,
            total.mixing_query,
            total.query.to(query.dtype),
            total.keys.to(keys.dtype),
            total.values.to(values.dtype),
            total.table[:, : ctx.distances].flip(1).to(query.dtype),
            total.u.to(u.dtype),
            total.v.to(v.dtype),
            *learned,
        )


@dataclass(frozen=True)
class _Gradients:
    """Summed over blocks, in fp32 at least; `learned` by the id of a parameter of the stages."""

    mixing_query: Tensor | None
    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    u: Tensor
    v: Tensor
    learned: dict[int, Tensor]


def _differentiate(
    attend: WeightedValues,
    autocast: tuple[torch.dtype, bool],
    parts: Scores,
    mixing_query: Tensor | None,
    values: Tensor,
    cotangent: Tensor,
    drop: tuple[Tensor, float] | None,
    total: _Gradients,
) -> None:
    """Add the gradients of one block to `total`. A function, so that what it needs is free before the next block."""
    block = parts.block
    at_values, at_out = values[block.texts, :, block.keys], cotangent[block.texts, :, block.rows]
    parameters = [*attend.normalize.parameters(), *attend.mix.parameters()]
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    scores, reads = _wide(parts.forward()), None
    if plain := _is_plain(attend):
        mixed = torch.softmax(scores, -1)
    else:
        scores.requires_grad_()
        reads = None if mixing_query is None else mixing_query.detach().requires_grad_(total.mixing_query is not None)
        with torch.enable_grad():
            mixed = _weights(attend, scores, reads, autocast)
    weights = mixed.detach().to(values.dtype)
    d_weights = at_out @ at_values.transpose(-1, -2)
    if drop is not None:
        kept, p = drop
        weights, d_weights = (weights * kept).div_(1 - p), d_weights.mul_(kept).div_(1 - p)
    add_product(total.values[block.texts, :, block.keys], weights.flatten(0, 1).transpose(1, 2), at_out.flatten(0, 1))
    wanted = [scores, *([] if total.mixing_query is None else [reads]), *learned]
    d_weights = d_weights.to(mixed.dtype)
    del weights, scores
    others: list[Tensor | None] = []
    if plain:  # nothing but the weights has to stay
        wanted.clear()
        d_scores = torch._softmax_backward_data(d_weights, mixed, -1, mixed.dtype)
    else:
        d_scores, *rest = torch.autograd.grad(mixed, wanted, d_weights, allow_unused=True)
        others.extend(rest)
    del mixed, d_weights, wanted
    if total.mixing_query is not None and (found := others.pop(0)) is not None:
        total.mixing_query[block.texts, :, block.rows] = found
    for parameter, found in zip(learned, others, strict=True):
        if found is not None:
            total.learned[id(parameter)].add_(found)
    at_content, at_position = parts.backward(d_scores, total.keys[block.texts, :, block.keys], total.table)
    total.u.add_(at_content.sum((0, 2)))
    total.v.add_(at_position.sum((0, 2)))
    total.query[block.texts, :, block.rows] = at_content + at_position


def _is_plain(attend: WeightedValues) -> bool:
    return type(attend.normalize) is Softmax and type(attend.mix) is KeepHeads


def _draw(like: Tensor, p: float) -> Tensor:
    """True where dropout keeps an entry."""
    kept = keep_mask(like.shape, p, like)
    return torch.rand_like(like, dtype=torch.float32) >= p if kept is None else kept.bool()


def _part(query: Tensor | None, block: Block) -> Tensor | None:
    return None if query is None else query[block.texts, :, block.rows]


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _weights(
    attend: WeightedValues, scores: Tensor, query: Tensor | None, autocast: tuple[torch.dtype, bool]
) -> Tensor:
    dtype, enabled = autocast
    with torch.autocast(scores.device.type, dtype=dtype) if enabled else contextlib.nullcontext():
        mixed: Tensor = attend.mix(attend.normalize(_wide(scores)), query)
    return mixed
