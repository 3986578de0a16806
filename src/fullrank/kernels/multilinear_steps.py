"""The steps of multi-linear attention over pairs, one after another: what a step needs, and its gradients (`multilinear`)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fullrank.kernels.multilinear_plan import Rectangle, Stage, Step


class Call:
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
            return later(*key) if few else later.__wrapped__(*key)
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
def later(rectangles: tuple[Rectangle, ...], first: int, last: int, device: torch.device) -> Tensor:
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


def output(call: Call, stages: tuple[Stage, ...]) -> tuple[Tensor, Tensor]:
    """O (B, N, E), and the state before each stage that reads it, (stages, B, R, E), in the dtype of products."""
    wide, width = torch.promote_types(call.dtype, torch.float32), call.weight.shape[2]
    out = call.query.new_zeros(call.batch, call.queries, width, dtype=wide)
    state = call.query.new_zeros(call.batch * call.rank, width, dtype=wide)
    states, known = call.query.new_empty(readers(stages), call.batch, call.rank, width), 0
    for stage in stages:
        if stage.reads:
            states[known].copy_(state.view(call.batch, call.rank, width))
            rows = slice(stage.first, stage.last)
            out[:, rows] = call.query[:, rows] @ states[known]
            known += 1
        for step in stage.steps:
            x, _ = call.factors(step, call.hidden(step))
            y, columns = x.t() @ call.rows(step), call.batch * (step.last - step.first)
            if columns:
                out[:, step.first : step.last] += y[:columns].view(call.batch, -1, width)
            if step.into_state:
                state += y[columns:]
    return out.to(call.dtype), states


def readers(stages: tuple[Stage, ...]) -> int:
    """How many stages read the state."""
    return sum(stage.reads for stage in stages)


def gradients(
    call: Call, stages: tuple[Stage, ...], states: Tensor, cotangent: Tensor, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of query (B, N, R), keys and values (B, M, R) and, where it is wanted, the weight; in fp32 at least, weight as it is."""
    found, given, known = _Gradients(call, wants_weight), cotangent.to(call.dtype), len(states)
    for stage in reversed(stages):
        for step in reversed(stage.steps):
            found.step(step, given)
        rows = slice(stage.first, stage.last)
        if stage.reads:
            known -= 1
            found.query[:, rows] += given[:, rows] @ states[known].transpose(1, 2)
            found.state += call.query[:, rows].transpose(1, 2) @ given[:, rows]
    return found.query, found.keys.transpose(0, 1), found.values.transpose(0, 1), found.weight


class _Gradients:
    """Sums over steps, in fp32 at least; `state` (B, R, E) is G, of what later queries read of the state."""

    def __init__(self, call: Call, wants_weight: bool) -> None:
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
