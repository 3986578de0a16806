"""In which order multi-linear attention works off its M^2 pairs of positions, and what that costs.

A pair (j, m) belongs to time max(j, m): a causal query at t sees the pairs of times <= t. Pairs reach queries in two ways,

    directly      O_i += sum_p (q_i . P_p) W_p                      (R + E) multiply-adds for each query and pair
    by the state  C += sum_p P_p W_p^T, later O_i += q_i C           R E for each pair, and R E for each query

with P_jm = K_j o V_m. A stage is a run of queries; pairs of its own times reach it directly, earlier ones by the state.
One stage is the N^3 form by rows, for short texts; many short ones are linear attention over pairs, for long ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

Rectangle = tuple[int, int, int, int]  # keys j0 .. j1, values m0 .. m1


class Step(NamedTuple):
    """Pairs that are multiplied at once: directly with queries first .. last, and into the state.

    Queries first .. masked do not see all of them.
    """

    rectangles: tuple[Rectangle, ...]
    first: int
    last: int
    masked: int
    into_state: bool

    @property
    def pairs(self) -> int:
        return sum((j1 - j0) * (m1 - m0) for j0, j1, m0, m1 in self.rectangles)

    @property
    def queries(self) -> int:
        """Those that the pairs are multiplied with, also where they do not see all of them."""
        return self.last - self.first


class Stage(NamedTuple):
    """Queries first .. last read the state as it is before `steps`."""

    first: int
    last: int
    reads: bool
    steps: tuple[Step, ...]


class Shape(NamedTuple):
    """Sizes of a call; `masked`: which queries see which positions is given, position by position."""

    batch: int
    queries: int
    keys: int
    rank: int
    width: int
    causal: bool
    masked: bool
    on_cpu: bool = True
    narrow: bool = False  # operands of 16 bits


class Work(NamedTuple):
    """Multiply-adds of the products of a call; `training`: forward and backward, what is computed again included."""

    forward: int
    training: int


class Slab(NamedTuple):
    """Keys begin .. end with all values, and the first query that sees one of them."""

    begin: int
    end: int
    first: int


TINY = 1 << 17  # numbers of T up to which T itself is built

_HALVED = 32  # keys from which on two products are faster than one

# multiply-adds that take as long as what a step costs besides its products, forward and backward, on one core
_STEP = 6e6
_STEP_NARROW = 20e6
_STEP_GPU = 1e9
_COPY = 30.0  # of a number of W to where the pairs of a step are together, forward and backward
_SLAB = 16  # keys whose pairs are multiplied at once where all queries meet them
_PAIRS = 4096  # of one step, at most, where they can be cut


@lru_cache(maxsize=256)
def plan(shape: Shape) -> tuple[Stage, ...]:
    """The cheapest order by `cost`."""
    return min(_candidates(shape), key=lambda stages: cost(shape, stages))


def cost(shape: Shape, stages: tuple[Stage, ...]) -> float:
    """Multiply-adds forward and backward, and what orders differ in beside them."""
    total = float(work(shape, stages).training)
    for step in (step for stage in stages for step in stage.steps):
        total += (_STEP_NARROW if shape.narrow else _STEP) if shape.on_cpu else _STEP_GPU
        if len(step.rectangles) > 1 or step.rectangles[0][2:] != (0, shape.keys):
            total += _COPY * step.pairs * shape.width
    return total


def work(shape: Shape, stages: tuple[Stage, ...]) -> Work:
    """Of an order. Backward, a product with W becomes two, one of queries and pairs two, and it is computed again."""
    by_weight = by_pairs = 0  # products with W or the state, and those of queries and pairs, of one text
    for stage in stages:
        if stage.reads:
            by_weight += (stage.last - stage.first) * shape.rank * shape.width
        for step in stage.steps:
            by_weight += step.pairs * (step.queries + step.into_state * shape.rank) * shape.width
            by_pairs += step.pairs * step.queries * shape.rank
    return Work(shape.batch * (by_weight + by_pairs), shape.batch * (3 * by_weight + 4 * by_pairs))


def multiply_adds(shape: Shape) -> Work:
    """Of a call, in the order that is chosen for it."""
    triples = shape.batch * shape.queries * shape.keys**2
    if triples <= TINY:
        seen = triples
        if shape.causal:
            seen = sum(
                shape.batch * (shape.queries - slab.first) * (slab.end - slab.begin) * shape.keys
                for slab in slabs(shape.queries, shape.keys)
            )
        forward = triples * shape.rank + seen * shape.width
        return Work(forward, 3 * forward)
    return work(shape, plan(shape))


def slabs(queries: int, keys: int) -> list[Slab]:
    """Where T itself is built, what of it is multiplied with W at once: for very short texts all, else half of the keys."""
    size = -(-keys // 2) if keys >= _HALVED else keys
    found = [Slab(b, min(b + size, keys), max(b - (keys - queries), 0)) for b in range(0, keys, size)]
    return [slab for slab in found if slab.first < queries]


def _candidates(shape: Shape) -> list[tuple[Stage, ...]]:
    queries, keys = shape.queries, shape.keys
    if not shape.causal:
        direct: list[Step] = []
        for begin in range(0, keys, _SLAB):
            slab = (begin, min(begin + _SLAB, keys), 0, keys)
            direct += _steps([slab], 0, queries, queries if shape.masked else 0, False)
        full: list[tuple[Stage, ...]] = [(Stage(0, queries, False, tuple(direct)),)]
        if not shape.masked:
            full.append((_filling(keys), Stage(0, queries, True, ())))
        return full
    found = [_slabs(queries, keys, slab) for slab in (8, 16, 32) if slab < queries + 8]
    for shell in (4, 8, 16, 32, 64):
        lengths = {shell, 2 * shell, 4 * shell, queries}
        for length in (size for size in lengths if size <= queries):
            for past_by_state in (False, True) if keys > queries else (False,):
                found.append(causal_stages(queries, keys, min(shell, queries), length, past_by_state))
        if shell >= queries:
            break
    return found


def causal_stages(queries: int, keys: int, shell: int, length: int, past_by_state: bool) -> tuple[Stage, ...]:
    """Stages of `length` queries, the pairs of `shell` times at once; pairs before the first query by the state, or not."""
    past = keys - queries
    stages = [_filling(past)] if past and past_by_state else []
    for first in range(0, queries, length):
        last = min(first + length, queries)
        onward = last < queries
        steps: list[Step] = []
        if first == 0 and past and not past_by_state:
            steps += _steps(_square(past), first, last, first, onward)
        for begin in range(first, last, shell):
            end = min(begin + shell, last)
            a, b = past + begin, past + end  # the shell a <= max(j, m) < b
            shape: list[Rectangle] = [(a, b, 0, b)] + ([(0, a, a, b)] if a else [])
            steps += _steps(shape, begin, last, end, onward)
        stages.append(Stage(first, last, bool(stages), tuple(steps)))
    return tuple(stages)


def _slabs(queries: int, keys: int, slab: int) -> tuple[Stage, ...]:
    """One stage: all pairs of `slab` keys at once, directly. Later values are multiplied in vain, but W needs no copy."""
    past = keys - queries
    steps: list[Step] = []
    for begin in range(0, keys, slab):
        first = max(begin - past, 0)
        steps += _steps([(begin, min(begin + slab, keys), 0, keys)], first, queries, queries, False)
    return (Stage(0, queries, False, tuple(steps)),)


def _filling(keys: int) -> Stage:
    """All pairs of the first `keys` positions into the state."""
    return Stage(0, 0, False, _steps(_square(keys), 0, 0, 0, True))


def _square(keys: int) -> list[Rectangle]:
    return [(0, keys, 0, keys)]


def _steps(shape: list[Rectangle], first: int, last: int, masked: int, into_state: bool) -> tuple[Step, ...]:
    """One step, or several where there are too many pairs; a rectangle is cut between keys."""
    if sum((j1 - j0) * (m1 - m0) for j0, j1, m0, m1 in shape) <= _PAIRS:
        return (Step(tuple(shape), first, last, masked, into_state),)
    found = []
    for j0, j1, m0, m1 in shape:
        rows = max(_PAIRS // max(m1 - m0, 1), 1)
        for j in range(j0, j1, rows):
            found.append(Step(((j, min(j + rows, j1), m0, m1),), first, last, masked, into_state))
    return tuple(found)
