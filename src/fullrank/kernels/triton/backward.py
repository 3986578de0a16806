"""The backward pass of attention with mixed heads, in Triton. Weights are computed again, and programs share no sums.

With G_i = drop(dO_i V_i^T), D_ji = rowsum(P_j o G_i) and delta_j = sum_i M_ji D_ji:

    dM_ji = D_ji,    dV_i = drop(sum_j M_ji P_j)^T dO_i
    dA_j = slope_j o P_j o (sum_i M_ji G_i - delta_j),    dQ_j = s dA_j K_j,    dK_j = s dA_j^T Q_j
"""

from __future__ import annotations

import triton
import triton.language as tl

from fullrank.kernels.triton.forward import (
    dot,
    drop,
    group,
    load_group,
    load_rows,
    see,
    slope,
    spread,
    store_rows,
    weight,
)


@triton.jit(do_not_specialize=["LONG", "least"])
def mixing_gradient(
    Q, K, V, D_OUT, TOTAL, D_MIXING, FIRST, END, OWN, TOKENS, SEED, N, M, unit, least, kept, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGMOID: tl.constexpr,
    PADDED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    GJ: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_MIXING (B, H, H, N) = D_ji(n), for GJ sources j and G heads i. Grid: tiles of queries, pairs of groups, texts."""
    groups: tl.constexpr = (H + G - 1) // G
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    source, start = tl.program_id(1) // groups * GJ, tl.program_id(1) % groups * G
    text = tl.program_id(2).to(tl.int64)
    Q += text * H * N * D
    D_OUT += text * H * N * D
    K += text * H * M * D
    V += text * H * M * D
    TOTAL += text * H * N
    TOKENS += text // EACH * M
    D_MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    n = tile * BM + tl.arange(0, BM)
    low = tl.min(tl.load(FIRST + n, mask=n < N, other=M))
    high = tl.max(tl.load(END + n, mask=n < N, other=0))
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
            total = tl.load(TOTAL + head * N + n, mask=n < N, other=0.0)
            weights = weights + (weight(product, unit, total[:, None], seen, SIGMOID),)
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
    PADDED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_Q of a group of heads j. Grid: tiles of queries, groups, texts."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    start, text = tl.program_id(1) * G, tl.program_id(2).to(tl.int64)
    Q += text * H * N * D
    D_Q += text * H * N * D
    D_OUT += text * H * N * D
    K += text * H * M * D
    V += text * H * M * D
    TOTAL += text * H * N
    DELTA += text * H * N
    TOKENS += text // EACH * M
    if MIX == 2:
        MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    n = tile * BM + tl.arange(0, BM)
    low = tl.min(tl.load(FIRST + n, mask=n < N, other=M))
    high = tl.max(tl.load(END + n, mask=n < N, other=0))
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
            total = tl.load(TOTAL + head * N + n, mask=n < N, other=0.0)[:, None]
            delta = tl.load(DELTA + head * N + n, mask=n < N, other=0.0)[:, None]
            x = weight(product, unit, total, seen, SIGMOID) * (wanted[j] - delta) * slope(product, unit, SIGMOID)
            made = made + (dot(x.to(keys.dtype), keys, sums[j], PRECISION),)
        sums = made
    for j in tl.static_range(G):
        store_rows(D_Q, tl.minimum(start + j, H - 1), N, n, sums[j] * scale, D, BD)


@triton.jit(do_not_specialize=["LONG", "least"])
def value_gradient(
    Q, K, MIXING, D_OUT, TOTAL, D_V, FIRST, END, OWN, TOKENS, LOOKS, LOOKED, SEED, N, M, unit, least, kept, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MIX: tl.constexpr, SIGMOID: tl.constexpr,
    PADDED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_V of a group of heads i. Grid: tiles of keys, groups, texts. LOOKS, LOOKED (M,): the queries that see a key."""
    start, text = tl.program_id(1) * G, tl.program_id(2).to(tl.int64)
    Q += text * H * N * D
    D_OUT += text * H * N * D
    K += text * H * M * D
    D_V += text * H * M * D
    TOTAL += text * H * N
    TOKENS += text // EACH * M
    if MIX == 2:
        MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    low = tl.min(tl.load(LOOKS + k, mask=k < M, other=N))
    high = tl.max(tl.load(LOOKED + k, mask=k < M, other=0))
    sums = group(G, BN, BD)
    for at in range(low // BM * BM, high, BM):
        n = at + tl.arange(0, BM)
        seen = see(FIRST, END, OWN, TOKENS, n[:, None], k[None, :], N, M, PADDED)
        mixed = group(G, BM, BN)
        for j in range(H):
            product = dot(load_rows(Q, j, N, n, D, BD), tl.trans(load_rows(K, j, M, k, D, BD)), None, PRECISION)
            total = tl.load(TOTAL + j * N + n, mask=n < N, other=0.0)
            x = weight(product, unit, total[:, None], seen, SIGMOID)
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
    PADDED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_K of a group of heads j. Grid: tiles of keys, groups, texts."""
    start, text = tl.program_id(1) * G, tl.program_id(2).to(tl.int64)
    Q += text * H * N * D
    D_OUT += text * H * N * D
    K += text * H * M * D
    V += text * H * M * D
    D_K += text * H * M * D
    TOTAL += text * H * N
    DELTA += text * H * N
    TOKENS += text // EACH * M
    if MIX == 2:
        MIXING += text * H * H * N
    if DROP:
        seed, place = tl.load(SEED), text + tl.load(SEED + 1)
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    low = tl.min(tl.load(LOOKS + k, mask=k < M, other=N))
    high = tl.max(tl.load(LOOKED + k, mask=k < M, other=0))
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
            total = tl.load(TOTAL + head * N + n, mask=n < N, other=0.0)[:, None]
            delta = tl.load(DELTA + head * N + n, mask=n < N, other=0.0)[:, None]
            x = weight(product, unit, total, seen, SIGMOID) * (wanted[j] - delta) * slope(product, unit, SIGMOID)
            made = made + (dot(tl.trans(x.to(query.dtype)), query, sums[j], PRECISION),)
        sums = made
    for j in tl.static_range(G):
        store_rows(D_K, tl.minimum(start + j, H - 1), M, k, sums[j] * scale, D, BD)
