"""Multi-linear attention without anything of size N^3, and decayed sums without anything of size N^2.

Pairs of positions. With the core in the query, q_i = g o Q_i, and P_jm = K_j o V_m:

    O_i = sum_jm (q_i . P_jm) W_jm    over the pairs that query i sees

This is attention whose keys are the pairs p and whose values are rows of W. Pairs reach a query in two ways,

    directly       O_i += sum_p (q_i . P_p) W_p                       (R + E) multiply-adds for each query and pair
    by the state   C += sum_p P_p W_p^T,  later  O_i += q_i C         R E for each pair, and R E for each query

A step takes some pairs, X = [q_i . P_p ; P_p] (rows: queries that meet them directly, then the R rows of the state), and adds
Y = X W to the outputs and to the state. With G = dC, the sum of q_i^T dO_i over later queries, backwards:

    dX = [dO ; G] W^T,  dW = X^T [dO ; G],  dP = dX_state + q^T dX_i,  dq_i += dX_i P^T

Sums over steps are fp32 (or fp64). The state before each step that reads it is kept for the backward pass, (B, R, E) numbers
each; everything else is computed again. Limits: no double backward, no functorch transforms; `fullrank.kernel("reference")`
has them.  docs/derivations/multilinear.md
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.engine import Pairs, Tokens
from fullrank.kernels.vocabulary import (
    define_operator,
    is_exporting,
    is_transformed,
    make_gradients,
    multiply,
    product_dtype,
)

Rectangle = tuple[int, int, int, int]  # pairs of keys j0 .. j1 and values m0 .. m1

_SMALL = 1 << 17  # numbers of T (B, N, M, M) up to which the definition is as fast (measured)
_SHELL = 8  # positions whose pairs with all earlier ones are one step
_SHELL_SMALL = 16  # the same where the products of a step are small
_PAIRS = 4096  # at most in a step, where they can be cut
_CHUNK = 16  # tokens, at least, of a chunk of decayed sums


# -- the order of steps -----------------------------------------------------------------------------------------------


def _count_pairs(rectangle: Rectangle) -> int:
    j0, j1, m0, m1 = rectangle
    return (j1 - j0) * (m1 - m0)


class Step(NamedTuple):
    """Queries first .. last read the state, then meet the pairs directly; then the pairs go into the state.

    Queries first .. masked do not see all of the pairs.
    """

    rectangles: tuple[Rectangle, ...]
    first: int
    last: int
    masked: int
    reads: bool = False
    into_state: bool = False

    @property
    def queries(self) -> int:
        """Queries that the pairs are multiplied with, also if they do not see all of them."""
        return self.last - self.first

    @property
    def pairs(self) -> int:
        return sum(map(_count_pairs, self.rectangles))


class Size(NamedTuple):
    """Sizes of a call; `masked`: which queries see which positions is given one by one; `half`: operands of 16 bits."""

    batch: int
    queries: int
    keys: int
    rank: int
    width: int
    causal: bool
    masked: bool = False
    half: bool = False


class Work(NamedTuple):
    """Multiply-adds of the products of a call; `training`: forward and backward, with what is computed again."""

    forward: int
    training: int


def is_small(batch: int, queries: int, keys: int) -> bool:
    """Return whether the definition is as fast.

    Args:
        batch: number of texts.
        queries: queries of a text.
        keys: keys of a text.
    """
    return batch * queries * keys**2 <= _SMALL


def multiply_adds(size: Size) -> Work:
    """Count the multiply-adds of a call, by the definition where it is small."""
    if is_small(size.batch, size.queries, size.keys):
        forward = size.batch * size.queries * size.keys**2 * (size.rank + size.width)
        return Work(forward, 3 * forward)
    return work(size, order(size))


def work(size: Size, steps: tuple[Step, ...]) -> Work:
    """Count the multiply-adds of an order of steps.

    In the backward pass a product with W becomes two. A product of queries and pairs becomes two, and is computed again.
    """
    by_weight = 0  # products with W or the state, of one sequence
    by_pairs = 0  # products of queries and pairs
    for step in steps:
        rows = step.pairs * step.queries
        if step.into_state:
            rows += step.pairs * size.rank
        if step.reads:
            rows += step.queries * size.rank
        by_weight += rows * size.width
        by_pairs += step.pairs * step.queries * size.rank
    return Work(size.batch * (by_weight + by_pairs), size.batch * (3 * by_weight + 4 * by_pairs))


@lru_cache(maxsize=256)
def order(size: Size) -> tuple[Step, ...]:
    """Choose the order with fewer multiply-adds: all pairs directly, or all by the state but those of a query's own shell."""
    direct = list_steps(size, by_state=False)
    if size.masked:
        return direct
    by_state = list_steps(size, by_state=True)
    return min(direct, by_state, key=lambda steps: work(size, steps).training)


