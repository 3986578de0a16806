// One block of query rows, backward: G_i = dO_i V_i^T, dP_j = sum_i M_ji G_i, delta_j = sum over keys of P_j dP_j,
// dA_j = P_j (dP_j - delta_j), times 2 - sigmoid(A_j) for sigsoftmax. Of mixed scores A_i = sum_j L_ji S_j: dS_j = sum_i L_ji
// dA_i. M and L may depend on query and key; their gradients are sums of P_j G_i and of S_j dA_i. Without mixing dP is G.
#pragma once
#include "block.h"
#include <numeric>

namespace {

// gradients that the blocks of a text add up: of keys and values (H, M, D), of what keys add to both mixings (M, H, H), and of
// queries (H, N, D) where scores are convolved
template <class T> struct TextSums {
    static constexpr int PARTS = 5;
    int64_t sizes[PARTS];
    T* parts[PARTS];

    // in room for `count` numbers, one part behind the other; null: in the result
    TextSums(const Call& c, int64_t text, T* room) {
        const int64_t heads = c.H * c.M * c.D, matrices = c.M * c.H * c.H;
        void* results[PARTS] = {c.d_keys, c.d_values, c.d_key_mixing, c.d_key_scoring, c.convolution ? c.d_query : nullptr};
        const int64_t rooms[PARTS] = {heads, heads, matrices, matrices, c.H * c.N * c.D};
        for (int part = 0; part < PARTS; ++part) {
            sizes[part] = results[part] ? rooms[part] : 0;
            parts[part] = room ? room : (T*)results[part] + text * sizes[part];
            if (room) room += sizes[part];
        }
    }

    int64_t count() const { return std::accumulate(sizes, sizes + PARTS, int64_t(0)); }

    void clear() const {
        for (int part = 0; part < PARTS; ++part)
            if (sizes[part]) std::memset(parts[part], 0, sizes[part] * sizeof(T));
    }

    T* keys() const { return parts[0]; }
    T* values() const { return parts[1]; }
    T* key_mixing() const { return parts[2]; }
    T* key_scoring() const { return parts[3]; }
    T* queries() const { return parts[4]; }
};

template <class T, int C> struct Gradients {
    using V = typename Of<T>::V;
    static constexpr int64_t W = C * VL<T>;

    Block<T, C> block;
    const Call& call;
    const int64_t H, N, M, D, head;  // head: numbers of a head in a block
    Buffer<T> cotangents, out_block, delta, scales;  // G [head][key][row]; dO [head][d][row]; delta [j][row]; the scale, [j][row]

    Gradients(const Call& c, int64_t most_keys)
        : block(c, most_keys, true), call(c), H(c.H), N(c.N), M(c.M), D(c.D), head(most_keys * W),
          cotangents(H * head), out_block(H * D * W), delta(H * W),
          scales(block.mixes_scores ? H * W : 0) {
        for (int64_t x = 0; scales && x < H * W; ++x) scales[x] = (T)c.scale;
    }

    // what is added to: sums of this text, d_table (H, T, D), d_mixing and d_scoring (H, H) where all rows share a matrix,
    // the gradient of the kernel of a convolution
    void add(const Rows& r, const TextSums<T>& sums, T* d_table, double* d_mixing, double* d_scoring, double* d_convolution) {
        block.begin(r);
        for (int64_t h = 0; h < H; ++h) block.turn(call.d_out, call.out_steps, r, h, (T)1, out_block + h * D * W);
        std::memset(delta.get(), 0, H * W * sizeof(T));
        for (int64_t k = 0; k < block.size; k += TILE) {
            const int64_t keys = std::min<int64_t>(TILE, block.size - k);
            for (int64_t h = 0; h < H; ++h) {
                block.fetch_rows(call.values, r, h, k, keys);
                if (!call.scored_at_once()) block.score(r, h, k, keys);
                block.fetch_rows(call.keys, r, h + 1, k, keys);
                if (!block.mixes_scores) block.weigh_again(r, h, k, keys);
                scores<T, C>(block.at(call.values, r.text, h, block.from + k), D, (int)keys, out_block + h * D * W, (int)D,
                             cotangents + h * head + k * W);
            }
            if (block.mixes_scores) {
                block.mix_scores(r, k, keys);
                for (int64_t h = 0; h < H; ++h) block.weigh_again(r, h, k, keys);
            }
            of_values(r, k, sums);
        }
        block.mixing.add_delta(delta);
        block.mixing.put_gradient(r, d_mixing, call.d_mixing);
        // so that the gradients of a row's scores add up to zero, although the logarithm of their sum was rounded; the weights
        // of rows beyond the text are 0
        for (int64_t x = 0; x < H * W; ++x) delta[x] /= block.sum[x] == 0 ? 1 : block.sum[x];
        std::memset(block.out_block.get(), 0, H * W * D * sizeof(T));
        for (int64_t k = 0; k < block.size; k += TILE) of_scores(r, k, sums);
        block.scoring.put_gradient(r, d_scoring, call.d_scoring);
        if (call.convolution) {
            for (int64_t h = 0; h < H; ++h)
                block.convolution.add_gradient(r, h, block.weights + h * head, sums.keys(), sums.queries(), d_convolution);
            return;
        }
        block.put(r, block.out_block, call.d_query, call.d_query_steps);
        if (call.T) of_distances(r, d_table);
    }

    // of the values at some keys, and what they add to the gradient of the mixing, or to delta where there is no M
    void of_values(const Rows& r, int64_t k, const TextSums<T>& sums) {
        const int keys = (int)std::min<int64_t>(TILE, block.size - k);
        T* g = cotangents + k * W;
        int64_t stride;
        const T* p = block.mixed(r, k, keys, nullptr, stride);
        if (call.dropped) block.drop(k, keys, g, head);
        for (int64_t h = 0; h < H; ++h) {
            if (h + 1 < H) fetch(sums.values() + ((h + 1) * M + block.from + k) * D, 6 * D);
            product<T>(p + h * stride, 1, W, Call::row((const T*)call.d_out, call.out_steps, r.text, h, r.row), call.out_steps[2], (int)r.count,
                       sums.values() + (h * M + block.from + k) * D, D, keys, (int)D);
        }
        const T* weights = block.weights + k * W;
        block.mixing.add_gradient(weights, g, head, r.text, block.from + k, keys, sums.key_mixing(), delta);
        for (int64_t h = 0; !block.mixing.kind && h < H; ++h)
            for (int64_t x = 0; x < keys * W; x += W)
                for (int64_t n = 0; n < W; ++n) delta[h * W + n] += weights[h * head + x + n] * g[h * head + x + n];
    }

    // of the scores at some keys, in their place, and what they add to those of keys and queries
    void of_scores(const Rows& r, int64_t k, const TextSums<T>& sums) {
        const int keys = (int)std::min<int64_t>(TILE, block.size - k);
        const T *g = cotangents + k * W, *dp = g;
        int64_t stride = head;
        if (block.mixing.changes()) {
            dp = block.tile;
            stride = (TILE + 1) * W;
            block.mixing.mix_back(g, head, block.place(r, k), keys, nullptr, block.tile, stride);
        }
        const V scale = all<T>(block.mixes_scores || call.convolution ? (T)1 : (T)call.scale);
        for (int64_t h = 0; h < H; ++h) {
            T* s = block.weights + h * head + k * W;
            const T* slope = block.slopes ? block.slopes + h * head + k * W : nullptr;
            for (int64_t x = 0; x < keys * W; x += W)
                for (int64_t w = 0; w < W; w += VL<T>) {
                    V y = load(s + x + w) * (load(dp + h * stride + x + w) - load(delta + h * W + w)) * scale;
                    store(s + x + w, slope ? y * load(slope + x + w) : y);
                }
        }
        if (block.mixes_scores) {
            T *mixed = block.weights + k * W, *unmixed = block.unmixed + k * W;
            block.scoring.add_gradient(unmixed, mixed, head, r.text, block.from + k, keys, sums.key_scoring(), nullptr);
            block.scoring.mix_back(mixed, head, block.place(r, k), keys, scales, unmixed, head);
        }
        for (int64_t h = 0; !call.convolution && h < H; ++h) {
            const T* s = block.computed() + h * head + k * W;
            fetch(sums.keys() + (h * M + block.from + k) * D, 6 * D);
            block.fetch_rows(call.keys, r, h + 1, k, keys);
            product<T>(s, W, 1, block.at(call.keys, r.text, h, block.from + k), D, keys, block.out_block + h * W * D, D,
                       (int)W, (int)D);
            product<T>(s, 1, W, Call::row((const T*)call.query, call.query_steps, r.text, h, r.row), call.query_steps[2], (int)r.count,
                       sums.keys() + (h * M + block.from + k) * D, D, keys, (int)D);
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
