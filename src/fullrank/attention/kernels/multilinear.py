"""Multi-linear attention without anything of size N^3, exact, forward and backward.

    q_i = mean_c g_c o Q_i,    P_jm = K_j o V_m,    O_i = sum_jm (q_i . P_jm) W_jm    over the pairs that query i sees

Queries, keys and values are shared by the cores, so C cores are one core with their mean. A step takes the pairs p of some
shell, X = [q_i . P_p ; P_p] (rows: queries that meet them directly, then the R rows of the state), Y = X W, and adds

    O_i += Y_i,  C += Y_state;          dX = [dO ; G] W^T,  dW = X^T [dO ; G],  dP = dX_state + q^T dX_i,  dq_i += dX_i P^T

with G = dC the sum of q_i^T dO_i over later queries. Which pairs go where is chosen by cost (`multilinear_plan`).
Operands have the dtype that autocast asks for; sums over steps are fp32 (or fp64). The state before each stage is kept for
the backward pass, (B, R, E) numbers each; everything else is computed again. Only a T of at most 2^17 numbers is built.
Limits: no double backward, no functorch transforms; `fullrank.kernel("reference")` has them.
docs/derivations/multilinear.md
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fullrank.attention import multilinear_reference as reference
from fullrank.attention.kernels import forced
from fullrank.attention.kernels.multilinear_plan import TINY, Rectangle, Shape, Stage, Step, plan
from fullrank.attention.kernels.multilinear_small import SmallCausal
from fullrank.attention.kernels.precision import product_dtype, refuse_second_order
from fullrank.errors import InputError


@torch.compiler.disable
def multilinear(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cores: Tensor,
    weight: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """O (B, N, E) of query (B, N, R), keys and values (B, M, R), cores (C, R) and weight (L, L, E), M <= L.

    causal: query i is position M - N + i and meets pairs whose key and value are not after it; otherwise all pairs.
    key_mask (B, M): False where a position is padding. visible (1 or B, N, M): instead of `causal`, any other choice of
    the positions that a query sees, as keys and as values. A query that sees nothing gets 0.
    Raises InputError for more positions than the weight has, and for causal queries that are more than the keys.
    """
    queries, length = query.shape[1], keys.shape[1]
    if visible is None and causal and queries > length:
        raise InputError(f"{queries} causal queries over {length} keys: they are the last ones of the keys")
    reference.leading(weight, length)
    if visible is not None:
        visible = visible.expand(-1, queries, length)
    if forced() == "reference" or weight.is_meta or query.numel() == 0:
        return reference.multilinear(
            query, keys, values, cores, weight, _visible(query, keys, causal, key_mask, visible)
        )
    if key_mask is not None:  # a pair with a zero in it is nothing
        keys, values = (tensor.masked_fill(~key_mask[..., None], 0.0) for tensor in (keys, values))
    kind, wide, dtype = query.device.type, torch.promote_types(query.dtype, torch.float32), product_dtype(query, weight)
    with torch.autocast(kind, enabled=False):
        scaled = query.to(wide) * cores.to(wide).mean(0)
        if query.shape[0] * queries * length**2 <= TINY:
            return _tiny(scaled, keys, values, weight, visible, causal and visible is None, dtype)
        shape = Shape(
            query.shape[0], queries, length, query.shape[2], weight.shape[2], causal and visible is None,
            visible is not None, kind == "cpu", dtype.itemsize == 2,
        )  # fmt: skip
        out: Tensor = _Pairs.apply(scaled, keys, values, weight, visible, dtype, plan(shape))
    return out


def _tiny(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    weight: Tensor,
    visible: Tensor | None,
    causal: bool,
    dtype: torch.dtype,
) -> Tensor:
    """T itself, where it is so small that cutting it up takes longer."""
    query, keys, values = (tensor.to(dtype) for tensor in (query, keys, values))
    queries, length = query.shape[1], keys.shape[1]
    if causal:
        later = _later(((0, length, 0, length),), length - queries, length, query.device)
        rows = reference.leading(weight, length).to(dtype).contiguous()
        out: Tensor = SmallCausal.apply(query, keys, values, rows, later)
        return out
    split = (query[:, :, None] * keys[:, None]).flatten(1, 2) @ values.transpose(1, 2)  # (B, N M, M)
    split = split.view(-1, queries, length**2)
    if visible is not None:
        split = split.masked_fill(~(visible[..., :, None] & visible[..., None, :]).flatten(2), 0.0)
    return split @ reference.leading(weight, length).flatten(0, 1).to(dtype)


def _visible(
    query: Tensor, keys: Tensor, causal: bool, key_mask: Tensor | None, visible: Tensor | None
) -> Tensor | None:
    if visible is None and causal:
        visible = reference.causal(query.shape[1], keys.shape[1], query.device)
    if key_mask is None:
        return visible
    return key_mask[:, None] if visible is None else visible & key_mask[:, None]


class _Call:
    """The operands of a call, in the dtype of products; keys and values are (M, B, R), as are pairs: (p, B, R)."""

    def __init__(
        self, query: Tensor, keys: Tensor, values: Tensor, weight: Tensor, visible: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.query, self.weight, self.dtype = query.to(dtype), weight, dtype
        self.keys, self.values = (tensor.to(dtype).transpose(0, 1).contiguous() for tensor in (keys, values))
        self.batch, self.queries, self.rank = query.shape
        self.past, self.visible = keys.shape[1] - self.queries, visible

    def hidden(self, step: Step) -> Tensor | None:
        """(1 or B, some of the queries, p), True where a query does not see a pair; the others see all."""
        if step.masked == step.first:
            return None
        if self.visible is None:
            key = (step.rectangles, self.past + step.first, self.past + step.masked, self.query.device)
            few = step.pairs * (step.masked - step.first) <= 1 << 16
            return _later(*key) if few else _later.__wrapped__(*key)
        seen = self.visible[:, step.first : step.masked]
        parts = [seen[:, :, j0:j1, None] & seen[:, :, None, m0:m1] for j0, j1, m0, m1 in step.rectangles]
        return ~torch.cat([part.flatten(2) for part in parts], -1)

    def factors(self, step: Step, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """X' (p, columns) and P (p, B, R); columns are (B, direct queries), then (B, R) where pairs go into the state."""
        columns = self.batch * (step.last - step.first)
        both = columns > 0 and step.into_state
        if both:
            x = self.query.new_empty(step.pairs, columns + self.batch * self.rank)
            pairs = x[:, columns:].view(step.pairs, self.batch, self.rank)
        else:
            pairs = self.query.new_empty(step.pairs, self.batch, self.rank)
        for (j0, j1, m0, m1), part in _parts(pairs, step):
            torch.mul(self.keys[j0:j1, None], self.values[None, m0:m1], out=part)
        if not columns:
            return pairs.flatten(1), pairs
        seen = _hide(torch.bmm(self.query[:, step.first : step.last], pairs.permute(1, 2, 0)), hidden)  # (B, direct, p)
        if not both:
            return seen.flatten(0, 1).t(), pairs
        x[:, :columns].copy_(seen.flatten(0, 1).t())
        return x, pairs

    def rows(self, step: Step) -> Tensor:
        """W (p, E) of the pairs of a step."""
        if (found := _whole(self.weight, step)) is not None:
            return found.to(self.dtype)
        found = self.weight.new_empty(step.pairs, self.weight.shape[2], dtype=self.dtype)
        for (j0, j1, m0, m1), part in _parts(found, step):
            part.copy_(self.weight[j0:j1, m0:m1])
        return found


