// Small matrix products and mixing, with the sums in registers.
#pragma once
#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace {

// out[key][row] = sum_d a[key][d] b[d][row], for K keys and C vectors of rows, out of W rows
template <class T, int K, int C>
inline void score_tile(const T* a, int64_t stride, const T* b, int D, T* out, int64_t W) {
    using V = typename Of<T>::V;
    V acc[K][C] = {};
    for (int d = 0; d < D; ++d) {
        V x[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) x[c] = load(b + d * W + c * VL<T>);
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
            T y = a[k * stride + d];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[k][c] += x[c] * y;
        }
    }
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(out + k * W + c * VL<T>, acc[k][c]);
}

// apart: from one key to the next in out, and from one d to the next in b
template <class T, int C>
void scores(const T* a, int64_t stride, int keys, const T* b, int D, T* out, int64_t apart = C * VL<T>) {
    constexpr int W = C * VL<T>, S = MANY_REGISTERS || C == 1 ? C : 2;  // S: vectors of rows at a time
    constexpr int K = MANY_REGISTERS ? (C == 1 ? 12 : C == 4 ? 6 : 8) : 6;
    int k = 0;
    auto some = [&](auto count) {
        constexpr int count_of_keys = decltype(count)::value;
        for (; k + count_of_keys <= keys; k += count_of_keys)
            for (int c = 0; c < W; c += S * VL<T>)
                score_tile<T, count_of_keys, S>(a + k * stride, stride, b + c, D, out + k * apart + c, apart);
    };
    some(std::integral_constant<int, K>{});
    some(std::integral_constant<int, 4>{});
    some(std::integral_constant<int, 1>{});
}

// asks for the cache lines of some numbers ahead of their use
template <class T> inline void fetch(const T* p, int64_t count) {
    for (int64_t x = 0; x < count; x += 64 / (int64_t)sizeof(T)) __builtin_prefetch(p + x);
}

// out[row][d] += sum_n left[n][row] right[n][d], for R rows and C vectors of d; `step`: from one n to the next in `left`,
// `along`: from one row to the next in it
template <class T, int R, int C>
inline void product_tile(const T* left, int64_t step, int64_t along, const T* right, int64_t stride, int count, T* out,
                         int64_t out_stride) {
    using V = typename Of<T>::V;
    V acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * out_stride + c * VL<T>);
    for (int n = 0; n < count; ++n) {
        V x[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) x[c] = load(right + n * stride + c * VL<T>);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            T y = left[n * step + r * along];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] += x[c] * y;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(out + r * out_stride + c * VL<T>, acc[r][c]);
}

template <class T, int R>
inline void product_rows(const T* left, int64_t step, int64_t along, const T* right, int64_t stride, int count, T* out,
                         int64_t out_stride, int D) {
    int d = 0;
    if (MANY_REGISTERS)
        for (; d + 4 * VL<T> <= D; d += 4 * VL<T>)
            product_tile<T, R, 4>(left, step, along, right + d, stride, count, out + d, out_stride);
    for (; d + 2 * VL<T> <= D; d += 2 * VL<T>)
        product_tile<T, R, 2>(left, step, along, right + d, stride, count, out + d, out_stride);
    if (d < D) product_tile<T, R, 1>(left, step, along, right + d, stride, count, out + d, out_stride);
}

// out[row][d] += sum_n left(n, row) right[n][d]
template <class T>
void product(const T* left, int64_t step, int64_t along, const T* right, int64_t stride, int count, T* out,
             int64_t out_stride, int rows, int D) {
    int r = 0;
    auto some = [&](auto n) {
        constexpr int count_of_rows = decltype(n)::value;
        for (; r + count_of_rows <= rows; r += count_of_rows) {
            for (int ahead = r + count_of_rows; ahead < std::min(rows, r + 2 * count_of_rows); ++ahead)
                fetch(out + ahead * out_stride, D);
            product_rows<T, count_of_rows>(left + r * along, step, along, right, stride, count, out + r * out_stride,
                                           out_stride, D);
        }
    };
    some(std::integral_constant<int, 6>{});
    some(std::integral_constant<int, 4>{});
    some(std::integral_constant<int, 2>{});
    some(std::integral_constant<int, 1>{});
}

// out[a] = sum_b c[b][a] in[b] for A heads a, all heads b, K keys, at one vector of rows; c is a number, or one for each row
// (PER_ROW)
template <class T, int A, int K, bool PER_ROW>
inline void mix_tile(const T* in, int64_t in_stride, const T* c, int64_t to_b, int64_t to_a, const T* of_b, int64_t W, int H,
                     T* out, int64_t out_stride) {
    using V = typename Of<T>::V;
    V acc[A][K] = {};
    for (int b = 0; b < H; ++b) {
        V x[K];
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) {
            x[k] = load(in + b * in_stride + k * W);
            if (of_b) x[k] *= load(of_b + b * W);
        }
#pragma GCC unroll 8
        for (int a = 0; a < A; ++a) {
            const T* there = c + b * to_b + a * to_a;
            const V y = PER_ROW ? load(there) : all<T>(*there);
#pragma GCC unroll 4
            for (int k = 0; k < K; ++k) acc[a][k] += x[k] * y;
        }
    }
#pragma GCC unroll 8
    for (int a = 0; a < A; ++a)
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) store(out + a * out_stride + k * W, acc[a][k]);
}

