// The mixing of heads of a block of query rows, and its gradient: out_i(n, m) = sum_j (M_ji(n) + K_ji(m)) in_j(n, m).
#pragma once
#include "call.h"
#include "products.h"

namespace {

template <class T, int C> struct Mixing {
    static constexpr int64_t W = C * VL<T>;
    const int kind;             // of M; 0: none, so that it is I, 1: (H, H), 2: (B, N, H, H)
    const T *matrix, *of_keys;  // M, and K (B, M, H, H) or null
    const int64_t H, N, M;
    Buffer<T> rows, turned, pair;  // M of the rows of a block, [j][i][row] and [i][j][row]; its gradient [j][i][row]

    Mixing(const Call& c, int64_t matrix_kind, const void* of_queries, const void* of_tokens, bool backward)
        : kind((int)matrix_kind), matrix((const T*)of_queries), of_keys((const T*)of_tokens), H(c.H), N(c.N), M(c.M),
          rows(kind == 2 ? H * H * W : 0), turned(kind == 2 && backward ? H * H * W : 0),
          pair(kind && backward ? H * H * W : 0) {}

    bool changes() const { return kind || of_keys; }

    void begin(const Rows& r) {
        if (pair) std::memset(pair.get(), 0, H * H * W * sizeof(T));
        if (kind != 2) return;
        for (int64_t n = 0; n < W; ++n) {
            const T* m = matrix + (r.text * N + r.row + (n < r.count ? n : r.count - 1)) * H * H;
            for (int64_t j = 0; j < H; ++j)
                for (int64_t i = 0; i < H; ++i) {
                    rows[(j * H + i) * W + n] = m[j * H + i];
                    if (turned) turned[(i * H + j) * W + n] = m[j * H + i];
                }
        }
    }

    // place: of the first key, text M + key. of_heads [j][row]: by what maps are multiplied first, or null
    void mix(const T* in, int64_t in_stride, int64_t place, int keys, const T* of_heads, T* out, int64_t out_stride) const {
        run(in, in_stride, place, keys, of_heads, rows, H, 1, out, out_stride);
    }

    // the same with j and i exchanged
    void mix_back(const T* in, int64_t in_stride, int64_t place, int keys, const T* of_heads, T* out,
                  int64_t out_stride) const {
        run(in, in_stride, place, keys, of_heads, turned, 1, H, out, out_stride);
    }

    // from some keys, what they add to the gradient D_ji(n) = sum over keys of in_j d_out_i of M, to that of K, d_of_keys
    // (M, H, H) of this text, and to delta [j][row] by K: sum_i K_ji in_j d_out_i
    void add_gradient(const T* in, const T* d_out, int64_t stride, int64_t text, int64_t key, int keys, T* d_of_keys,
                      T* delta) {
        if (kind) pairs<T>(in, stride, d_out, stride, keys, W, (int)H, pair);
        for (int k = 0; of_keys && k < keys; ++k)
            key_pairs<T, C>(in + k * W, d_out + k * W, stride, (int)H, of_keys + (text * M + key + k) * H * H,
                            d_of_keys + (key + k) * H * H, delta);
    }

    // what M adds to delta: sum_i M_ji D_ji
    void add_delta(T* delta) const {
        for (int64_t j = 0; kind && j < H; ++j)
            for (int64_t i = 0; i < H; ++i) {
                const int64_t ji = j * H + i;
                for (int64_t n = 0; n < W; ++n)
                    delta[j * W + n] += (kind == 1 ? matrix[ji] : rows[ji * W + n]) * pair[ji * W + n];
            }
    }

    // D: of an M for all rows added to sums (H, H), of others into d_matrix (B, N, H, H)
    void put_gradient(const Rows& r, double* sums, void* d_matrix) const {
        for (int64_t n = 0; kind && n < r.count; ++n) {
            T* d = (T*)d_matrix + (r.text * N + r.row + n) * H * H;
            for (int64_t ji = 0; ji < H * H; ++ji)
                if (kind == 1)
                    sums[ji] += pair[ji * W + n];
                else
                    d[ji] = pair[ji * W + n];
        }
    }

private:
    void run(const T* in, int64_t in_stride, int64_t place, int keys, const T* of_heads, const T* of_rows, int64_t to_from,
             int64_t to_to, T* out, int64_t out_stride) const {
        if (kind == 1)
            ::mix<T, false>(in, in_stride, matrix, to_from, to_to, of_heads, W, (int)H, keys, out, out_stride);
        else if (kind == 2)
            ::mix<T, true>(in, in_stride, of_rows, H * W, W, of_heads, W, (int)H, keys, out, out_stride);
        else
            copy(in, in_stride, keys, of_heads, out, out_stride);
        for (int k = 0; of_keys && k < keys; ++k)
            mix_key<T>(in + k * W, in_stride, of_keys + (place + k) * H * H, to_from, to_to, of_heads, W, (int)H, out + k * W,
                       out_stride);
    }

    void copy(const T* in, int64_t in_stride, int keys, const T* of_heads, T* out, int64_t out_stride) const {
        for (int64_t h = 0; h < H; ++h)
            for (int64_t x = 0; x < keys * W; x += W)
                for (int64_t w = 0; w < W; w += VL<T>) {
                    typename Of<T>::V y = load(in + h * in_stride + x + w);
                    store(out + h * out_stride + x + w, of_heads ? y * load(of_heads + h * W + w) : y);
                }
    }
};
}  // namespace