def list_steps(size: Size, by_state: bool) -> tuple[Step, ...]:
    """List the steps of a call, by the state or directly.

    First the pairs of positions that all queries see, in slabs of keys with all values. Then, of causal attention, the shells
    a <= max(j, m) < b of the positions of the queries, from the first to the last.
    """
    queries = size.queries
    seen = size.keys - queries if size.causal else size.keys
    slab = max(_PAIRS // max(seen, 1), 1)
    steps = []
    for start in range(0, seen, slab):
        rectangles: tuple[Rectangle, ...] = ((start, min(start + slab, seen), 0, seen),)
        if by_state:
            steps.append(Step(rectangles, 0, 0, 0, into_state=True))
        else:
            steps.append(Step(rectangles, 0, queries, queries if size.masked else 0))
    if not size.causal:
        if by_state:
            steps.append(Step((), 0, queries, 0, reads=True))
        return tuple(steps)
    shell = _SHELL_SMALL if size.half or size.batch <= 2 else _SHELL
    for first in range(0, queries, shell):
        end = min(first + shell, queries)
        a = seen + first
        b = seen + end
        rectangles = ((a, b, 0, b),)
        if a:
            rectangles = (*rectangles, (0, a, a, b))
        if by_state:
            steps.append(Step(rectangles, first, end, end, reads=a > 0, into_state=end < queries))
        else:
            steps.append(Step(rectangles, first, queries, end))
    return tuple(steps)


# -- one step ---------------------------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """Arguments of the operator: fields of `Pairs`, and the dtype of products. causal: False where `visible` is given."""

    query: Tensor
    keys: Tensor
    values: Tensor
    weight: Tensor
    visible: Tensor | None
    causal: bool
    dtype: torch.dtype

    @property
    def size(self) -> Size:
        batch, queries, rank = map(int, self.query.shape)  # a compiler has a graph for each length
        keys = int(self.keys.shape[1])
        width = int(self.weight.shape[2])
        half = self.dtype.itemsize == 2
        return Size(batch, queries, keys, rank, width, self.causal, self.visible is not None, half)


class _Operands:
    """The operands of a call, in the dtype of products; keys and values are (M, B, R), as are pairs: (p, B, R)."""

    def __init__(self, arguments: Arguments) -> None:
        self.size = arguments.size
        self.dtype = arguments.dtype
        self.wide = torch.promote_types(arguments.dtype, torch.float32)  # the dtype of sums
        self.query = arguments.query.to(arguments.dtype)
        self.keys = arguments.keys.to(arguments.dtype).transpose(0, 1).contiguous()
        self.values = arguments.values.to(arguments.dtype).transpose(0, 1).contiguous()
        self.weight = arguments.weight
        self.visible = arguments.visible

    def hidden(self, step: Step) -> Tensor | None:
        """Mark the pairs that a query does not see, (1 or B, queries first .. masked, p); None where it sees all."""
        if step.masked == step.first:
            return None
        if self.visible is not None:
            seen = self.visible[:, step.first : step.masked]
            parts = []
            for j0, j1, m0, m1 in step.rectangles:
                visible_pairs = seen[:, :, j0:j1, None] & seen[:, :, None, m0:m1]
                parts.append(visible_pairs.flatten(2))
            return ~torch.cat(parts, -1)
        past = self.size.keys - self.size.queries
        return _later(step.rectangles, past + step.first, past + step.masked, self.query.device)

    def factors(self, step: Step, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute X^T (p, columns) and P (p, B, R).

        The columns are (B, direct queries), then (B, R) where pairs go into the state.
        """
        batch = self.size.batch
        rank = self.size.rank
        columns = batch * step.queries
        if step.into_state:
            x = self.query.new_empty(step.pairs, columns + batch * rank)
            pairs = x[:, columns:].view(step.pairs, batch, rank)
        else:
            pairs = self.query.new_empty(step.pairs, batch, rank)
        for (j0, j1, m0, m1), part in _parts(pairs, step):
            torch.mul(self.keys[j0:j1, None], self.values[None, m0:m1], out=part)
        if step.queries:
            query = self.query[:, step.first : step.last]
            met = torch.bmm(query, pairs.permute(1, 2, 0))  # (B, direct, p)
            met = _hide(met, hidden).flatten(0, 1).t()
            if not step.into_state:
                return met, pairs
            x[:, :columns].copy_(met)
        return x, pairs

    def rows(self, step: Step) -> Tensor:
        """Read W (p, E) of the pairs of a step."""
        rows = _view_rows(self.weight, step)
        if rows is not None:
            return rows.to(self.dtype)
        rows = self.weight.new_empty(step.pairs, self.size.width, dtype=self.dtype)
        for (j0, j1, m0, m1), part in _parts(rows, step):
            part.copy_(self.weight[j0:j1, m0:m1])
        return rows


@lru_cache(maxsize=128)
def _later(rectangles: tuple[Rectangle, ...], first: int, last: int, device: torch.device) -> Tensor:
    """Mark the pairs that are later than a query at position first .. last, (1, last - first, p); some KiB each."""
    with torch.inference_mode(False):  # what is cached may be read with gradients later
        ends = [max(j1, m1) for _, j1, _, m1 in rectangles]
        position = torch.arange(max(last, *ends), device=device)
        times = []
        for j0, j1, m0, m1 in rectangles:
            later = torch.maximum(position[j0:j1, None], position[m0:m1])
            times.append(later.flatten())
        return (torch.cat(times) > position[first:last, None])[None]


def _view_rows(weight: Tensor, step: Step) -> Tensor | None:
    """View the rows (p, E) of weight (L, L, E) where the pairs of a step lie together; None where they do not."""
    j0, j1, m0, m1 = step.rectangles[0]
    whole_rows = m0 == 0 and m1 == weight.shape[1]
    if len(step.rectangles) > 1 or not whole_rows or not weight.is_contiguous():
        return None
    return weight[j0:j1].flatten(0, 1)


def _parts(x: Tensor, step: Step) -> list[tuple[Rectangle, Tensor]]:
    """Cut x (p, ...) into views (keys, values, ...), one for each rectangle."""
    parts = x.split([_count_pairs(rectangle) for rectangle in step.rectangles])
    views = []
    for rectangle, part in zip(step.rectangles, parts, strict=True):
        j0, j1, m0, m1 = rectangle
        views.append((rectangle, part.view(j1 - j0, m1 - m0, *x.shape[1:])))
    return views


def _hide(x: Tensor, hidden: Tensor | None) -> Tensor:
    if hidden is not None:
        x[:, : hidden.shape[1]].masked_fill_(hidden, 0.0)  # not times 0: later values may be infinite
    return x


# -- forward and backward ---------------------------------------------------------------------------------------------


def _forward(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Compute O (B, N, E) and the state before each step that reads it, (steps, B, R, E), in the dtype of products."""
    with torch.autocast(arguments.query.device.type, enabled=False):
        of = _Operands(arguments)
        size = of.size
        out = of.query.new_zeros(size.batch, size.queries, size.width, dtype=of.wide)
        state = of.query.new_zeros(size.batch * size.rank, size.width, dtype=of.wide)
        states = []
        for step in order(size):
            queries = slice(step.first, step.last)
            columns = size.batch * step.queries
            if step.reads:
                read = state.to(of.dtype, copy=True)
                states.append(read.view(size.batch, size.rank, size.width))
                out[:, queries] += of.query[:, queries] @ states[-1]
            if not step.pairs:
                continue
            x, _ = of.factors(step, of.hidden(step))
            y = multiply(x.t(), of.rows(step).t())
            if step.queries:
                out[:, queries] += y[:columns].view(size.batch, step.queries, size.width)
            if step.into_state:
                state += y[columns:]
        if states:
            return out.to(of.dtype), torch.stack(states)
        return out.to(of.dtype), of.query.new_empty(0, size.batch, size.rank, size.width)


def _backward(arguments: Arguments, cotangent: Tensor, states: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """Compute the gradients of query, keys, values and weight."""
    gradients = make_gradients(wanted, arguments[:4], cotangent)
    with torch.autocast(cotangent.device.type, enabled=False):
        of = _Operands(arguments)
        size = of.size
        d_out = cotangent.to(of.dtype)
        d_query = torch.zeros_like(of.query, dtype=of.wide)
        d_keys = torch.zeros_like(of.keys, dtype=of.wide)
        d_values = torch.zeros_like(of.values, dtype=of.wide)
        d_state = of.query.new_zeros(size.batch, size.rank, size.width, dtype=of.wide)  # G
        d_weight = gradients[3]
        if size.keys < of.weight.shape[0]:  # some pairs are in no step
            d_weight.zero_()
        unread = len(states)
        for step in reversed(order(size)):
            queries = slice(step.first, step.last)
            columns = size.batch * step.queries
            if step.pairs:
                hidden = of.hidden(step)
                x, pairs = of.factors(step, hidden)
                d_y = d_out[:, queries].flatten(0, 1)
                if step.into_state:
                    d_y = torch.cat((d_y, d_state.flatten(0, 1).to(of.dtype)))
                if wanted[3]:
                    _write(d_weight, x, d_y, step)
                if step.into_state:
                    d_x = multiply(of.rows(step), d_y)  # (p, columns)
                    d_pairs = d_x[:, columns:].view(step.pairs, size.batch, size.rank)
                    d_met = d_x[:, :columns].t().contiguous()
                else:
                    d_met = multiply(d_y, of.rows(step))
                if step.queries:
                    d_met = _hide(d_met.view(size.batch, step.queries, step.pairs), hidden)
                    d_query[:, queries] += torch.bmm(d_met, pairs.transpose(0, 1))
                    by_query = torch.bmm(d_met.mT, of.query[:, queries])  # (B, p, R)
                    by_query = by_query.transpose(0, 1)
                    d_pairs = d_pairs.add_(by_query) if step.into_state else by_query.contiguous()
                for (j0, j1, m0, m1), part in _parts(d_pairs, step):
                    d_keys[j0:j1] += (part * of.values[None, m0:m1]).sum(1)
                    d_values[m0:m1] += (part * of.keys[j0:j1, None]).sum(0)
            if step.reads:
                unread -= 1
                d_query[:, queries] += d_out[:, queries] @ states[unread].transpose(1, 2)
                d_state += of.query[:, queries].transpose(1, 2) @ d_out[:, queries]
        sums = (d_query, d_keys.transpose(0, 1), d_values.transpose(0, 1))
        for room, gradient in zip(gradients, sums, strict=False):
            if room.numel():
                room.copy_(gradient)
        return gradients


def _write(d_weight: Tensor, x: Tensor, d_y: Tensor, step: Step) -> None:
    """Write dW of the pairs of a step, X^T dY."""
    rows = _view_rows(d_weight, step)
    if rows is not None and rows.dtype == x.dtype:
        torch.mm(x, d_y, out=rows)
    else:
        for (j0, j1, m0, m1), part in _parts(multiply(x, d_y.t()), step):
            d_weight[j0:j1, m0:m1] = part


def _make_fake(arguments: Arguments) -> tuple[Tensor, Tensor]:
    size = arguments.size
    readers = sum(step.reads for step in order(size))
    out = arguments.query.new_empty(size.batch, size.queries, size.width, dtype=arguments.dtype)
    return out, arguments.query.new_empty(readers, size.batch, size.rank, size.width, dtype=arguments.dtype)


_apply = define_operator("multilinear", Arguments, 4, _forward, _backward, _make_fake, "multi-linear attention")


def declines(problem: Pairs | Tokens) -> str | None:
    """Return why the definition is to compute a call: it is as fast, or the kernel cannot. None where the kernel is faster."""
    if isinstance(problem, Tokens):
        few = problem.tokens.shape[1] - problem.before.shape[0] <= _CHUNK
        return "few tokens" if few else None
    batch, queries, _ = problem.query.shape
    if is_exporting():
        return "an exported graph, which is for any length"
    if is_small(batch, queries, problem.keys.shape[1]):
        return "a small T"
    if is_transformed():
        return "a transform of torch.func, which operators written by hand do not know"
    return None


def multiply_pairs(problem: Pairs) -> Tensor:
    """Compute O (B, N, E), in the dtype that autocast asks of products."""
    arguments = Arguments(
        problem.query,
        problem.keys,
        problem.values,
        problem.weight,
        problem.visible,
        problem.causal and problem.visible is None,
        product_dtype(problem.query, problem.weight),
    )
    return _apply(arguments)


# -- decayed sums -----------------------------------------------------------------------------------------------------


def compute_decayed_sums(problem: Tokens) -> Tensor:
    """Compute decayed sums A (B, N, S, R), chunk by chunk.

    Within a chunk of c tokens they are a product with a c x c matrix; across chunks, the same of the sums of chunks:

        A(i) = sum over n <= i of chunk k  a^(i-n) x_n  +  a^(i+1) C_k,        C_k = sum over l < k  a^(c (k-1-l)) T_l

    with i and n counted within the chunk, and T_l the sum at the end of chunk l alone. Exponents are never below 0, so that no
    quotient of powers can overflow. Plain PyTorch operations: differentiable as often as one likes, and seen by a compiler.
    """
    tokens = problem.tokens
    log = problem.log_decay
    state = problem.state
    past = problem.before.shape[0]
    if past:
        state = torch.exp(log[:, None] * problem.before) @ tokens[:, :past]  # (S, past) @ (B, past, R)
        tokens = tokens[:, past:]
    batch, count, rank = tokens.shape
    scales = log.shape[0]
    chunk = _CHUNK
    while 16 * chunk**2 < count:  # no isqrt, which a compiler does not know
        chunk *= 4
    chunks = -(-count // chunk)
    padded = F.pad(tokens, (0, 0, 0, chunks * chunk - count))
    pieces = padded.view(batch, chunks, chunk, rank)
    within = _powers(log, chunk).transpose(0, 1)  # (c, S, c)
    sums = (within.flatten(0, 1) @ pieces).view(batch, chunks, chunk, scales, rank)
    first = tokens.new_zeros(batch, scales, rank) if state is None else state
    ends = torch.cat((first[:, None], sums[:, :-1, -1]), 1)  # (B, chunks, S, R)
    ends = ends.transpose(1, 2)
    carried = (_powers(log * chunk, chunks) @ ends).transpose(1, 2)  # C (B, chunks, S, R)
    distance = torch.arange(1, chunk + 1, device=log.device)
    after = torch.exp(distance[:, None] * log)  # (c, S)
    sums.addcmul_(after[..., None], carried[:, :, None])
    sums = sums.view(batch, chunks * chunk, scales, rank)
    return sums if chunks * chunk == count else sums[:, :count]


def _powers(log: Tensor, count: int) -> Tensor:
    """Compute a_s^(i-j) for j <= i, else 0: (S, count, count)."""
    index = torch.arange(count, device=log.device)
    distance = (index[:, None] - index).clamp_min(0)
    return torch.exp(log[:, None, None] * distance).tril()
