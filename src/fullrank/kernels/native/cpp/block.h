// One block of query rows, forward: scores, weights, mixing and values.
#pragma once
#include "convolution.h"
#include "mixing.h"

namespace {

template <class T, int C> struct Block {
    using V = typename Of<T>::V;
    using I = typename Of<T>::I;
    using Int = typename Of<T>::Int;
    static constexpr int64_t W = C * VL<T>;

    const Call& call;
    const int64_t H, N, M, D, room;  // room: keys in a block, at most
    const bool mixes_scores;
    Mixing<T, C> mixing, scoring;
    Convolution<T, C> convolution;
    Buffer<T> weights, unmixed, slopes, tile, query_block, position_block, out_block, raw;
    Buffer<T> most, sum, factors, factor;  // [head][row] twice, [tile][head][row], [row]
    Buffer<Int> first, end, own_key;
    Buffer<uint32_t> row_key;
    int64_t from, size;  // keys of this block

    Block(const Call& c, int64_t most_keys, bool backward)
        : call(c), H(c.H), N(c.N), M(c.M), D(c.D), room(most_keys), mixes_scores(c.mixes_scores()),
          mixing(c, c.mixing_kind, c.mixing, c.key_mixing, backward),
          scoring(c, c.scoring_kind, c.scoring, c.key_scoring, backward), convolution(c, most_keys, backward),
          weights(H * room * W), unmixed(mixes_scores ? H * room * W : 0), slopes(backward && c.sigsoftmax ? H * room * W : 0),
          tile(H * (TILE + 1) * W), query_block(H * D * W), position_block(c.T ? D * W : 0), out_block(H * W * D),
          raw(c.T ? (c.T + 2 * W) * W : 0), most(H * W), sum(H * W), factors((most_keys / TILE + 1) * H * W), factor(W),
          first(W), end(W), own_key(W), row_key(H * W), from(0), size(0) {}

    const T* at(const void* p, int64_t b, int64_t h, int64_t n) const { return (const T*)p + ((b * H + h) * call.K + n) * D; }

    // asks for rows of keys or values at some keys ahead of their use
    void fetch_rows(const void* source, const Rows& r, int64_t h, int64_t start, int64_t keys) const {
        if (h < H) fetch(at(source, r.text, h, from + start), keys * D);
    }

    // to[d][row] of rows of (B, H, N, D), times a number; rows beyond the text are zero
    void turn(const void* source, const int64_t* steps, const Rows& r, int64_t h, T times, T* to) const {
        const T* q = Call::row((const T*)source, steps, r.text, h, r.row);
        for (int64_t n = 0; n < W; ++n)
            for (int64_t d = 0; d < D; ++d) to[d * W + n] = n < r.count ? q[n * steps[2] + d] * times : 0;
    }

    // the rows [head][row][d] of this block
    void put(const Rows& r, const T* rows, void* to, const int64_t* steps) const {
        for (int64_t h = 0; h < H; ++h)
            for (int64_t n = 0; n < r.count; ++n)
                std::memcpy(Call::row((T*)to, steps, r.text, h, r.row + n), rows + (h * W + n) * D, D * sizeof(T));
    }

    void begin(const Rows& r) {
        std::memset(sum.get(), 0, H * W * sizeof(T));
        from = r.keys_from;
        size = r.keys_to - r.keys_from;
        for (int64_t n = 0; n < W; ++n) {
            int64_t row = r.row + (n < r.count ? n : r.count - 1);
            first[n] = call.first_of(r.text)[row];
            end[n] = call.end[row];
            own_key[n] = call.own_key[row];
            if (call.dropped)
                for (int64_t h = 0; h < H; ++h) {
                    const int64_t place = ((r.text + call.first_text) * H + h) * N + row;
                    row_key[h * W + n] = hash((uint32_t)call.seed ^ hash((uint32_t)place) ^ (uint32_t)(place >> 32));
                }
        }
        for (int64_t h = 0; h < H; ++h) turn(call.query, call.query_steps, r, h, (T)call.scale, query_block + h * D * W);
        if (call.T)
            for (int64_t h = 0; h < H; ++h) score(r, h, 0, size);
        mixing.begin(r);
        scoring.begin(r);
        if (!call.convolution) return;
        convolution.begin(r);
        for (int64_t h = 0; h < H; ++h) {
            convolution.run(r, h, weights + h * room * W);
            mask(r, h, 0, size);
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

    // where scores are computed, before they are mixed
    T* computed() const { return mixes_scores ? unmixed : weights; }

    // scores of one head at some keys, [key][row]; masked with -inf, unless they are to be mixed
    void score(const Rows& r, int64_t h, int64_t start, int64_t keys) {
        T* s = computed() + (h * room + start) * W;
        scores<T, C>(at(call.keys, r.text, h, from + start), D, (int)keys, query_block + h * D * W, D, s);
        if (call.T) {
            turn(call.position, call.position_steps, r, h, (T)call.scale, position_block);
            int64_t low, high;
            strip(r, low, high);
            std::memset(raw.get(), 0, W * W * sizeof(T));
            std::memset(raw + (W + high - low) * W, 0, W * W * sizeof(T));
            scores<T, C>((const T*)call.table + (h * call.T + low) * D, D, high - low, position_block, D, raw + W * W);
            for (int64_t k = 0; k < keys; ++k) {
                const T* shifted = raw + shift(r, k, low, high) * W;
                for (int64_t n = 0; n < W; ++n) s[k * W + n] += shifted[n * (W + 1)];
            }
        }
        if (!mixes_scores) mask(r, h, start, keys);
    }

    // scores of all heads at some keys, mixed and masked
    void mix_scores(const Rows& r, int64_t start, int64_t keys) {
        scoring.mix(unmixed + start * W, room * W, place(r, start), (int)keys, nullptr, weights + start * W, room * W);
        for (int64_t h = 0; h < H; ++h) mask(r, h, start, keys);
    }

    void mask(const Rows& r, int64_t h, int64_t start, int64_t keys) {
        T* s = weights + (h * room + start) * W;
        const uint8_t* tokens = call.tokens ? call.tokens + r.text * M : nullptr;
        for (int64_t k = 0; k < keys; ++k) {
            const int64_t key = from + start + k;
            const bool hidden = tokens && !tokens[key];
            if (!hidden && key >= r.all_from && key < r.all_to) continue;
            for (int64_t w = 0; w < W; w += VL<T>) {
                I here = (Int)key - (I){};
                const I inside = (load_indices<T>(first + w) <= here) & (here < load_indices<T>(end + w));
                const I seen = (hidden ? I{} : inside) | (here == load_indices<T>(own_key + w));
                V x = load(s + k * W + w);
                store(s + k * W + w, seen ? x : all<T>(-INFINITY));
            }
        }
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

    // weights of one head at some keys from their scores, up to exp(most), and the sum of all so far; most: the greatest so far
    void weigh(int64_t h, int64_t start, int64_t keys) {
        T* s = weights + (h * room + start) * W;
        const bool sig = call.sigsoftmax;
        for (int64_t w = 0; w < W; w += VL<T>) {
            const V before = load(most + h * W + w);
            V greatest = all<T>(-INFINITY);
            for (int64_t k = 0; k < keys; ++k) {
                V x = load(s + k * W + w);
                greatest = x > greatest ? x : greatest;
            }
            if (sig) greatest = bent(greatest);
            greatest = greatest > before ? greatest : before;
            V total = load(sum + h * W + w) * exponential<T>(before - greatest);
            for (int64_t k = 0; k < keys; ++k) {
                V x = load(s + k * W + w), y;
                if (sig) {
                    V t = exponential<T>(x < (V){} ? x : -x);
                    y = exponential<T>(bent(x) - greatest) / (t + (T)1);
                } else
                    y = exponential<T>(x - greatest);
                total += y;
                store(s + k * W + w, y);
            }
            store(sum + h * W + w, total);
            store(most + h * W + w, greatest);
            store(factors + (start / TILE * H + h) * W + w, greatest);
        }
    }

    // factors: by what the weights of each tile are multiplied so that those of a row sum to 1; the logarithms of the sums
    void normalize(const Rows& r) {
        for (int64_t h = 0; h < H; ++h) {
            T* lse = (T*)call.lse + (r.text * H + h) * N + r.row;
            for (int64_t n = 0; n < r.count; ++n) lse[n] = most[h * W + n] + std::log(sum[h * W + n]);
            for (int64_t w = h * W; w < (h + 1) * W; w += VL<T>)
                for (int64_t k = 0; k < size; k += TILE) {
                    T* there = factors + k / TILE * H * W + w;
                    store(there, exponential<T>(load(there) - load(most + w)) / load(sum + w));
                }
        }
    }

    // the same from the known logarithms, normalized as well as a rounded logarithm tells, 0 in rows beyond the text; sum: of
    // all so far; slopes: 2 - sigmoid(score), where sigsoftmax needs them
    void weigh_again(const Rows& r, int64_t h, int64_t start, int64_t keys) {
        T* s = weights + (h * room + start) * W;
        T* slope = slopes ? slopes + (h * room + start) * W : nullptr;
        const T* known = (const T*)call.lse + (r.text * H + h) * N + r.row;
        T lse[W];
        for (int64_t n = 0; n < W; ++n) lse[n] = n < r.count ? known[n] : INFINITY;
        const bool sig = call.sigsoftmax;
        for (int64_t w = 0; w < W; w += VL<T>) {
            const V z = load(lse + w);
            V total = load(sum + h * W + w);
            for (int64_t k = 0; k < keys; ++k) {
                V x = load(s + k * W + w), y;
                if (sig) {
                    V t = exponential<T>(x < (V){} ? x : -x), u = (T)1 / (t + (T)1);
                    y = exponential<T>(bent(x) - z) * u;
                    store(slope + k * W + w, (x < (V){} ? u : t * u) + (T)1);
                } else
                    y = exponential<T>(x - z);
                total += y;
                store(s + k * W + w, y);
            }
            store(sum + h * W + w, total);
        }
    }

    // a key of this block in (B, M)
    int64_t place(const Rows& r, int64_t start) const { return r.text * M + from + start; }

    // mixed weights of some keys, each head so far from the one before; divided: by what the weights of a head are multiplied
    const T* mixed(const Rows& r, int64_t k, int keys, const T* divided, int64_t& stride) {
        const T* p = weights + k * W;
        if (!mixing.changes() && !call.dropped && !divided) {
            stride = room * W;
            return p;
        }
        stride = (TILE + 1) * W;
        mixing.mix(p, room * W, place(r, k), keys, divided, tile, stride);
        return tile;
    }

    // dropout of the mixed weights in `tile`, and of what else has a place for each of them
    void drop(int64_t k, int keys, T* other, int64_t stride) {
        for (int64_t h = 0; h < H; ++h)
            for (int64_t x = 0; x < keys; ++x) {
                draw(h, from + k + x);
                T* there = tile + (h * (TILE + 1) + x) * W;
                for (int64_t n = 0; n < W; ++n) there[n] *= factor[n];
                if (!other) continue;
                T* too = other + h * stride + x * W;
                for (int64_t n = 0; n < W; ++n) too[n] *= factor[n];
            }
    }

    void forward(const Rows& r) {
        begin(r);
        for (int64_t x = 0; x < H * W; ++x) most[x] = std::numeric_limits<T>::lowest();
        for (int64_t k = 0; k < size; k += TILE) {
            const int64_t keys = std::min<int64_t>(TILE, size - k);
            for (int64_t h = 0; h < H; ++h) {
                fetch_rows(call.keys, r, h + 1, k, keys);
                if (!call.scored_at_once()) score(r, h, k, keys);
                if (!mixes_scores) weigh(h, k, keys);
            }
            if (!mixes_scores) continue;
            mix_scores(r, k, keys);
            for (int64_t h = 0; h < H; ++h) weigh(h, k, keys);
        }
        normalize(r);
        std::memset(out_block.get(), 0, H * W * D * sizeof(T));
        for (int64_t k = 0; k < size; k += TILE) {
            const int keys = (int)std::min<int64_t>(TILE, size - k);
            int64_t stride;
            const T* p = mixed(r, k, keys, factors + k / TILE * H * W, stride);
            if (call.dropped) drop(k, keys, nullptr, 0);
            for (int64_t h = 0; h < H; ++h) {
                fetch_rows(call.values, r, h + 1, k, keys);
                product<T>(p + h * stride, W, 1, at(call.values, r.text, h, from + k), D, keys, out_block + h * W * D, D,
                           (int)W, (int)D);
            }
        }
        put(r, out_block, call.out, call.out_steps);
    }
};
}  // namespace
