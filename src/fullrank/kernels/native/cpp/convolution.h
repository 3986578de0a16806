// Scores of one head convolved over queries and keys: A(n, m) = sum_ab w(a, b) S(n - a, m + b), a from 0 to Q - 1, b from
// -beside to beside; S is 0 where query n - a does not see key m + b. The kernel has a = 0 in its last row.
#pragma once
#include "call.h"
#include "products.h"

namespace {

// out[k] = sum_at w[a][t] in[k + t][row - a], or back: sum_at w[a][t] in[k + T - 1 - t][row + a], for K keys at one vector
// of rows
template <class T, int K>
inline void convolve_tile(const T* in, int64_t stride, const T* w, int64_t queries, int64_t taps, bool back, T* out,
                          int64_t out_stride) {
    using V = typename Of<T>::V;
    V acc[K] = {};
    for (int64_t a = 0; a < queries; ++a)
        for (int64_t t = 0; t < taps; ++t) {
            const V y = all<T>(w[(queries - 1 - a) * taps + t]);
            const T* from = in + (back ? taps - 1 - t : t) * stride + (back ? a : -a);
#pragma GCC unroll 8
            for (int k = 0; k < K; ++k) acc[k] += y * load(from + k * stride);
        }
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) store(out + k * out_stride, acc[k]);
}

template <class T>
void convolve(const T* in, int64_t stride, const T* w, int64_t queries, int64_t taps, bool back, T* out, int64_t out_stride,
              int64_t rows, int64_t keys) {
    constexpr int K = 8;
    for (int64_t v = 0; v < rows; v += VL<T>) {
        int64_t k = 0;
        for (; k + K <= keys; k += K)
            convolve_tile<T, K>(in + k * stride + v, stride, w, queries, taps, back, out + k * out_stride + v, out_stride);
        for (; k < keys; ++k)
            convolve_tile<T, 1>(in + k * stride + v, stride, w, queries, taps, back, out + k * out_stride + v, out_stride);
    }
}

// sums[t] += sum over keys and rows of d_out[k][row] in[k + t][row], for J taps
template <class T, int J>
inline void taps_tile(const T* in, int64_t stride, const T* d_out, int64_t rows, int64_t keys, double* sums) {
    using V = typename Of<T>::V;
    V acc[J] = {};
    for (int64_t k = 0; k < keys; ++k)
        for (int64_t v = 0; v < rows; v += VL<T>) {
            const V y = load(d_out + k * rows + v);
#pragma GCC unroll 4
            for (int t = 0; t < J; ++t) acc[t] += y * load(in + (k + t) * stride + v);
        }
    for (int t = 0; t < J; ++t)
        for (int n = 0; n < VL<T>; ++n) sums[t] += acc[t][n];
}