template <class T, bool PER_ROW>
void mix(const T* in, int64_t in_stride, const T* c, int64_t to_b, int64_t to_a, const T* of_b, int64_t W, int H, int keys,
         T* out, int64_t out_stride) {
    constexpr int K = MANY_REGISTERS ? 3 : 1;  // keys for each load of a coefficient
    int a = 0;
    auto some = [&](auto count) {
        constexpr int A = decltype(count)::value;
        for (; a + A <= H; a += A)
            for (int w = 0; w < W; w += VL<T>) {
                const T *there = c + a * to_a + (PER_ROW ? w : 0), *of = of_b ? of_b + w : nullptr;
                int k = 0;
                for (; k + K <= keys; k += K)
                    mix_tile<T, A, K, PER_ROW>(in + k * W + w, in_stride, there, to_b, to_a, of, W, H,
                                               out + a * out_stride + k * W + w, out_stride);
                for (; k < keys; ++k)
                    mix_tile<T, A, 1, PER_ROW>(in + k * W + w, in_stride, there, to_b, to_a, of, W, H,
                                               out + a * out_stride + k * W + w, out_stride);
            }
    };
    some(std::integral_constant<int, 8>{});
    some(std::integral_constant<int, 4>{});
    some(std::integral_constant<int, 2>{});
    some(std::integral_constant<int, 1>{});
}

// out[a] += sum_b c[b][a] in[b] for heads a at one key, whose matrix c has a number for each pair of heads
template <class T, int A>
inline void mix_key_tile(const T* in, int64_t in_stride, const T* c, int64_t to_b, int64_t to_a, const T* of_b, int64_t W, int H,
                         T* out, int64_t out_stride) {
    using V = typename Of<T>::V;
    V acc[A];
#pragma GCC unroll 8
    for (int a = 0; a < A; ++a) acc[a] = load(out + a * out_stride);
    for (int b = 0; b < H; ++b) {
        V x = load(in + b * in_stride);
        if (of_b) x *= load(of_b + b * W);
#pragma GCC unroll 8
        for (int a = 0; a < A; ++a) acc[a] += x * c[b * to_b + a * to_a];
    }
#pragma GCC unroll 8
    for (int a = 0; a < A; ++a) store(out + a * out_stride, acc[a]);
}

template <class T>
void mix_key(const T* in, int64_t in_stride, const T* c, int64_t to_b, int64_t to_a, const T* of_b, int64_t W, int H, T* out,
             int64_t out_stride) {
    for (int64_t w = 0; w < W; w += VL<T>) {
        int a = 0;
        auto some = [&](auto count) {
            constexpr int A = decltype(count)::value;
            for (; a + A <= H; a += A)
                mix_key_tile<T, A>(in + w, in_stride, c + a * to_a, to_b, to_a, of_b ? of_b + w : nullptr, W, H,
                                   out + a * out_stride + w, out_stride);
        };
        some(std::integral_constant<int, 8>{});
        some(std::integral_constant<int, 4>{});
        some(std::integral_constant<int, 1>{});
    }
}

// of one key, with C vectors of rows: d[j][i] += sum_row p[j][row] g[i][row], delta[j][row] += sum_i c[j][i] p[j][row] g[i][row]
template <class T, int C>
void key_pairs(const T* p, const T* g, int64_t stride, int H, const T* c, T* d, T* delta) {
    using V = typename Of<T>::V;
    for (int j = 0; j < H; ++j) {
        V y[C], mixed[C] = {};
#pragma GCC unroll 4
        for (int w = 0; w < C; ++w) y[w] = load(p + j * stride + w * VL<T>);
        for (int i = 0; i < H; ++i) {
            V products = {};
#pragma GCC unroll 4
            for (int w = 0; w < C; ++w) {
                const V x = load(g + i * stride + w * VL<T>);
                products += y[w] * x;
                mixed[w] += x * c[j * H + i];
            }
            T sum = 0;
            for (int n = 0; n < VL<T>; ++n) sum += products[n];
            d[j * H + i] += sum;
        }
        if (!delta) continue;
#pragma GCC unroll 4
        for (int w = 0; w < C; ++w) {
            T* there = delta + (j * C + w) * VL<T>;
            store(there, load(there) + y[w] * mixed[w]);
        }
    }
}

// d[j][i][row] += sum_k p[j][k][row] g[i][k][row]
template <class T, int J, int I>
inline void pair_tile(const T* p, int64_t p_stride, const T* g, int64_t g_stride, int keys, int64_t W, int H, T* d) {
    using V = typename Of<T>::V;
    for (int w = 0; w < W; w += VL<T>) {
        V acc[J][I];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
            for (int i = 0; i < I; ++i) acc[j][i] = load(d + (j * H + i) * W + w);
        for (int k = 0; k < keys; ++k) {
            V x[I];
#pragma GCC unroll 4
            for (int i = 0; i < I; ++i) x[i] = load(g + i * g_stride + k * W + w);
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) {
                V y = load(p + j * p_stride + k * W + w);
#pragma GCC unroll 4
                for (int i = 0; i < I; ++i) acc[j][i] += y * x[i];
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
            for (int i = 0; i < I; ++i) store(d + (j * H + i) * W + w, acc[j][i]);
    }
}

template <class T>
void pairs(const T* p, int64_t p_stride, const T* g, int64_t g_stride, int keys, int64_t W, int H, T* d) {
    auto of = [&](auto rows, int j) {
        constexpr int J = decltype(rows)::value;
        int i = 0;
        for (; i + 4 <= H; i += 4)
            pair_tile<T, J, 4>(p + j * p_stride, p_stride, g + i * g_stride, g_stride, keys, W, H, d + (j * H + i) * W);
        for (; i < H; ++i)
            pair_tile<T, J, 1>(p + j * p_stride, p_stride, g + i * g_stride, g_stride, keys, W, H, d + (j * H + i) * W);
    };
    constexpr int J = MANY_REGISTERS ? 4 : 2;
    int j = 0;
    for (; j + J <= H; j += J) of(std::integral_constant<int, J>{}, j);
    for (; j < H; ++j) of(std::integral_constant<int, 1>{}, j);
}
}  // namespace
