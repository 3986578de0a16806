// One block of query rows, forward: scores, weights, mixing and values.
#pragma once
#include "call.h"
#include "products.h"

namespace {

template <class T, int C> struct Block {
    using V = typename Of<T>::V;
    using I = typename Of<T>::I;
    using Int = typename Of<T>::Int;
    static constexpr int64_t W = C * VL<T>;

    const Call& call;
    const int64_t H, N, M, D, room;  // room: keys in a block, at most
    Buffer<T> weights, slopes, tile, query_block, out_block, coefficients, raw, normalizer, factor;
    Buffer<Int> first, end, own;
    Buffer<uint32_t> row_key;
    int64_t from, size;  // keys of this block

    Block(const Call& c, int64_t most_keys, bool with_slopes)
        : call(c), H(c.H), N(c.N), M(c.M), D(c.D), room(most_keys), weights(H * room * W),
          slopes(with_slopes ? H * room * W : 0), tile(H * TILE * W), query_block(D * W), out_block(H * W * D),
          coefficients(c.mixing_kind == 2 ? H * H * W : 0), raw(c.T ? (c.T + 2 * W) * W : 0), normalizer(H * W), factor(W),
          first(W), end(W), own(W), row_key(H * W), from(0), size(0) {}

    const T* at(const void* p, int64_t b, int64_t h, int64_t n, int64_t length) const {
        return (const T*)p + ((b * H + h) * length + n) * D;
    }

    // b[d][row] of rows of (B, H, N, D), times a number; rows beyond the text are zero
    void turned(const void* source, const Rows& r, int64_t h, T times) {
        const T* q = at(source, r.text, h, r.row, N);
        for (int64_t n = 0; n < W; ++n)
            for (int64_t d = 0; d < D; ++d) query_block[d * W + n] = n < r.count ? q[n * D + d] * times : 0;
    }

    void begin(const Rows& r) {
        from = r.keys_from;
        size = r.keys_to - r.keys_from;
        for (int64_t n = 0; n < W; ++n) {
            int64_t row = r.row + (n < r.count ? n : r.count - 1);
            first[n] = call.first[row];
            end[n] = call.end[row];
            own[n] = call.own[row];
            if (call.dropped)
                for (int64_t h = 0; h < H; ++h) {
                    const int64_t place = ((r.text + call.first_text) * H + h) * N + row;
                    row_key[h * W + n] = hash((uint32_t)call.seed ^ hash((uint32_t)place) ^ (uint32_t)(place >> 32));
                }
        }
        if (call.mixing_kind == 2)
            for (int64_t n = 0; n < W; ++n) {
                const T* m = (const T*)call.mixing + (r.text * N + r.row + (n < r.count ? n : r.count - 1)) * H * H;
                for (int64_t j = 0; j < H; ++j)
                    for (int64_t i = 0; i < H; ++i) coefficients[(j * H + i) * W + n] = m[j * H + i];
            }
    }

    static uint32_t hash(uint32_t x) {
        x ^= x >> 16;
        x *= 0x7feb352dU;
        x ^= x >> 15;
        x *= 0x846ca68bU;
        return x ^ (x >> 16);
    }

    // factor[row]: 0 where the weight of head h at key k is dropped
    void draw(int64_t h, int64_t k) {
        const uint32_t step = (uint32_t)k * 0x9e3779b9U + (uint32_t)(call.seed >> 32);
        const uint32_t* key = row_key + h * W;
        const uint32_t dropped = (uint32_t)call.dropped;
        const T kept = (T)call.kept_scale;
        for (int64_t n = 0; n < W; ++n) factor[n] = hash(key[n] + step) >= dropped ? kept : (T)0;
    }

    // scores of one head, [key][row], masked with -inf
    void score(const Rows& r, int64_t h) {
        T* s = weights + h * room * W;
        turned(call.query, r, h, (T)call.scale);
        scores<T, C>(at(call.keys, r.text, h, from, M), D, size, query_block, D, s);
        if (call.T) {
            turned(call.position, r, h, (T)call.scale);
            int64_t low, high;
            strip(r, low, high);
            std::memset(raw.get(), 0, W * W * sizeof(T));
            std::memset(raw + (W + high - low) * W, 0, W * W * sizeof(T));
            scores<T, C>((const T*)call.table + (h * call.T + low) * D, D, high - low, query_block, D, raw + W * W);
            for (int64_t k = 0; k < size; ++k) {
                const T* shifted = raw + shift(r, k, low, high) * W;
                for (int64_t n = 0; n < W; ++n) s[k * W + n] += shifted[n * (W + 1)];
            }
        }
        const uint8_t* tokens = call.tokens ? call.tokens + r.text * M : nullptr;
        for (int64_t k = 0; k < size; ++k) {
            const int64_t key = from + k;
            const bool hidden = tokens && !tokens[key];
            if (!hidden && key >= r.all_from && key < r.all_to) continue;
            for (int64_t w = 0; w < W; w += VL<T>) {
                I here = (Int)key - (I){};
                I seen = (hidden ? I{} : ((load_i(first + w) <= here) & (here < load_i(end + w)))) | (here == load_i(own + w));
                V x = load(s + k * W + w);
                store(s + k * W + w, seen ? x : all<T>(-INFINITY));
            }
        }
    }

    static I load_i(const Int* p) {
        I v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }

    // rows of the table that this block meets
    void strip(const Rows& r, int64_t& low, int64_t& high) const {
        int64_t least = INT64_MAX, most = INT64_MIN;
        for (int64_t k = 0; k < size; ++k) {
            least = std::min<int64_t>(least, call.base[from + k]);
            most = std::max<int64_t>(most, call.base[from + k]);
        }
        low = std::min(std::max<int64_t>(0, r.row + least), call.T);
        high = std::max(low, std::min<int64_t>(call.T, r.row + W + most));
    }

    // where in `raw`, in rows, the numbers of key k begin; out of the strip: where there are only zeros, or what no row sees
    int64_t shift(const Rows& r, int64_t k, int64_t low, int64_t high) const {
        return std::min(std::max<int64_t>(r.row + call.base[from + k] - low + W, 0), high - low + W);
    }

    // the exponent of exp(x) sigmoid(x) but for 1 + exp(-|x|): x + min(x, 0)
    static V bent(V x) { return x < (V){} ? x + x : x; }

    // weights of one head from its scores, not yet divided by their sum; normalizer: the sum inverted; lse: its logarithm
    void weigh(const Rows& r, int64_t h) {
        T* s = weights + h * room * W;
        T* lse = (T*)call.lse + (r.text * H + h) * N + r.row;
        const bool sig = call.sigsoftmax;
        for (int64_t w = 0; w < W; w += VL<T>) {
            V most = all<T>(-INFINITY);
            for (int64_t k = 0; k < size; ++k) {
                V x = load(s + k * W + w);
                most = x > most ? x : most;
            }
            if (sig) most = bent(most);
            V sum = {};
            for (int64_t k = 0; k < size; ++k) {
                V x = load(s + k * W + w), y;
                if (sig) {
                    V t = exponential<T>(x < (V){} ? x : -x);
                    y = exponential<T>(bent(x) - most) / (t + (T)1);
                } else
                    y = exponential<T>(x - most);
                sum += y;
                store(s + k * W + w, y);
            }
            store(normalizer + h * W + w, (T)1 / sum);
            for (int64_t n = 0; n < VL<T> && w + n < r.count; ++n) lse[w + n] = most[n] + std::log(sum[n]);
        }
    }

    // the same from the known logarithms, normalized as well as a rounded logarithm tells; normalizer: their sum inverted;
    // slopes: 2 - sigmoid(score), where sigsoftmax needs them
    void weigh_again(const Rows& r, int64_t h) {
        T* s = weights + h * room * W;
        T lse[W];
        const T* known = (const T*)call.lse + (r.text * H + h) * N + r.row;
        for (int64_t n = 0; n < W; ++n) lse[n] = known[n < r.count ? n : r.count - 1];
        const bool sig = call.sigsoftmax;
        V sum[C] = {};
        for (int64_t k = 0; k < size; ++k)
            for (int64_t w = 0; w < W; w += VL<T>) {
                V x = load(s + k * W + w), z = load(lse + w), y;
                if (sig) {
                    V t = exponential<T>(x < (V){} ? x : -x), u = (T)1 / (t + (T)1);
                    y = exponential<T>(bent(x) - z) * u;
                    store(slopes + (h * room + k) * W + w, (x < (V){} ? u : t * u) + (T)1);
                } else
                    y = exponential<T>(x - z);
                sum[w / VL<T>] += y;
                store(s + k * W + w, y);
            }
        for (int64_t w = 0; w < W; w += VL<T>) store(normalizer + h * W + w, (T)1 / sum[w / VL<T>]);
    }

    // mixed weights of some keys, each head so far from the one before; divided: by what the weights of a head are multiplied
    const T* mixed(int64_t k, int keys, const T* divided, int64_t& stride) {
        const T* p = weights + k * W;
        if (!call.mixing_kind && !call.dropped) {
            stride = room * W;
            return p;
        }
        stride = TILE * W;
        if (call.mixing_kind == 1)
            mix<T, false>(p, room * W, (const T*)call.mixing, H, 1, divided, W, H, keys, tile, stride);
        else if (call.mixing_kind == 2)
            mix<T, true>(p, room * W, coefficients, H * W, W, divided, W, H, keys, tile, stride);
        else
            for (int64_t h = 0; h < H; ++h) std::memcpy(tile + h * stride, p + h * room * W, keys * W * sizeof(T));
        return tile;
    }

    // dropout of the mixed weights in `tile`, and of what else has a place for each of them
    void drop(int64_t k, int keys, T* other, int64_t stride) {
        for (int64_t h = 0; h < H; ++h)
            for (int64_t x = 0; x < keys; ++x) {
                draw(h, from + k + x);
                T* there = tile + (h * TILE + x) * W;
                for (int64_t n = 0; n < W; ++n) there[n] *= factor[n];
                if (!other) continue;
                T* too = other + h * stride + x * W;
                for (int64_t n = 0; n < W; ++n) too[n] *= factor[n];
            }
    }

    void forward(const Rows& r) {
        begin(r);
        for (int64_t h = 0; h < H; ++h) {
            score(r, h);
            weigh(r, h);
        }
        std::memset(out_block.get(), 0, H * W * D * sizeof(T));
        for (int64_t k = 0; k < size; k += TILE) {
            const int keys = (int)std::min<int64_t>(TILE, size - k);
            int64_t stride;
            const T* p = mixed(k, keys, normalizer, stride);
            if (call.dropped) drop(k, keys, nullptr, 0);
            for (int64_t h = 0; h < H; ++h)
                product<T>(p + h * stride, W, 1, at(call.values, r.text, h, from + k, M), D, keys, out_block + h * W * D, D,
                           (int)W, (int)D);
        }
        for (int64_t h = 0; h < H; ++h)
            for (int64_t n = 0; n < r.count; ++n) {
                T* o = (T*)call.out + ((r.text * H + h) * N + r.row + n) * D;
                const T* found = out_block + (h * W + n) * D;
                const T times = call.mixing_kind ? (T)1 : normalizer[h * W + n];
                for (int64_t d = 0; d < D; ++d) o[d] = found[d] * times;
            }
    }
};
}  // namespace
