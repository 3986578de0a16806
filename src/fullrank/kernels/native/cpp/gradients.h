// One block of query rows, backward: G_i = dO_i V_i^T, D_ji = sum over keys of P_j G_i, delta_j = sum_i M_ji D_ji,
// dP_j = sum_i M_ji G_i, dA_j = P_j (dP_j - delta_j), times 2 - sigmoid(A_j) for sigsoftmax. Of mixed scores A_i = sum_j L_ji S_j:
// dL_ji = sum over queries and keys of S_j dA_i, dS_j = sum_i L_ji dA_i.
#pragma once
#include "block.h"

namespace {

template <class T, int C> struct Gradients {
    using V = typename Of<T>::V;
    static constexpr int64_t W = C * VL<T>;

    Block<T, C> block;
    const Call& call;
    const int64_t H, N, M, D, head;  // head: numbers of a head in a block
    // G [head][key][row]; dO [head][d][row]; M [i][j][row]; D [j][i][row]; delta [j][row]
    Buffer<T> cotangents, out_block, turned_mixing, pair, delta;
    Buffer<T> scaled_scoring, score_pair;  // L, times the scale; dL [j][i][row]

    Gradients(const Call& c, int64_t most_keys)
        : block(c, most_keys, c.sigsoftmax), call(c), H(c.H), N(c.N), M(c.M), D(c.D), head(most_keys * W),
          cotangents(H * head), out_block(H * D * W), turned_mixing(c.mixing_kind == 2 ? H * H * W : 0),
          pair(c.mixing_kind ? H * H * W : 0), delta(H * W), scaled_scoring(c.scoring ? H * H : 0),
          score_pair(c.scoring ? H * H * W : 0) {
        for (int64_t ji = 0; c.scoring && ji < H * H; ++ji) scaled_scoring[ji] = ((const T*)c.scoring)[ji] * (T)c.scale;
    }

    // d_keys, d_values (H, M, D) of this text, d_table (H, T, D), d_mixing and d_scoring (H, H) are added to
    void add(const Rows& r, T* d_keys, T* d_values, T* d_table, double* d_mixing, double* d_scoring) {
        block.begin(r);
        for (int64_t h = 0; h < H; ++h) block.turn(call.d_out, call.out_steps, r, h, (T)1, out_block + h * D * W);
        if (call.mixing_kind) std::memset(pair.get(), 0, H * H * W * sizeof(T));
        if (call.scoring) std::memset(score_pair.get(), 0, H * H * W * sizeof(T));
        std::memset(delta.get(), 0, H * W * sizeof(T));
        for (int64_t k = 0; k < block.size; k += TILE) {
            const int64_t keys = std::min<int64_t>(TILE, block.size - k);
            for (int64_t h = 0; h < H; ++h) {
                block.fetch_rows(call.values, r, h, k, keys);
                if (!call.T) block.score(r, h, k, keys);
                block.fetch_rows(call.keys, r, h + 1, k, keys);
                if (!call.scoring) block.weigh_again(r, h, k, keys);
                scores<T, C>(block.at(call.values, r.text, h, block.from + k), D, (int)keys, out_block + h * D * W, (int)D,
                             cotangents + h * head + k * W);
            }
            if (call.scoring) {
                block.mix_scores(r, k, keys);
                for (int64_t h = 0; h < H; ++h) block.weigh_again(r, h, k, keys);
            }
            of_values(r, k, d_values);
        }
        if (call.mixing_kind) of_mixing(r, d_mixing);
        // so that the gradients of a row's scores add up to zero, although the logarithm of their sum was rounded
        for (int64_t x = 0; x < H * W; ++x) delta[x] /= block.sum[x];
        std::memset(block.out_block.get(), 0, H * W * D * sizeof(T));
        for (int64_t k = 0; k < block.size; k += TILE) of_scores(r, k, d_keys);
        if (call.scoring)
            for (int64_t ji = 0; ji < H * H; ++ji)
                for (int64_t n = 0; n < r.count; ++n) d_scoring[ji] += score_pair[ji * W + n];
        block.put(r, block.out_block, call.d_query, call.d_query_steps);
        if (call.T) of_distances(r, d_table);
    }

    // of the values at some keys, and what they add to D, or to delta where heads are not mixed
    void of_values(const Rows& r, int64_t k, T* d_values) {
        const int keys = (int)std::min<int64_t>(TILE, block.size - k);
        T* g = cotangents + k * W;
        int64_t stride;
        const T* p = block.mixed(k, keys, nullptr, stride);
        if (call.dropped) block.drop(k, keys, g, head);
        for (int64_t h = 0; h < H; ++h) {
            if (h + 1 < H) fetch(d_values + ((h + 1) * M + block.from + k) * D, 6 * D);
            product<T>(p + h * stride, 1, W, Call::row((const T*)call.d_out, call.out_steps, r.text, h, r.row), call.out_steps[2], (int)r.count,
                       d_values + (h * M + block.from + k) * D, D, keys, (int)D);
        }
        const T* weights = block.weights + k * W;
        if (call.mixing_kind) return pairs<T>(weights, head, g, head, keys, W, (int)H, pair);
        for (int64_t h = 0; h < H; ++h)
            for (int64_t x = 0; x < keys * W; x += W)
                for (int64_t n = 0; n < W; ++n) delta[h * W + n] += weights[h * head + x + n] * g[h * head + x + n];
    }

    // D is the gradient of M; delta from it
    void of_mixing(const Rows& r, double* d_mixing) {
        for (int64_t j = 0; j < H; ++j)
            for (int64_t i = 0; i < H; ++i) {
                const T* d = pair + (j * H + i) * W;
                if (call.mixing_kind == 1) {
                    const T m = ((const T*)call.mixing)[j * H + i];
                    double sum = 0;
                    for (int64_t n = 0; n < W; ++n) {
                        delta[j * W + n] += m * d[n];
                        sum += n < r.count ? d[n] : 0;
                    }
                    d_mixing[j * H + i] += sum;
                } else {
                    const T* m = block.coefficients + (j * H + i) * W;
                    for (int64_t n = 0; n < W; ++n) delta[j * W + n] += m[n] * d[n];
                    std::memcpy(turned_mixing + (i * H + j) * W, m, W * sizeof(T));
                }
            }
        if (call.mixing_kind == 2)
            for (int64_t n = 0; n < r.count; ++n) {
                T* found = (T*)call.d_mixing + (r.text * N + r.row + n) * H * H;
                for (int64_t ji = 0; ji < H * H; ++ji) found[ji] = pair[ji * W + n];
            }
    }

    // of the scores at some keys, in their place, and what they add to those of keys and queries
    void of_scores(const Rows& r, int64_t k, T* d_keys) {
        const int keys = (int)std::min<int64_t>(TILE, block.size - k);
        const T *g = cotangents + k * W, *dp = g;
        int64_t stride = head;
        if (call.mixing_kind) {
            dp = block.tile;
            stride = (TILE + 1) * W;
            if (call.mixing_kind == 1)
                mix<T, false>(g, head, (const T*)call.mixing, 1, H, nullptr, W, (int)H, keys, block.tile, stride);
            else
                mix<T, true>(g, head, turned_mixing, H * W, W, nullptr, W, (int)H, keys, block.tile, stride);
        }
        const V scale = all<T>(call.scoring ? (T)1 : (T)call.scale);
        for (int64_t h = 0; h < H; ++h) {
            T* s = block.weights + h * head + k * W;
            const T* slope = block.slopes ? block.slopes + h * head + k * W : nullptr;
            for (int64_t x = 0; x < keys * W; x += W)
                for (int64_t w = 0; w < W; w += VL<T>) {
                    V y = load(s + x + w) * (load(dp + h * stride + x + w) - load(delta + h * W + w)) * scale;
                    store(s + x + w, slope ? y * load(slope + x + w) : y);
                }
        }
        if (call.scoring) {
            T *mixed = block.weights + k * W, *unmixed = block.unmixed + k * W;
            pairs<T>(unmixed, head, mixed, head, keys, W, (int)H, score_pair);
            mix<T, false>(mixed, head, scaled_scoring, 1, H, nullptr, W, (int)H, keys, unmixed, head);
        }
        for (int64_t h = 0; h < H; ++h) {
            const T* s = block.computed() + h * head + k * W;
            fetch(d_keys + (h * M + block.from + k) * D, 6 * D);
            block.fetch_rows(call.keys, r, h + 1, k, keys);
            product<T>(s, W, 1, block.at(call.keys, r.text, h, block.from + k), D, keys, block.out_block + h * W * D, D,
                       (int)W, (int)D);
            product<T>(s, 1, W, Call::row((const T*)call.query, call.query_steps, r.text, h, r.row), call.query_steps[2], (int)r.count,
                       d_keys + (h * M + block.from + k) * D, D, keys, (int)D);
        }
    }

    // of the keys of distances, and of the query that meets them: the scores' gradients shifted back
    void of_distances(const Rows& r, T* d_table) {
        int64_t low, high;
        block.strip(r, low, high);
        std::memset(block.out_block.get(), 0, H * W * D * sizeof(T));
        for (int64_t h = 0; h < H; ++h) {
            std::memset(block.raw.get(), 0, (high - low + 2 * W) * W * sizeof(T));
            const T* s = block.computed() + h * head;
            for (int64_t k = 0; k < block.size; ++k) {
                T* shifted = block.raw + block.shift(r, k, low, high) * W;
                for (int64_t n = 0; n < W; ++n) shifted[n * (W + 1)] += s[k * W + n];
            }
            const T* table = (const T*)call.table + (h * call.T + low) * D;
            for (int64_t t = 0; t < high - low; t += TILE) {
                const int rows = (int)std::min<int64_t>(TILE, high - low - t);
                const T* part = block.raw + (W + t) * W;
                product<T>(part, W, 1, table + t * D, D, rows, block.out_block + h * W * D, D, (int)W, (int)D);
                product<T>(part, 1, W, Call::row((const T*)call.position, call.position_steps, r.text, h, r.row), call.position_steps[2], (int)r.count,
                           d_table + (h * call.T + low + t) * D, D, rows, (int)D);
            }
        }
        block.put(r, block.out_block, call.d_position, call.d_position_steps);
    }
};
}  // namespace