@lru_cache(maxsize=64)
def _later(rectangles: tuple[Rectangle, ...], first: int, last: int, device: torch.device) -> Tensor:
    """(1, last - first, p), True where a pair is later than a query at position first .. last."""
    with torch.inference_mode(False):
        times = []
        for j0, j1, m0, m1 in rectangles:
            times.append(
                torch.maximum(
                    torch.arange(j0, j1, device=device)[:, None], torch.arange(m0, m1, device=device)
                ).flatten()
            )
        return (torch.cat(times) > torch.arange(first, last, device=device)[:, None])[None]


def _whole(weight: Tensor, step: Step) -> Tensor | None:
    """The rows (p, E) of (L, L, E) as a view, where the pairs of a step lie together."""
    j0, j1, m0, m1 = step.rectangles[0]
    together = len(step.rectangles) == 1 and (m0, m1) == (0, weight.shape[1]) and weight.is_contiguous()
    return weight[j0:j1].flatten(0, 1) if together else None


def _hide(x: Tensor, hidden: Tensor | None) -> Tensor:
    if hidden is not None:
        x[:, : hidden.shape[1]].masked_fill_(hidden, 0.0)
    return x


def _parts(x: Tensor, step: Step) -> list[tuple[Rectangle, Tensor]]:
    """Views (keys, values, ...) of x (p, ...), one for each rectangle."""
    found, begin = [], 0
    for rectangle in step.rectangles:
        keys, values = rectangle[1] - rectangle[0], rectangle[3] - rectangle[2]
        end = begin + keys * values
        found.append((rectangle, x[begin:end].view(keys, values, *x.shape[1:])))
        begin = end
    return found


