"""What the Triton kernels of mixed heads have in common: loading a tile, who sees whom, scores, weights, mixing, dropout.

A tile has queries along one side and keys along the other; either side may be the rows. What belongs to a query or to a key is
handed over with a second axis of length one, so that the same functions serve both orders. Exponents are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(X, head, length, at, D: tl.constexpr, BD: tl.constexpr):
    """Rows `at` of one head of X (heads, length, D), padded with zeros to BD columns."""
    d = tl.arange(0, BD)
    inside = (at < length)[:, None]
    if BD != D:
        inside = inside & (d < D)[None, :]
    return tl.load(X + head * length * D + at[:, None] * D + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(X, head, length, at, tile, D: tl.constexpr, BD: tl.constexpr):
    """The opposite of `load_rows`."""
    d = tl.arange(0, BD)
    inside = (at < length)[:, None] & (d < D)[None, :]
    tl.store(X + head * length * D + at[:, None] * D + d[None, :], tile.to(X.dtype.element_ty), mask=inside)


@triton.jit
def load_group(X, start, length, at, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows `at` of each head of a group. Loaded before a loop, they stay in shared memory during it."""
    made = ()
    for i in tl.static_range(G):
        made = made + (load_rows(X, tl.minimum(start + i, H - 1), length, at, D, BD),)
    return made


@triton.jit
def dot(a, b, sums, PRECISION: tl.constexpr):
    """a b, added to `sums` unless that is None, in fp32. "widened": bf16 for the interpreter, which knows no such products."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def group(G: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """G tiles of zeros."""
    made = ()
    for _ in tl.static_range(G):
        made = made + (tl.zeros((rows, columns), dtype=tl.float32),)
    return made


@triton.jit
def see(FIRST, END, OWN, TOKENS, n, k, N, M, PADDED: tl.constexpr):
    """Whether queries n see keys k (sight.py); rows and columns beyond the end see nothing and are not seen."""
    first = tl.load(FIRST + n, mask=n < N, other=0)
    end = tl.load(END + n, mask=n < N, other=0)
    seen = (k >= first) & (k < end)
    if PADDED:
        own = tl.load(OWN + n, mask=n < N, other=-1)
        token = tl.load(TOKENS + k, mask=k < M, other=0) != 0
        seen = seen & (token | (k == own))
    return seen


@triton.jit
def exponent(product, unit, SIGMOID: tl.constexpr):
    """log2 of a weight that is not yet normalised: of exp(a), or of exp(a) sigmoid(a); unit = s log2(e)."""
    a = product * unit
    if SIGMOID:
        a = a + tl.minimum(a, 0.0) - tl.log2(1.0 + tl.exp2(-tl.abs(a)))
    return a


@triton.jit
def weight(product, unit, total, seen, SIGMOID: tl.constexpr):
    """P of products Q K^T, where `total` is the log2 of the sum over all keys."""
    return tl.exp2(tl.where(seen, exponent(product, unit, SIGMOID) - total, float("-inf")))


@triton.jit
def slope(product, unit, SIGMOID: tl.constexpr):
    """d exponent / d a, both in the same base: 1, or 2 - sigmoid(a)."""
    if SIGMOID:
        a = product * unit
        small = tl.exp2(-tl.abs(a))
        return 2.0 - tl.where(a >= 0.0, 1.0, small) / (1.0 + small)
    else:
        return 1.0


@triton.jit
def spread(
    tiles, x, MIXING, other, start, n, N,
    OTHER: tl.constexpr, OWN: tl.constexpr, H: tl.constexpr, G: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """tiles[i] + m x, where m is the entry of M between head `other` and head i of the group.

    Its place in MIXING (H, H), or with MIX = 2 (H, H, N), is other * OTHER + i * OWN. MIX = 0: M = I and a single head.
    A group that would go beyond the last head repeats it: that head is computed and stored twice, with the same numbers.
    """
    if MIX == 1:
        row = MIXING + other * OTHER
    elif MIX == 2:
        row = MIXING + other * OTHER * N + n
    made = ()
    for i in tl.static_range(G):
        if MIX == 0:
            made = made + (tiles[i] + x,)
        elif MIX == 1:
            made = made + (tiles[i] + tl.load(row + tl.minimum(start + i, H - 1) * OWN) * x,)
        else:
            entry = tl.load(row + tl.minimum(start + i, H - 1) * (OWN * N), mask=n < N, other=0.0)
            made = made + (tiles[i] + entry * x,)
    return made


@triton.jit
def drop(x, seed, least, kept, text, start, i: tl.constexpr, n, k, H: tl.constexpr, G: tl.constexpr):
    """x / (1 - p) where the mixed weight of head i of a group, query n and key k is kept, 0 where it is dropped.

    Philox at (key, query, text and four heads) draws for four heads at once, so no counter has more than 32 bits; where
    groups are whole fours the compiler sees that they share it. least: of a kept draw, as a signed number; kept: 1 / (1 - p).
    """
    quads: tl.constexpr = (H + 3) // 4
    if H % G == 0 and G % 4 == 0:
        quad = start // 4 + i // 4
        which = i % 4
    else:
        quad = tl.minimum(start + i, H - 1) // 4
        which = tl.minimum(start + i, H - 1) % 4
    a, b, c, d = tl.philox(seed, k, n, (text * quads + quad).to(tl.int32), 0, 7)
    drawn = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
    return tl.where(drawn.to(tl.int32, bitcast=True) >= least, x * kept, 0.0)
