"""The forward pass of attention with mixed heads, in Triton: sums of the weights, then mixed weights times values."""

from __future__ import annotations

import triton
import triton.language as tl

from fullrank.kernels.triton_tiles import (
    dot,
    drop,
    exponent,
    group,
    load_rows,
    see,
    spread,
    store_rows,
    weight,
)


@triton.jit(do_not_specialize=["LONG"])
def totals(
    Q, K, TOTAL, FIRST, END, OWN, TOKENS, N, M, unit, LONG,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGMOID: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """TOTAL (B, H, N): the log2 of the sum of each query's weights. Grid: tiles of queries, heads, texts.

    EACH: how many programs of the batch axis share one row of TOKENS. LONG serves the choice of block sizes only.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those that see most begin first
    head, text = tl.program_id(1), tl.program_id(2).to(tl.int64)
    Q += text * H * N * D
    K += text * H * M * D
    TOKENS += text // EACH * M
    n = tile * BM + tl.arange(0, BM)
    low = tl.min(tl.load(FIRST + n, mask=n < N, other=M))
    high = tl.max(tl.load(END + n, mask=n < N, other=0))
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
    PADDED: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, EACH: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """OUT_i = drop(sum_j M_ji P_j) V_i for a group of heads i. Grid: tiles of queries, groups, texts."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    start, text = tl.program_id(1) * G, tl.program_id(2).to(tl.int64)
    Q += text * H * N * D
    OUT += text * H * N * D
    K += text * H * M * D
    V += text * H * M * D
    TOTAL += text * H * N
    TOKENS += text // EACH * M
    if MIX == 2:
        MIXING += text * H * H * N
    if DROP:
        seed = tl.load(SEED)
    n = tile * BM + tl.arange(0, BM)
    low = tl.min(tl.load(FIRST + n, mask=n < N, other=M))
    high = tl.max(tl.load(END + n, mask=n < N, other=0))
    sums = group(G, BM, BD)
    for at in range(low // BN * BN, high, BN):
        k = at + tl.arange(0, BN)
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
                x = drop(x, seed, least, kept, text, start, i, n[:, None], k[None, :], H, G)
            values = load_rows(V, head, M, k, D, BD)
            made = made + (dot(x.to(values.dtype), values, sums[i], PRECISION),)
        sums = made
    for i in tl.static_range(G):
        store_rows(OUT, tl.minimum(start + i, H - 1), N, n, sums[i], D, BD)
