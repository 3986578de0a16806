// x W' + b for a few rows x: every weight is read once, as it lies. Transposes for products of many rows.
#pragma once
#include <algorithm>

#include "vectors.h"

namespace {

template <class T> struct Linear {
    const T *x, *weight, *bias;
    T* out;
    int64_t width, size;  // of a row of x, of a row of out

    // columns n to n + COLUMNS of out
    template <int ROWS, int COLUMNS> void dots(int64_t n) const {
        typename Of<T>::V sums[COLUMNS][ROWS] = {};
        const T* w = weight + n * width;
        int64_t k = 0;
        for (; k + VL<T> <= width; k += VL<T>)
            for (int column = 0; column < COLUMNS; ++column) {
                const auto weights = load(w + column * width + k);
                __builtin_prefetch(w + (column + COLUMNS) * width + k);
                for (int row = 0; row < ROWS; ++row) sums[column][row] += weights * load(x + row * width + k);
            }
        for (int column = 0; column < COLUMNS; ++column)
            for (int row = 0; row < ROWS; ++row) {
                T sum = bias ? bias[n + column] : 0;
                for (int i = 0; i < VL<T>; ++i) sum += sums[column][row][i];
                for (int64_t rest = k; rest < width; ++rest) sum += w[column * width + rest] * x[row * width + rest];
                out[row * size + n + column] = sum;
            }
    }

    template <int ROWS> void run(int64_t threads) const {
        constexpr int64_t COLUMNS = std::max(1, (MANY_REGISTERS ? 16 : 8) / ROWS);
        const int64_t blocks = size / COLUMNS;
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
        for (int64_t block = 0; block < blocks; ++block) dots<ROWS, COLUMNS>(block * COLUMNS);
        for (int64_t n = blocks * COLUMNS; n < size; ++n) dots<ROWS, 1>(n);
    }

    void run(int64_t rows, int64_t threads) const {
        switch (rows) {
            case 1: return run<1>(threads);
            case 2: return run<2>(threads);
            case 3: return run<3>(threads);
            case 4: return run<4>(threads);
            case 5: return run<5>(threads);
            case 6: return run<6>(threads);
            case 7: return run<7>(threads);
            case 8: return run<8>(threads);
        }
    }
};

// to (columns, rows) from (rows, columns) of floats, `apart` from one row to the next
inline void transpose(const float* from, int64_t apart, float* to, int64_t rows, int64_t columns, int64_t threads) {
    constexpr int64_t SIDE = 16;
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t column = 0; column < columns; column += SIDE)
        for (int64_t row = 0; row < rows; row += SIDE) {
            const float* tile = from + row * apart + column;
            float* turned = to + column * rows + row;
            if (row + SIDE <= rows && column + SIDE <= columns) {
                float lines[SIDE][SIDE];  // of known size, so that a compiler turns it in registers
                for (int64_t c = 0; c < SIDE; ++c)
                    for (int64_t r = 0; r < SIDE; ++r) lines[c][r] = tile[r * apart + c];
                for (int64_t c = 0; c < SIDE; ++c) std::memcpy(turned + c * rows, lines[c], sizeof lines[c]);
            } else
                for (int64_t c = 0; c < std::min(SIDE, columns - column); ++c)
                    for (int64_t r = 0; r < std::min(SIDE, rows - row); ++r) turned[c * rows + r] = tile[r * apart + c];
        }
}
}  // namespace
