// Attention with one query in each text, for models that write token after token.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

// out_i = sum_m (sum_j M_ji P_jm) v_im,    P_j = softmax_m(scale q_j k_jm)
template <class T> struct OneQuery {
    const T *query, *keys, *values, *mixing;  // mixing is null, (H, H) or (B, H, H)
    T* out;
    int64_t texts, heads, length, width;  // length: keys of a head
    int64_t room;                         // rows from the keys of one head to those of the next
    bool of_each_text;                    // each text has a mixing of its own
    T scale;

    void run(int64_t threads) const {
        const int64_t count = texts * heads, row = (length + VL<T> - 1) / VL<T> * VL<T>;
        std::vector<T> weights(count * row), mixed(mixing ? count * row : 0);
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
        for (int64_t head = 0; head < count; ++head) weigh(head, &weights[head * row], row);
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
        for (int64_t head = 0; head < count; ++head) {
            const T* applied = &weights[head * row];
            if (mixing) {
                mix(head, weights.data(), &mixed[head * row], row);
                applied = &mixed[head * row];
            }
            add_values(head, applied);
        }
    }

    void weigh(int64_t head, T* weights, int64_t row) const {
        const T *q = query + head * width, *key = keys + head * room * width;
        std::fill(weights, weights + row, -std::numeric_limits<T>::infinity());
        T most = weights[0];
        for (int64_t m = 0; m < length; ++m, key += width) {
            typename Of<T>::V sums = {};
            int64_t k = 0;
            for (; k + VL<T> <= width; k += VL<T>) sums += load(q + k) * load(key + k);
            T score = 0;
            for (int i = 0; i < VL<T>; ++i) score += sums[i];
            for (; k < width; ++k) score += q[k] * key[k];
            weights[m] = scale * score;
            most = std::max(most, weights[m]);
        }
        typename Of<T>::V sums = {};
        for (int64_t m = 0; m < row; m += VL<T>) {
            const auto numerators = exponential<T>(load(weights + m) - most);
            store(weights + m, numerators);
            sums += numerators;
        }
        T sum = 0;
        for (int i = 0; i < VL<T>; ++i) sum += sums[i];
        for (int64_t m = 0; m < row; ++m) weights[m] /= sum;
    }

    void mix(int64_t head, const T* weights, T* mixed, int64_t row) const {
        const int64_t text = head / heads, to = head % heads;
        const T* column = mixing + (of_each_text ? text * heads * heads : 0) + to;
        for (int64_t from = 0; from < heads; ++from) {
            const T share = column[from * heads];
            const T* source = weights + (text * heads + from) * row;
            for (int64_t m = 0; m < row; ++m) mixed[m] += share * source[m];
        }
    }

    // sums of some keys are added up, so that errors of rounding do not grow with all of them
    void add_values(int64_t head, const T* weights) const {
        constexpr int64_t KEYS = 64;
        const T* value = values + head * room * width;
        T* sums = out + head * width;
        std::fill(sums, sums + width, T(0));
        for (int64_t first = 0; first < length; first += KEYS) {
            const int64_t end = std::min(first + KEYS, length);
            int64_t k = 0;
            for (; k + VL<T> <= width; k += VL<T>) {
                typename Of<T>::V part = {};
                for (int64_t m = first; m < end; ++m) part += weights[m] * load(value + m * width + k);
                store(sums + k, load(sums + k) + part);
            }
            for (; k < width; ++k)
                for (int64_t m = first; m < end; ++m) sums[k] += weights[m] * value[m * width + k];
        }
    }
};
}  // namespace
