"""Attention with mixed heads in Triton: functions on tiles, and four kernels.

Forward: sums of the weights (`totals`), then mixed weights times values (`sum_rows`). Backward: weights are computed
again, and programs share no sums. With G_i = drop(dO_i V_i^T), D_ji = rowsum(P_j o G_i) and delta_j = sum_i M_ji D_ji:

    dM_ji = D_ji,    dV_i = drop(sum_j M_ji P_j)^T dO_i
    dA_j = slope_j o P_j o (sum_i M_ji G_i - delta_j),    dQ_j = s dA_j K_j,    dK_j = s dA_j^T Q_j

Where scores are mixed, A_i = sum_j L_ji S_j with S_j = s Q_j K_j^T, those last products are of other sums:

    dS_j = sum_i L_ji dA_i,    dQ_j = s dS_j K_j,    dK_j = s dS_j^T Q_j,    dL_ji = rowsum(S_j o dA_i)

The tiles of all heads are then held at once, by small programs, and heads are loaded in each round. Where keys add to M or L,
their gradients are the sums of columns, and delta_j = rowsum(P_j o dP_j) takes a round of its own.
The output and dV are one kernel, and so are dQ and dK: a tile has its program's own positions as rows, those that the program
goes through as columns. Either may be queries, the other keys. Numbers of a query or of a key have a second axis of length one,
so that the same functions serve both orders. Exponents are powers of two.

Arguments of the kernels and of the functions that they loop over:

    Q, K, V, X, D_OUT, OUT    rows of heads (B, H, N or M, D): a pointer, and the strides of texts, heads and rows
    MIXING, SCORING           M and L: pointers to (H, H) or (B, H, H, N), and to what keys add (B, H, H, M)
    TOTAL, DELTA, D_MIXING    log2 of the sums of weights and delta (B, H, N); what TERM says (B, H, H, N or M)
    VISIBLE                   first, end and own_key of `VisibleKeys`, and the interval of queries that see a key
    TOKENS                    (rows, M): 0 where a key is padding
    SEED, least, kept         dropout, see `drop`
    N, M, EACH                queries and keys of a text; texts that share a row of TOKENS, and of the intervals if PACKED
    scale, unit               s, and s log2(e)
    H, D, BD                  heads, numbers of a head, and those padded to a power of two
    MIX, SCORE                0: no matrix (for M a single head), 1: one of all positions, 2: of each query; 3, 4: keys add
    SIGMOID, PADDED           sigsoftmax; some key is padding
    PACKED, DROP              texts hold documents; weights are dropped
    PRECISION                 of products, see `dot`
    KEYS, HELD                a program owns keys, not queries; rows of all heads of its tile stay in shared memory
    TERM                      of `mixing_gradient`: "weights" P_j o G_i, "scores" S_j o dA_i / s, "delta" M_ji P_j o G_i
    G, GJ                     heads of a group, and sources of a group
    BM, BN                    positions that a program owns, and those that it goes through at a time
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def load_rows(X, place, head, D: constexpr, BD: constexpr):
    """Load rows of one head, padded with zeros.

    Args:
        X: a pointer, and the strides of texts, heads and rows.
        place: a text, the number of its rows, and which of them.
        head: its number.
        D: numbers of a head.
        BD: columns of the tile, at least D.
    """
    text, length, at = place
    d = tl.arange(0, BD)
    inside = (at < length)[:, None]
    if BD != D:
        inside = inside & (d < D)[None, :]
    start = X[0] + text * X[1] + head * X[2]
    return tl.load(start + at[:, None] * X[3] + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(X, place, head, tile, D: constexpr, BD: constexpr):
    """Store rows of one head, the opposite of `load_rows`.

    Args:
        X: a pointer, and the strides of texts, heads and rows.
        place: a text, the number of its rows, and which of them.
        head: its number.
        tile: the rows, with BD columns.
        D: numbers of a head.
        BD: columns of the tile, at least D.
    """
    text, length, at = place
    d = tl.arange(0, BD)
    inside = (at < length)[:, None] & (d < D)[None, :]
    start = X[0] + text * X[1] + head * X[2]
    tl.store(start + at[:, None] * X[3] + d[None, :], tile.to(X[0].dtype.element_ty), mask=inside)


@triton.jit
def choose_head(start, i, H: constexpr):
    """Choose head i of a group.

    A group that would go beyond the last head repeats it: it is computed twice, with the same numbers.

    Args:
        start: first head of the group.
        i: number of the head in the group.
        H: number of heads.
    """
    return tl.minimum(start + i, H - 1)


@triton.jit
def load_group(X, place, start, H: constexpr, G: constexpr, D: constexpr, BD: constexpr):
    """Load rows of each head of a group. Loaded before a loop, they stay in shared memory during it.

    Args:
        X: a pointer, and the strides of texts, heads and rows.
        place: a text, the number of its rows, and which of them.
        start: first head of the group.
        H: number of heads.
        G: heads of the group.
        D: numbers of a head.
        BD: columns of a tile, at least D.

    Returns:
        A tuple of G tiles.
    """
    made = ()
    for i in tl.static_range(G):
        made = made + (load_rows(X, place, choose_head(start, i, H), D, BD),)
    return made


@triton.jit
def dot(a, b, sums, PRECISION: constexpr):
    """Multiply a by b, and add the product to sums, in fp32.

    Args:
        a: (rows, inner).
        b: (inner, columns).
        sums: (rows, columns); None for none.
        PRECISION: of products of fp32; "widened" is bf16 for the interpreter, which knows no such products.
    """
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def multiply_rows(a, b, PRECISION: constexpr):
    """Multiply a by b^T in fp32.

    Args:
        a: (rows, inner).
        b: (columns, inner).
        PRECISION: see `dot`.
    """
    return dot(a, tl.trans(b), None, PRECISION)


@triton.jit
def make_group(G: constexpr, rows: constexpr, columns: constexpr):
    """Make G tiles of zeros.

    Args:
        G: number of tiles.
        rows: of a tile.
        columns: of a tile.
    """
    made = ()
    for _ in tl.static_range(G):
        made = made + (tl.zeros((rows, columns), dtype=tl.float32),)
    return made


@triton.jit
def find_place(G: constexpr, KEYS: constexpr):
    """Find the tile, the first head of the group and the text of this program.

    Programs begin first that go through most of a causal text.
    """
    tile = tl.program_id(0)
    if not KEYS:
        tile = tl.num_programs(0) - 1 - tile
    return tile, tl.program_id(1) * G, tl.program_id(2).to(tl.int64)


@triton.jit
def find_text(VISIBLE, TOKENS, row, N, M, PACKED: constexpr):
    """Find the intervals and the padding of one text.

    Args:
        VISIBLE: pointers to the intervals, see the module.
        TOKENS: pointer to the padding (rows, M).
        row: of the text; intervals have rows only if PACKED.
        N: queries of a text.
        M: keys of a text.
        PACKED: whether texts hold documents.

    Returns:
        VISIBLE and TOKENS of the text.
    """
    first, looked = VISIBLE[0], VISIBLE[4]
    if PACKED:
        first += row * N
        looked += row * M
    return (first, VISIBLE[1], VISIBLE[2], VISIBLE[3], looked), TOKENS + row * M


@triton.jit
def order(block, other, KEYS: constexpr):
    """Order positions into those of queries and of keys; those of a program's block are the rows.

    Args:
        block: positions that the program owns.
        other: positions that it goes through.
        KEYS: whether the program owns keys.
    """
    if KEYS:
        return other[None, :], block[:, None]
    else:
        return block[:, None], other[None, :]


@triton.jit
def find_span(VISIBLE, block, N, M, KEYS: constexpr):
    """Find the interval of the other side in which all lies that a program's block sees, or is seen by.

    Args:
        VISIBLE: pointers to the intervals of the text, see the module.
        block: positions that the program owns.
        N: queries of a text.
        M: keys of a text.
        KEYS: whether the program owns keys.

    Returns:
        Its first position, and the one after its last.
    """
    if KEYS:
        first, end, length, other = VISIBLE[3], VISIBLE[4], M, N
    else:
        first, end, length, other = VISIBLE[0], VISIBLE[1], N, M
    low = tl.min(tl.load(first + block, mask=block < length, other=other))
    high = tl.max(tl.load(end + block, mask=block < length, other=0))
    return low, high


@triton.jit
def see(VISIBLE, TOKENS, n, k, N, M, PADDED: constexpr):
    """Mark where query n sees key k (`VisibleKeys`); rows and columns beyond the end see nothing and are not seen.

    Args:
        VISIBLE: pointers to the intervals of the text, see the module.
        TOKENS: pointer to the padding of the text.
        n: positions of queries.
        k: positions of keys.
        N: queries of a text.
        M: keys of a text.
        PADDED: whether some key is padding.
    """
    first = tl.load(VISIBLE[0] + n, mask=n < N, other=0)
    end = tl.load(VISIBLE[1] + n, mask=n < N, other=0)
    seen = (k >= first) & (k < end)
    if PADDED:
        own_key = tl.load(VISIBLE[2] + n, mask=n < N, other=-1)
        token = tl.load(TOKENS + k, mask=k < M, other=0) != 0
        seen = seen & (token | (k == own_key))
    return seen


@triton.jit
def exponent(product, unit, SIGMOID: constexpr):
    """Compute log2 of a weight that is not yet normalised: of exp(a), or of exp(a) sigmoid(a).

    Args:
        product: q k.
        unit: s log2(e).
        SIGMOID: whether the weight has the factor sigmoid(a).
    """
    a = product * unit
    if SIGMOID:
        a = a + tl.minimum(a, 0.0) - tl.log2(1.0 + tl.exp2(-tl.abs(a)))
    return a


@triton.jit
def slope(product, unit, SIGMOID: constexpr):
    """Compute d exponent / d a, both in the same base: 1, or 2 - sigmoid(a).

    Args:
        product: q k.
        unit: s log2(e).
        SIGMOID: whether the weight has the factor sigmoid(a).
    """
    if SIGMOID:
        a = product * unit
        small = tl.exp2(-tl.abs(a))
        return 2.0 - tl.where(a >= 0.0, 1.0, small) / (1.0 + small)
    else:
        return 1.0


@triton.jit
def load_numbers(X, head, n, N):
    """Load a number of each query, of one head.

    Args:
        X: pointer to the numbers (heads, N).
        head: its row.
        n: positions of queries.
        N: queries of a text.
    """
    return tl.load(X + head * N + n, mask=n < N, other=0.0)


@triton.jit
def weigh(product, TOTAL, head, n, N, unit, SIGMOID: constexpr):
    """Compute the weights P of a head; keys that are not seen have any weight yet.

    Args:
        product: q k.
        TOTAL: pointer to log2 of the sums of weights (heads, N).
        head: its row in TOTAL.
        n: positions of queries.
        N: queries of a text.
        unit: s log2(e).
        SIGMOID: whether a weight has the factor sigmoid(a).
    """
    return tl.exp2(exponent(product, unit, SIGMOID) - load_numbers(TOTAL, head, n, N))


@triton.jit
def load_entry(MIXING, positions, place, H: constexpr, MIX: constexpr):
    """Load an entry of M or L: a number, or one of each query, each key or each pair of them.

    Args:
        MIXING: pointers, see the module.
        positions: a text, its queries n and keys k of a tile, and how many there are, N and M.
        place: of the entry in a matrix of H rows.
        H: number of heads.
        MIX: see the module.
    """
    text, n, k, N, M = positions
    if MIX % 2 == 1:
        entry = tl.load(MIXING[0] + place)
    else:
        entry = load_numbers(MIXING[0], text * (H * H) + place, n, N)
    if MIX > 2:
        entry += load_numbers(MIXING[1], text * (H * H) + place, k, M)
    return entry


@triton.jit
def spread(
    tiles, x, MIXING, positions, other, start,
    OTHER: constexpr, OWN: constexpr, H: constexpr, G: constexpr, MIX: constexpr,
):  # fmt: skip
    """Add m x to tiles[i], where m is the entry of M between head `other` and head i of the group.

    Args:
        tiles: a tuple of G tiles.
        x: a tile of head `other`.
        MIXING: pointers to M, or to L, see the module.
        positions: see `load_entry`.
        other: the head that is spread.
        start: first head of the group.
        OTHER: step of M from one `other` to the next.
        OWN: step of M from one head of the group to the next.
        H: number of heads.
        G: heads of the group.
        MIX: see the module.

    Returns:
        A tuple of G tiles.
    """
    made = ()
    for i in tl.static_range(G):
        if MIX == 0:
            made = made + (tiles[i] + x,)
        else:
            place = other * OTHER + choose_head(start, i, H) * OWN
            made = made + (tiles[i] + load_entry(MIXING, positions, place, H, MIX) * x,)
    return made


@triton.jit
def drop(x, dropout, text, start, i: constexpr, n, k, H: constexpr, G: constexpr):
    """Drop numbers x of mixed weights: x / (1 - p) where the weight is kept, 0 where it is dropped.

    Philox at (key, query, text and four heads) draws for four heads at once, so no counter has more than 32 bits. Where
    groups are whole fours, the compiler sees that they share the draw.

    Args:
        x: a number for each query and key.
        dropout: SEED, a pointer to the seed and the number of the first text; the least draw that is kept, as a signed
            number; 1 / (1 - p).
        text: its number.
        start: first head of the group.
        i: number of the head in the group.
        n: positions of queries.
        k: positions of keys.
        H: number of heads.
        G: heads of the group.
    """
    SEED, least, kept = dropout
    quads: tl.constexpr = (H + 3) // 4
    if H % G == 0 and G % 4 == 0:
        quad = start // 4 + i // 4
        which = i % 4
    else:
        head = choose_head(start, i, H)
        quad = head // 4
        which = head % 4
    place = (text + tl.load(SEED + 1)) * quads + quad
    a, b, c, d = tl.philox(tl.load(SEED), k, n, place.to(tl.int32), 0, 7)
    drawn = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
    return tl.where(drawn.to(tl.int32, bitcast=True) >= least, x * kept, 0.0)


@triton.jit
def add_weights(
    mixed, mine, COLUMNS, across, MIXING, TOTAL, j, start, positions, unit,
    H: constexpr, D: constexpr, BD: constexpr, G: constexpr, MIX: constexpr, SIGMOID: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Add M_ji P_j to mixed[i], for rows `mine` of head j and its rows of COLUMNS in the place `across`.

    start and positions are those of `spread`, the others those of the module.
    """
    text, n, _, N, _ = positions
    product = multiply_rows(mine, load_rows(COLUMNS, across, j, D, BD), PRECISION)
    weight = weigh(product, TOTAL, text * H + j, n, N, unit, SIGMOID)
    return spread(mixed, weight, MIXING, positions, j, start, H, 1, H, G, MIX)