template <class T, int C> struct Convolution {
    using V = typename Of<T>::V;
    using I = typename Of<T>::I;
    using Int = typename Of<T>::Int;
    static constexpr int64_t W = C * VL<T>;

    const Call& call;
    const int64_t N, M, D, queries, taps, beside;
    const int64_t before, wide;     // rows before those of a block, in whole vectors, and all rows
    int64_t from, size, low, high;  // keys of the block; keys low to high - 1 have scores
    Buffer<T> query, padded, scaled, d_query;
    Buffer<T> scores_of_head;       // [key][row] from key `from` - beside, row `row` - before
    Buffer<Int> first, end;         // of these rows; none sees a key where it is no token

    Convolution(const Call& c, int64_t room, bool backward)
        : call(c), N(c.N), M(c.M), D(c.D), queries(c.convolved_queries), taps(c.convolved_keys), beside(taps / 2),
          before((queries + VL<T> - 2) / VL<T> * VL<T>), wide(W + before), from(0), size(0), low(0), high(0),
          query(c.convolution ? D * wide : 0), padded(c.convolution && backward ? (room + 2 * taps) * (wide + before) : 0),
          scaled(c.convolution && backward ? queries * taps : 0), d_query(c.convolution && backward ? wide * D : 0),
          scores_of_head(c.convolution ? (room + taps) * wide : 0), first(c.convolution ? wide : 0),
          end(c.convolution ? wide : 0) {}

    const T* weights(int64_t h) const { return (const T*)call.convolution + h * queries * taps; }
    T* at(int64_t key) const { return scores_of_head + (key - from + beside) * wide; }

    void begin(const Rows& r) {
        from = r.keys_from;
        size = r.keys_to - r.keys_from;
        low = std::max<int64_t>(0, from - beside);
        high = std::min(M, from + size + beside);
        const uint8_t* tokens = call.tokens ? call.tokens + r.text * M : nullptr;
        for (int64_t x = 0; x < wide; ++x) {
            const int64_t row = r.row - before + x;
            const bool reads = row >= 0 && row < N && !(tokens && !tokens[M - N + row]);
            first[x] = reads ? call.first_of(r.text)[row] : 0;
            end[x] = reads ? call.end[row] : 0;
        }
    }

    // scores of a head, 0 where they are not seen
    void score(const Rows& r, int64_t h) {
        for (int64_t x = 0; x < wide; ++x) {
            const int64_t row = r.row - before + x;
            const bool is_row = row >= 0 && row < r.row + r.count;
            const T* q = is_row ? Call::row((const T*)call.query, call.query_steps, r.text, h, row) : nullptr;
            for (int64_t d = 0; d < D; ++d) query[d * wide + x] = q ? q[d] * (T)call.scale : 0;
        }
        std::memset(at(from - beside), 0, (low - from + beside) * wide * sizeof(T));
        std::memset(at(high), 0, (from + size + beside - high) * wide * sizeof(T));
        const T* keys = call.key<T>(r.text, h, low);
        scores<T, C>(keys, D, (int)(high - low), query + before, D, at(low) + before, wide);
        for (int64_t x = 0; x < before; x += VL<T>)
            scores<T, 1>(keys, D, (int)(high - low), query + x, D, at(low) + x, wide);
        hide(r);
    }

    void hide(const Rows& r) {
        const uint8_t* tokens = call.tokens ? call.tokens + r.text * M : nullptr;
        for (int64_t key = low; key < high; ++key) {
            const I here = (Int)key - (I){}, hidden = (Int)(tokens && !tokens[key] ? -1 : 0) - (I){};
            for (int64_t x = 0; x < wide; x += VL<T>) {
                const I seen = (load_indices<T>(first + x) <= here) & (here < load_indices<T>(end + x)) & ~hidden;
                store(at(key) + x, seen ? load(at(key) + x) : (V){});
            }
        }
    }

    // to out [key][row] of the block
    void run(const Rows& r, int64_t h, T* out) {
        score(r, h);
        convolve<T>(at(from - beside) + before, wide, weights(h), queries, taps, false, out, W, W, size);
    }

    // from d_out [key][row], not scaled, to the sums of keys (H, M, D), queries (H, N, D) and weights of this text
    void add_gradient(const Rows& r, int64_t h, const T* d_out, T* d_keys, T* d_queries, double* d_weights) {
        score(r, h);
        d_weights += h * queries * taps;
        for (int64_t k = 0; k < size; k += TILE)
            for (int64_t a = 0; a < queries; ++a) {
                const T* in = at(from - beside + k) + before - a;
                double* sums = d_weights + (queries - 1 - a) * taps;
                const int64_t keys = std::min<int64_t>(TILE, size - k);
                int64_t t = 0;
                for (; t + 4 <= taps; t += 4) taps_tile<T, 4>(in + t * wide, wide, d_out + k * W, W, keys, sums + t);
                for (; t < taps; ++t) taps_tile<T, 1>(in + t * wide, wide, d_out + k * W, W, keys, sums + t);
            }
        const int64_t stride = wide + before, halo = 2 * beside;
        std::memset(padded.get(), 0, (size + 2 * halo) * stride * sizeof(T));
        for (int64_t k = 0; k < size; ++k) std::memcpy(padded + (k + halo) * stride + before, d_out + k * W, W * sizeof(T));
        for (int64_t i = 0; i < queries * taps; ++i) scaled[i] = weights(h)[i] * (T)call.scale;
        convolve<T>(padded, stride, scaled, queries, taps, true, at(from - beside), wide, wide, size + halo);
        hide(r);
        const int64_t idle = std::max<int64_t>(0, before - r.row), begin = r.row - before + idle;
        const int64_t count = before - idle + r.count;
        const T* keys = call.key<T>(r.text, h, low);
        const T* rows = Call::row((const T*)call.query, call.query_steps, r.text, h, begin);
        std::memset(d_query.get(), 0, wide * D * sizeof(T));
        product<T>(at(low), wide, 1, keys, D, (int)(high - low), d_query, D, (int)wide, (int)D);
        T* to = d_queries + (h * N + begin) * D;
        for (int64_t x = 0; x < count * D; ++x) to[x] += d_query[idle * D + x];
        product<T>(at(low) + idle, 1, wide, rows, call.query_steps[2], (int)count, d_keys + (h * M + low) * D, D,
                   (int)(high - low), (int)D);
    }
};
}  // namespace