class _Pairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        weight: Tensor,
        visible: Tensor | None,
        dtype: torch.dtype,
        stages: tuple[Stage, ...],
    ) -> Tensor:
        call = _Call(query, keys, values, weight, visible, dtype)
        wide, width = torch.promote_types(dtype, torch.float32), weight.shape[2]
        out = query.new_zeros(call.batch, call.queries, width, dtype=wide)
        state = query.new_zeros(call.batch * call.rank, width, dtype=wide)
        states = []
        for stage in stages:
            if stage.reads:
                states.append(state.to(dtype, copy=True).view(call.batch, call.rank, width))
                rows = slice(stage.first, stage.last)
                out[:, rows] = call.query[:, rows] @ states[-1]
            for step in stage.steps:
                x, _ = call.factors(step, call.hidden(step))
                y, columns = x.t() @ call.rows(step), call.batch * (step.last - step.first)
                if columns:
                    out[:, step.first : step.last] += y[:columns].view(call.batch, -1, width)
                if step.into_state:
                    state += y[columns:]
        ctx.save_for_backward(query, keys, values, weight, visible, *states)
        ctx.dtype, ctx.stages = dtype, stages
        return out.to(dtype)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("multi-linear attention", "builds the tensor of all pairs")
        query, keys, values, weight, visible, *states = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            call = _Call(query, keys, values, weight, visible, ctx.dtype)
            found = _Gradients(call, ctx.needs_input_grad[3])
            given = cotangent.to(ctx.dtype)
            for stage in reversed(ctx.stages):
                for step in reversed(stage.steps):
                    found.step(step, given)
                rows = slice(stage.first, stage.last)
                if stage.reads:
                    found.query[:, rows] += given[:, rows] @ states.pop().transpose(1, 2)
                    found.state += call.query[:, rows].transpose(1, 2) @ given[:, rows]
        d_keys, d_values = (tensor.transpose(0, 1) for tensor in (found.keys, found.values))
        return (
            found.query.to(query.dtype), d_keys.to(keys.dtype), d_values.to(values.dtype), found.weight, None, None, None
        )  # fmt: skip


class _Gradients:
    """Sums over steps, in fp32 at least; `state` (B, R, E) is G, of what later queries read of the state."""

    def __init__(self, call: _Call, wants_weight: bool) -> None:
        wide = torch.promote_types(call.dtype, torch.float32)
        self.call = call
        self.query = torch.zeros_like(call.query, dtype=wide)
        self.keys, self.values = (torch.zeros_like(tensor, dtype=wide) for tensor in (call.keys, call.values))
        self.state = call.query.new_zeros(call.batch, call.rank, call.weight.shape[2], dtype=wide)
        self.weight: Tensor | None = None
        if wants_weight:
            whole = call.keys.shape[0] == call.weight.shape[0]  # each pair is in one step
            self.weight = torch.empty_like(call.weight) if whole else torch.zeros_like(call.weight)

    def step(self, step: Step, cotangent: Tensor) -> None:
        """Add what the pairs of a step contribute."""
        call, queries, columns = self.call, slice(step.first, step.last), self.call.batch * (step.last - step.first)
        hidden = call.hidden(step)
        x, pairs = call.factors(step, hidden)
        given = cotangent[:, queries].flatten(0, 1)
        if step.into_state:
            later = self.state.flatten(0, 1).to(call.dtype)
            given = torch.cat((given, later)) if columns else later
        if self.weight is not None:
            rows = _whole(self.weight, step)
            if rows is not None and rows.dtype == x.dtype:
                torch.mm(x, given, out=rows)
            else:
                for (j0, j1, m0, m1), part in _parts(x @ given, step):
                    self.weight[j0:j1, m0:m1] = part
        weight = call.rows(step)
        if not step.into_state:
            d_direct = (given @ weight.t()).view(call.batch, -1, step.pairs)
        else:
            d_x = weight @ given.t()  # (p, columns)
            d_pairs = d_x[:, columns:].view(step.pairs, call.batch, call.rank)
            d_direct = d_x[:, :columns].t().contiguous().view(call.batch, -1, step.pairs)
        if columns:
            self.query[:, queries] += torch.bmm(_hide(d_direct, hidden), pairs.transpose(0, 1))
            to_pairs = torch.bmm(d_direct.transpose(1, 2), call.query[:, queries]).transpose(0, 1)
            d_pairs = d_pairs.add_(to_pairs) if step.into_state else to_pairs.contiguous()
        for (j0, j1, m0, m1), part in _parts(d_pairs, step):
            self.keys[j0:j1] += (part * call.values[None, m0:m1]).sum(1)
            self.values[m0:m1] += (part * call.keys[j0:j1, None]).sum(0)