@triton.jit
def add_cotangents(
    wanted, mine, COLUMNS, across, MIXING, dropout, i, start, positions,
    H: constexpr, D: constexpr, BD: constexpr, G: constexpr, MIX: constexpr, DROP: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Add M_ji G_i to wanted[j], for rows `mine` of head i and its rows of COLUMNS in the place `across`.

    start and positions are those of `spread`, dropout is that of `drop`, the others those of the module.
    """
    text, n, k, _, _ = positions
    x = multiply_rows(mine, load_rows(COLUMNS, across, i, D, BD), PRECISION)
    if DROP:
        x = drop(x, dropout, text, i, 0, n, k, H, 1)
    return spread(wanted, x, MIXING, positions, i, start, 1, H, H, G, MIX)


@triton.jit
def mix_scores(
    ROWS, here, COLUMNS, across, SCORING, start, positions, H: constexpr, D: constexpr, BD: constexpr,
    G: constexpr, SCORE: constexpr, PRECISION: constexpr, BM: constexpr, BN: constexpr,
):  # fmt: skip
    """Compute A_i / s = sum_j L_ji q_j k_j of each head of a group, from rows in the places `here` and `across`.

    start and positions are those of `spread`, the others those of the module.
    """
    mixed = make_group(G, BM, BN)
    for j in range(H):
        product = multiply_rows(load_rows(ROWS, here, j, D, BD), load_rows(COLUMNS, across, j, D, BD), PRECISION)
        mixed = spread(mixed, product, SCORING, positions, j, start, H, 1, H, G, SCORE)
    return mixed


@triton.jit
def mix_cotangents(
    LEFT, here, RIGHT, across, MIXING, dropout, start, positions, H: constexpr, D: constexpr, BD: constexpr,
    G: constexpr, MIX: constexpr, DROP: constexpr, PRECISION: constexpr, BM: constexpr, BN: constexpr,
):  # fmt: skip
    """Compute dP_j = sum_i M_ji G_i of each head of a group; arguments are those of `mix_scores` and `add_cotangents`."""
    wanted = make_group(G, BM, BN)
    for i in range(H):
        wanted = add_cotangents(
            wanted, load_rows(LEFT, here, i, D, BD), RIGHT, across, MIXING, dropout, i, start, positions,
            H, D, BD, G, MIX, DROP, PRECISION,
        )  # fmt: skip
    return wanted


@triton.jit
def differentiate(product, wanted, seen, TOTAL, DELTA, head, n, N, unit, SIGMOID: constexpr):
    """Compute dA of a head, from dP = `wanted`; the others are arguments of `weigh`, and DELTA as TOTAL."""
    weight = weigh(product, TOTAL, head, n, N, unit, SIGMOID)
    delta = load_numbers(DELTA, head, n, N)
    return tl.where(seen, weight * (wanted - delta) * slope(product, unit, SIGMOID), 0.0)


@triton.jit
def differentiate_group(
    mixed, wanted, seen, TOTAL, DELTA, start, positions, unit, H: constexpr, G: constexpr, SIGMOID: constexpr,
):  # fmt: skip
    """Compute dA of each head of a group, from the tuples of `mix_scores` and `mix_cotangents`."""
    text, n, _, N, _ = positions
    made = ()
    for i in tl.static_range(G):
        head = text * H + choose_head(start, i, H)
        made = made + (differentiate(mixed[i], wanted[i], seen, TOTAL, DELTA, head, n, N, unit, SIGMOID),)
    return made


# -- kernels, whose arguments the module describes ---------------------------------------------------------------------


@triton.jit(do_not_specialize=["N", "M", "EACH"])
def totals(
    Q, K, SCORING, TOTAL, VISIBLE, TOKENS, N, M, EACH, unit,
    H: constexpr, D: constexpr, BD: constexpr, SCORE: constexpr, SIGMOID: constexpr, PADDED: constexpr,
    PACKED: constexpr, PRECISION: constexpr, BM: constexpr, BN: constexpr, G: constexpr = 1,
):  # fmt: skip
    """Compute TOTAL (B, H, N), log2 of the sum of each query's weights, for a group of heads: one where SCORE is 0.

    Grid: tiles of queries, groups, texts.
    """
    tile, start, text = find_place(G, False)
    block = tile * BM + tl.arange(0, BM)
    here = (text, N, block)
    VISIBLE, TOKENS = find_text(VISIBLE, TOKENS, text // EACH, N, M, PACKED)
    low, high = find_span(VISIBLE, block, N, M, False)
    if SCORE == 0:
        query = load_rows(Q, here, start, D, BD)
    tops = ()
    sums = ()
    for _ in tl.static_range(G):
        tops = tops + (tl.full((BM,), float("-inf"), dtype=tl.float32),)
        sums = sums + (tl.zeros((BM,), dtype=tl.float32),)
    for at in range(low // BN * BN, high, BN):
        other = at + tl.arange(0, BN)
        across = (text, M, other)
        n, k = order(block, other, False)
        seen = see(VISIBLE, TOKENS, n, k, N, M, PADDED)
        if SCORE == 0:
            products = (multiply_rows(query, load_rows(K, across, start, D, BD), PRECISION),)
        else:
            products = mix_scores(
                Q, here, K, across, SCORING, start, (text, n, k, N, M), H, D, BD, G, SCORE, PRECISION, BM, BN
            )
        new_tops = ()
        new_sums = ()
        for i in tl.static_range(G):
            x = tl.where(seen, exponent(products[i], unit, SIGMOID), float("-inf"))
            now = tl.maximum(tops[i], tl.max(x, 1))
            base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen so far
            new_tops = new_tops + (now,)
            new_sums = new_sums + (sums[i] * tl.exp2(tops[i] - base) + tl.sum(tl.exp2(x - base[:, None]), 1),)
        tops = new_tops
        sums = new_sums
    for i in tl.static_range(G):
        total = tl.where(sums[i] == 0.0, 1.0, sums[i])  # rows beyond the end
        head = text * H + choose_head(start, i, H)
        tl.store(TOTAL + head * N + block, tops[i] + tl.log2(total), mask=block < N)


@triton.jit(do_not_specialize=["N", "M", "EACH", "least"])
def sum_rows(
    Q, K, X, MIXING, SCORING, TOTAL, OUT, VISIBLE, TOKENS, SEED, N, M, EACH, unit, least, kept,
    H: constexpr, D: constexpr, BD: constexpr, MIX: constexpr, SCORE: constexpr, SIGMOID: constexpr,
    PADDED: constexpr, PACKED: constexpr, DROP: constexpr, PRECISION: constexpr,
    KEYS: constexpr, HELD: constexpr, G: constexpr, BM: constexpr, BN: constexpr,
):  # fmt: skip
    """Compute OUT_i = W_i X_i for a group of heads i, W_i = drop(sum_j M_ji P_j); with KEYS W_i^T X_i.

    Grid: tiles, groups, texts.
    """
    tile, start, text = find_place(G, KEYS)
    if KEYS:
        ROWS, COLUMNS, rows, columns = K, Q, M, N
    else:
        ROWS, COLUMNS, rows, columns = Q, K, N, M
    block = tile * BM + tl.arange(0, BM)
    here = (text, rows, block)
    VISIBLE, TOKENS = find_text(VISIBLE, TOKENS, text // EACH, N, M, PACKED)
    low, high = find_span(VISIBLE, block, N, M, KEYS)
    if HELD:
        held = load_group(ROWS, here, 0, H, H, D, BD)
    sums = make_group(G, BM, BD)
    for at in range(low // BN * BN, high, BN):
        other = at + tl.arange(0, BN)
        across = (text, columns, other)
        n, k = order(block, other, KEYS)
        positions = (text, n, k, N, M)
        seen = see(VISIBLE, TOKENS, n, k, N, M, PADDED)
        mixed = make_group(G, BM, BN)
        if SCORE > 0:
            scores = mix_scores(
                ROWS, here, COLUMNS, across, SCORING, 0, positions, H, D, BD, H, SCORE, PRECISION, BM, BN
            )
            for j in tl.static_range(H):
                weight = weigh(scores[j], TOTAL, text * H + j, n, N, unit, SIGMOID)
                mixed = spread(mixed, weight, MIXING, positions, j, start, H, 1, H, G, MIX)
        elif HELD:
            for j in tl.static_range(H):
                mixed = add_weights(
                    mixed, held[j], COLUMNS, across, MIXING, TOTAL, j, start, positions, unit,
                    H, D, BD, G, MIX, SIGMOID, PRECISION,
                )  # fmt: skip
        else:
            for j in range(H):
                mine = load_rows(ROWS, here, j, D, BD)
                mixed = add_weights(
                    mixed, mine, COLUMNS, across, MIXING, TOTAL, j, start, positions, unit,
                    H, D, BD, G, MIX, SIGMOID, PRECISION,
                )  # fmt: skip
        made = ()
        for i in tl.static_range(G):
            x = tl.where(seen, mixed[i], 0.0)
            if DROP:
                x = drop(x, (SEED, least, kept), text, start, i, n, k, H, G)
            factor = load_rows(X, across, choose_head(start, i, H), D, BD)
            made = made + (dot(x.to(factor.dtype), factor, sums[i], PRECISION),)
        sums = made
    for i in tl.static_range(G):
        store_rows(OUT, here, choose_head(start, i, H), sums[i], D, BD)


@triton.jit(do_not_specialize=["N", "M", "EACH", "least"])
def mixing_gradient(
    Q, K, V, MIXING, SCORING, D_OUT, TOTAL, DELTA, D_MIXING, VISIBLE, TOKENS, SEED, N, M, EACH, unit, least, kept,
    H: constexpr, D: constexpr, BD: constexpr, MIX: constexpr, SCORE: constexpr, SIGMOID: constexpr,
    PADDED: constexpr, PACKED: constexpr, DROP: constexpr, PRECISION: constexpr,
    KEYS: constexpr, TERM: constexpr, GJ: constexpr, G: constexpr, BM: constexpr, BN: constexpr,
):  # fmt: skip
    """Compute D_MIXING (B, H, H, N), sums of rows of TERM, for GJ sources j and G heads i; with KEYS (B, H, H, M).

    Grid: tiles, pairs of groups, texts.
    """
    groups: tl.constexpr = (H + G - 1) // G
    tile, pair, text = find_place(1, KEYS)
    source, start = pair // groups * GJ, pair % groups * G
    if KEYS:
        ROWS, COLUMNS, LEFT, RIGHT, rows, columns = K, Q, V, D_OUT, M, N
    else:
        ROWS, COLUMNS, LEFT, RIGHT, rows, columns = Q, K, D_OUT, V, N, M
    block = tile * BM + tl.arange(0, BM)
    here = (text, rows, block)
    dropout = (SEED, least, kept)
    VISIBLE, TOKENS = find_text(VISIBLE, TOKENS, text // EACH, N, M, PACKED)
    low, high = find_span(VISIBLE, block, N, M, KEYS)
    if SCORE == 0 or TERM == "scores":
        sources = load_group(ROWS, here, source, H, GJ, D, BD)
    if TERM != "scores":
        cotangents = load_group(LEFT, here, start, H, G, D, BD)
    sums = make_group(GJ * G, BM, 8)
    for at in range(low // BN * BN, high, BN):
        other = at + tl.arange(0, BN)
        across = (text, columns, other)
        n, k = order(block, other, KEYS)
        positions = (text, n, k, N, M)
        seen = see(VISIBLE, TOKENS, n, k, N, M, PADDED)
        if TERM == "scores":
            mixed = mix_scores(
                ROWS, here, COLUMNS, across, SCORING, start, positions, H, D, BD, G, SCORE, PRECISION, BM, BN
            )
            wanted = mix_cotangents(
                LEFT, here, RIGHT, across, MIXING, dropout, start, positions,
                H, D, BD, G, MIX, DROP, PRECISION, BM, BN,
            )  # fmt: skip
            of_scores = differentiate_group(mixed, wanted, seen, TOTAL, DELTA, start, positions, unit, H, G, SIGMOID)
        elif SCORE > 0:
            mixed = mix_scores(
                ROWS, here, COLUMNS, across, SCORING, source, positions, H, D, BD, GJ, SCORE, PRECISION, BM, BN
            )
        maps = ()
        for j in tl.static_range(GJ):
            head = choose_head(source, j, H)
            if SCORE == 0 or TERM == "scores":
                x = multiply_rows(sources[j], load_rows(COLUMNS, across, head, D, BD), PRECISION)
            else:
                x = mixed[j]
            if TERM != "scores":
                x = tl.where(seen, weigh(x, TOTAL, text * H + head, n, N, unit, SIGMOID), 0.0)
            maps = maps + (x,)
        made = ()
        for i in tl.static_range(G):
            if TERM == "scores":
                x = of_scores[i]
            else:
                x = multiply_rows(cotangents[i], load_rows(RIGHT, across, choose_head(start, i, H), D, BD), PRECISION)
                if DROP:
                    x = drop(x, dropout, text, start, i, n, k, H, G)
            for j in tl.static_range(GJ):
                term = maps[j] * x
                if TERM == "delta":
                    place = choose_head(source, j, H) * H + choose_head(start, i, H)
                    term *= load_entry(MIXING, positions, place, H, MIX)
                made = made + (sums[i * GJ + j] + tl.sum(tl.reshape(term, (BM, BN // 8, 8)), 1),)
        sums = made
    for i in tl.static_range(G):
        for j in tl.static_range(GJ):
            place = text * (H * H) + choose_head(source, j, H) * H + choose_head(start, i, H)
            tl.store(D_MIXING + place * rows + block, tl.sum(sums[i * GJ + j], 1), mask=block < rows)


@triton.jit(do_not_specialize=["N", "M", "EACH", "least"])
def score_gradient(
    Q, K, V, MIXING, SCORING, D_OUT, TOTAL, DELTA, OUT, VISIBLE, TOKENS, SEED, N, M, EACH, scale, unit, least, kept,
    H: constexpr, D: constexpr, BD: constexpr, MIX: constexpr, SCORE: constexpr, SIGMOID: constexpr,
    PADDED: constexpr, PACKED: constexpr, DROP: constexpr, PRECISION: constexpr,
    KEYS: constexpr, HELD: constexpr, G: constexpr, BM: constexpr, BN: constexpr,
):  # fmt: skip
    """Compute OUT_j = s dS_j K_j for a group of heads j; with KEYS s dS_j^T Q_j. Where SCORE is 0, dS is dA.

    Grid: tiles, groups, texts.
    """
    tile, start, text = find_place(G, KEYS)
    if KEYS:
        ROWS, COLUMNS, LEFT, RIGHT, rows, columns = K, Q, V, D_OUT, M, N
    else:
        ROWS, COLUMNS, LEFT, RIGHT, rows, columns = Q, K, D_OUT, V, N, M
    block = tile * BM + tl.arange(0, BM)
    here = (text, rows, block)
    dropout = (SEED, least, kept)
    VISIBLE, TOKENS = find_text(VISIBLE, TOKENS, text // EACH, N, M, PACKED)
    low, high = find_span(VISIBLE, block, N, M, KEYS)
    if SCORE == 0:
        mine = load_group(ROWS, here, start, H, G, D, BD)
    if HELD:
        held = load_group(LEFT, here, 0, H, H, D, BD)
    sums = make_group(G, BM, BD)
    for at in range(low // BN * BN, high, BN):
        other = at + tl.arange(0, BN)
        across = (text, columns, other)
        n, k = order(block, other, KEYS)
        positions = (text, n, k, N, M)
        seen = see(VISIBLE, TOKENS, n, k, N, M, PADDED)
        if SCORE > 0:
            mixed = mix_scores(
                ROWS, here, COLUMNS, across, SCORING, 0, positions, H, D, BD, H, SCORE, PRECISION, BM, BN
            )
            wanted = mix_cotangents(
                LEFT, here, RIGHT, across, MIXING, dropout, 0, positions, H, D, BD, H, MIX, DROP, PRECISION, BM, BN
            )
            of_scores = differentiate_group(mixed, wanted, seen, TOTAL, DELTA, 0, positions, unit, H, H, SIGMOID)
            unmixed = make_group(G, BM, BN)
            for i in tl.static_range(H):
                unmixed = spread(unmixed, of_scores[i], SCORING, positions, i, start, 1, H, H, G, SCORE)
        elif HELD:
            wanted = make_group(G, BM, BN)
            for i in tl.static_range(H):
                wanted = add_cotangents(
                    wanted, held[i], RIGHT, across, MIXING, dropout, i, start, positions,
                    H, D, BD, G, MIX, DROP, PRECISION,
                )  # fmt: skip
        else:
            wanted = mix_cotangents(
                LEFT, here, RIGHT, across, MIXING, dropout, start, positions,
                H, D, BD, G, MIX, DROP, PRECISION, BM, BN,
            )  # fmt: skip
        made = ()
        for j in tl.static_range(G):
            head = choose_head(start, j, H)
            factor = load_rows(COLUMNS, across, head, D, BD)
            if SCORE > 0:
                x = unmixed[j]
            else:
                product = multiply_rows(mine[j], factor, PRECISION)
                x = differentiate(product, wanted[j], seen, TOTAL, DELTA, text * H + head, n, N, unit, SIGMOID)
            made = made + (dot(x.to(factor.dtype), factor, sums[j], PRECISION),)
        sums = made
    for j in tl.static_range(G):
        store_rows(OUT, here, choose_head(start, j, H), sums[j] * scale, D, BD)
