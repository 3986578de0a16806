"""Attention with mixed heads in Triton: functions on tiles, the forward pass, and the backward pass.

Forward: sums of the weights (`totals`), then mixed weights times values (`outputs`). Backward: weights are computed again, and
programs share no sums. With G_i = drop(dO_i V_i^T), D_ji = rowsum(P_j o G_i) and delta_j = sum_i M_ji D_ji:

    dM_ji = D_ji,    dV_i = drop(sum_j M_ji P_j)^T dO_i
    dA_j = slope_j o P_j o (sum_i M_ji G_i - delta_j),    dQ_j = s dA_j K_j,    dK_j = s dA_j^T Q_j

A tile has queries along one side and keys along the other; either side may be the rows. Numbers of a query or of a key have a
second axis of length one, so that the same functions serve both orders. Exponents are powers of two.
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
    """True where query n sees key k (`VisibleKeys`); rows and columns beyond the end see nothing and are not seen."""
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


@triton.jit
def load_numbers(X, head, N, n):
    """A number of each query `n` of one head of X (heads, N), as a column."""
    return tl.load(X + head * N + n, mask=n < N, other=0.0)[:, None]


@triton.jit
def find_span(FIRST, END, at, length, other):
    """The interval of the other side, of that length, in which all is that the rows `at` see."""
    low = tl.min(tl.load(FIRST + at, mask=at < length, other=other))
    high = tl.max(tl.load(END + at, mask=at < length, other=0))
    return low, high


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["LONG"])
def totals(
    Q, K, TOTAL, FIRST, END, OWN, TOKENS, N, M, unit, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGMOID: tl.constexpr, PADDED: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """TOTAL (B, H, N): the log2 of the sum of each query's weights. Grid: tiles of queries, heads, texts.

    EACH: how many programs of the batch axis share one row of TOKENS, and of FIRST, if that has rows: PACKED is 1, else 0. LONG
    serves the choice of block sizes only.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those that see most begin first
    head, text = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = text * H * N * D, text * H * M * D
    Q, K = Q + rows, K + columns
    TOKENS += text // EACH * M
    FIRST += text // EACH * N * PACKED
    n = tile * BM + tl.arange(0, BM)
    low, high = find_span(FIRST, END, n, N, M)
    query = load_rows(Q, head, N, n, D, BD)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    for at in range(low // BN * BN, high, BN):
        k = at + tl.arange(0, BN)
        seen = see(FIRST, END, OWN, TOKENS, n[:, None], k[None, :], N, M, PADDED)
        product = dot(query, tl.trans(load_rows(K, head, M, k, D, BD)), None, PRECISION)
        x = tl.where(seen, exponent(product, unit, SIGMOID), float("-inf"))
        now = tl.maximum(top, tl.max(x, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen so far
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
        top = now
    total = tl.where(total == 0.0, 1.0, total)  # rows beyond the end
    tl.store(TOTAL + (text * H + head) * N + n, top + tl.log2(total), mask=n < N)


@triton.jit(do_not_specialize=["LONG", "least"])
def outputs(
    Q, K, V, MIXING, TOTAL, OUT, FIRST, END, OWN, TOKENS, SEED, N, M, unit, least, kept, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MIX: tl.constexpr, SIGMOID: tl.constexpr,
    PADDED: tl.constexpr, PACKED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """OUT_i = drop(sum_j M_ji P_j) V_i for a group of heads i. Grid: tiles of queries, groups, texts."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    start, text = tl.program_id(1) * G, tl.program_id(2).to(tl.int64)
    rows, columns = text * H * N * D, text * H * M * D
    Q, OUT, K, V = Q + rows, OUT + rows, K + columns, V + columns
    TOTAL = TOTAL + text * H * N
    TOKENS += text // EACH * M
    FIRST += text // EACH * N * PACKED
    if MIX == 2:
        MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    n = tile * BM + tl.arange(0, BM)
    low, high = find_span(FIRST, END, n, N, M)
    sums = group(G, BM, BD)
    for at in range(low // BN * BN, high, BN):
        k = at + tl.arange(0, BN)
        seen = see(FIRST, END, OWN, TOKENS, n[:, None], k[None, :], N, M, PADDED)
        mixed = group(G, BM, BN)
        for j in range(H):
            product = dot(load_rows(Q, j, N, n, D, BD), tl.trans(load_rows(K, j, M, k, D, BD)), None, PRECISION)
            total = load_numbers(TOTAL, j, N, n)
            x = weight(product, unit, total, seen, SIGMOID)
            mixed = spread(mixed, x, MIXING, j, start, n[:, None], N, H, 1, H, G, MIX)
        made = ()
        for i in tl.static_range(G):
            x = mixed[i]
            head = tl.minimum(start + i, H - 1)
            if DROP:
                x = drop(x, seed, least, kept, place, start, i, n[:, None], k[None, :], H, G)
            values = load_rows(V, head, M, k, D, BD)
            made = made + (dot(x.to(values.dtype), values, sums[i], PRECISION),)
        sums = made
    for i in tl.static_range(G):
        store_rows(OUT, tl.minimum(start + i, H - 1), N, n, sums[i], D, BD)


# -- backward ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["LONG", "least"])
def mixing_gradient(
    Q, K, V, D_OUT, TOTAL, D_MIXING, FIRST, END, OWN, TOKENS, SEED, N, M, unit, least, kept, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGMOID: tl.constexpr,
    PADDED: tl.constexpr, PACKED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    GJ: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_MIXING (B, H, H, N) = D_ji(n), for GJ sources j and G heads i. Grid: tiles of queries, pairs of groups, texts."""
    groups: tl.constexpr = (H + G - 1) // G
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    source, start = tl.program_id(1) // groups * GJ, tl.program_id(1) % groups * G
    text = tl.program_id(2).to(tl.int64)
    rows, columns = text * H * N * D, text * H * M * D
    Q, D_OUT, K, V = Q + rows, D_OUT + rows, K + columns, V + columns
    TOTAL = TOTAL + text * H * N
    TOKENS += text // EACH * M
    FIRST += text // EACH * N * PACKED
    D_MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    n = tile * BM + tl.arange(0, BM)
    low, high = find_span(FIRST, END, n, N, M)
    queries = load_group(Q, source, N, n, H, GJ, D, BD)
    cotangents = load_group(D_OUT, start, N, n, H, G, D, BD)
    sums = ()
    for _ in tl.static_range(GJ * G):
        sums = sums + (tl.zeros((BM,), dtype=tl.float32),)
    for at in range(low // BN * BN, high, BN):
        k = at + tl.arange(0, BN)
        seen = see(FIRST, END, OWN, TOKENS, n[:, None], k[None, :], N, M, PADDED)
        weights = ()
        for j in tl.static_range(GJ):
            head = tl.minimum(source + j, H - 1)
            keys = load_rows(K, head, M, k, D, BD)
            product = dot(queries[j], tl.trans(keys), None, PRECISION)
            total = load_numbers(TOTAL, head, N, n)
            weights = weights + (weight(product, unit, total, seen, SIGMOID),)
        made = ()
        for i in tl.static_range(G):
            head = tl.minimum(start + i, H - 1)
            values = load_rows(V, head, M, k, D, BD)
            x = dot(cotangents[i], tl.trans(values), None, PRECISION)
            if DROP:
                x = drop(x, seed, least, kept, place, start, i, n[:, None], k[None, :], H, G)
            for j in tl.static_range(GJ):
                made = made + (sums[i * GJ + j] + tl.sum(weights[j] * x, 1),)
        sums = made
    for i in tl.static_range(G):
        for j in tl.static_range(GJ):
            place = tl.minimum(source + j, H - 1) * H + tl.minimum(start + i, H - 1)
            tl.store(D_MIXING + place * N + n, sums[i * GJ + j], mask=n < N)


@triton.jit(do_not_specialize=["LONG", "least"])
def query_gradient(
    Q, K, V, MIXING, D_OUT, TOTAL, DELTA, D_Q, FIRST, END, OWN, TOKENS, SEED, N, M, scale, unit, least, kept, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MIX: tl.constexpr, SIGMOID: tl.constexpr,
    PADDED: tl.constexpr, PACKED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_Q of a group of heads j. Grid: tiles of queries, groups, texts."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    start, text = tl.program_id(1) * G, tl.program_id(2).to(tl.int64)
    rows, columns = text * H * N * D, text * H * M * D
    Q, D_Q, D_OUT, K, V = Q + rows, D_Q + rows, D_OUT + rows, K + columns, V + columns
    TOTAL, DELTA = TOTAL + text * H * N, DELTA + text * H * N
    TOKENS += text // EACH * M
    FIRST += text // EACH * N * PACKED
    if MIX == 2:
        MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    n = tile * BM + tl.arange(0, BM)
    low, high = find_span(FIRST, END, n, N, M)
    queries = load_group(Q, start, N, n, H, G, D, BD)
    sums = group(G, BM, BD)
    for at in range(low // BN * BN, high, BN):
        k = at + tl.arange(0, BN)
        seen = see(FIRST, END, OWN, TOKENS, n[:, None], k[None, :], N, M, PADDED)
        wanted = group(G, BM, BN)
        for i in range(H):
            values = load_rows(V, i, M, k, D, BD)
            x = dot(load_rows(D_OUT, i, N, n, D, BD), tl.trans(values), None, PRECISION)
            if DROP:
                x = drop(x, seed, least, kept, place, i, 0, n[:, None], k[None, :], H, 1)
            wanted = spread(wanted, x, MIXING, i, start, n[:, None], N, 1, H, H, G, MIX)
        made = ()
        for j in tl.static_range(G):
            head = tl.minimum(start + j, H - 1)
            keys = load_rows(K, head, M, k, D, BD)
            product = dot(queries[j], tl.trans(keys), None, PRECISION)
            total, delta = load_numbers(TOTAL, head, N, n), load_numbers(DELTA, head, N, n)
            x = weight(product, unit, total, seen, SIGMOID) * (wanted[j] - delta) * slope(product, unit, SIGMOID)
            made = made + (dot(x.to(keys.dtype), keys, sums[j], PRECISION),)
        sums = made
    for j in tl.static_range(G):
        store_rows(D_Q, tl.minimum(start + j, H - 1), N, n, sums[j] * scale, D, BD)


@triton.jit(do_not_specialize=["LONG", "least"])
def value_gradient(
    Q, K, MIXING, D_OUT, TOTAL, D_V, FIRST, END, OWN, TOKENS, LOOKS, LOOKED, SEED, N, M, unit, least, kept, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MIX: tl.constexpr, SIGMOID: tl.constexpr,
    PADDED: tl.constexpr, PACKED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_V of a group of heads i. Grid: tiles of keys, groups, texts. LOOKS, LOOKED (M,): the queries that see a key."""
    start, text = tl.program_id(1) * G, tl.program_id(2).to(tl.int64)
    rows, columns = text * H * N * D, text * H * M * D
    Q, D_OUT, K, D_V = Q + rows, D_OUT + rows, K + columns, D_V + columns
    TOTAL = TOTAL + text * H * N
    TOKENS += text // EACH * M
    FIRST += text // EACH * N * PACKED
    LOOKED += text // EACH * M * PACKED
    if MIX == 2:
        MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    low, high = find_span(LOOKS, LOOKED, k, M, N)
    sums = group(G, BN, BD)
    for at in range(low // BM * BM, high, BM):
        n = at + tl.arange(0, BM)
        seen = see(FIRST, END, OWN, TOKENS, n[:, None], k[None, :], N, M, PADDED)
        mixed = group(G, BM, BN)
        for j in range(H):
            product = dot(load_rows(Q, j, N, n, D, BD), tl.trans(load_rows(K, j, M, k, D, BD)), None, PRECISION)
            total = load_numbers(TOTAL, j, N, n)
            x = weight(product, unit, total, seen, SIGMOID)
            mixed = spread(mixed, x, MIXING, j, start, n[:, None], N, H, 1, H, G, MIX)
        made = ()
        for i in tl.static_range(G):
            x = mixed[i]
            head = tl.minimum(start + i, H - 1)
            if DROP:
                x = drop(x, seed, least, kept, place, start, i, n[:, None], k[None, :], H, G)
            cotangent = load_rows(D_OUT, head, N, n, D, BD)
            made = made + (dot(tl.trans(x.to(cotangent.dtype)), cotangent, sums[i], PRECISION),)
        sums = made
    for i in tl.static_range(G):
        store_rows(D_V, tl.minimum(start + i, H - 1), M, k, sums[i], D, BD)


@triton.jit(do_not_specialize=["LONG", "least"])
def key_gradient(
    Q, K, V, MIXING, D_OUT, TOTAL, DELTA, D_K, FIRST, END, OWN, TOKENS, LOOKS, LOOKED, SEED,
    N, M, scale, unit, least, kept, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MIX: tl.constexpr, SIGMOID: tl.constexpr,
    PADDED: tl.constexpr, PACKED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_K of a group of heads j. Grid: tiles of keys, groups, texts."""
    start, text = tl.program_id(1) * G, tl.program_id(2).to(tl.int64)
    rows, columns = text * H * N * D, text * H * M * D
    Q, D_OUT, K, V, D_K = Q + rows, D_OUT + rows, K + columns, V + columns, D_K + columns
    TOTAL, DELTA = TOTAL + text * H * N, DELTA + text * H * N
    TOKENS += text // EACH * M
    FIRST += text // EACH * N * PACKED
    LOOKED += text // EACH * M * PACKED
    if MIX == 2:
        MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    low, high = find_span(LOOKS, LOOKED, k, M, N)
    held = load_group(K, start, M, k, H, G, D, BD)
    sums = group(G, BN, BD)
    for at in range(low // BM * BM, high, BM):
        n = at + tl.arange(0, BM)
        seen = see(FIRST, END, OWN, TOKENS, n[:, None], k[None, :], N, M, PADDED)
        wanted = group(G, BM, BN)
        for i in range(H):
            cotangent = load_rows(D_OUT, i, N, n, D, BD)
            x = dot(cotangent, tl.trans(load_rows(V, i, M, k, D, BD)), None, PRECISION)
            if DROP:
                x = drop(x, seed, least, kept, place, i, 0, n[:, None], k[None, :], H, 1)
            wanted = spread(wanted, x, MIXING, i, start, n[:, None], N, 1, H, H, G, MIX)
        made = ()
        for j in tl.static_range(G):
            head = tl.minimum(start + j, H - 1)
            query = load_rows(Q, head, N, n, D, BD)
            product = dot(query, tl.trans(held[j]), None, PRECISION)
            total, delta = load_numbers(TOTAL, head, N, n), load_numbers(DELTA, head, N, n)
            x = weight(product, unit, total, seen, SIGMOID) * (wanted[j] - delta) * slope(product, unit, SIGMOID)
            made = made + (dot(tl.trans(x.to(query.dtype)), query, sums[j], PRECISION),)
        sums = made
    for j in tl.static_range(G):
        store_rows(D_K, tl.minimum(start + j, H - 1), M, k, sums[j] * scale, D, BD)
