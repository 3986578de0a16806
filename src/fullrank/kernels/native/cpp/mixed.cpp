// Attention with mixed heads on a CPU, blocks of query rows for all heads at once; the equations stand in ../../core/engine.py.
//
// What belongs to a block of W query rows lies with the rows innermost: scores and weights are [head][key][row]. So softmax,
// mixing and their gradients are operations on whole vectors of rows, keys and values are read as they lie, and nothing is
// transposed but W rows of queries. The backward pass makes the weights again from the logarithms of their sums.
#include <atomic>
#include <vector>

#include "gradients.h"
#include "linear.h"
#include "one_query.h"

namespace {

template <class T, int C> void run_forward(const Call& c) {
    int64_t room = 0;
    std::vector<Rows> all;
    for (int64_t text = 0; text < c.B; ++text)
        for (const Rows& r : blocks(c, text, C * VL<T>, room)) all.push_back(r);
    ++room;  // the weights of two heads lie no power of two apart, or they would share a few sets of the cache
    const int64_t count = (int64_t)all.size();
    const int64_t threads = std::min(c.threads, count);
    std::vector<Block<T, C>> workers;
    for (int64_t t = 0; t < threads; ++t) workers.emplace_back(c, room, false);
    std::atomic<int64_t> left(count);
#pragma omp parallel for num_threads((int)threads) schedule(static, 1)
    for (int64_t t = 0; t < threads; ++t)
        for (int64_t i; (i = --left) >= 0;) workers[t].forward(all[i]);  // the longest first
}

template <class T, int C> void run_backward(const Call& c) {
    int64_t room = 0;
    std::vector<std::vector<Rows>> texts;
    for (int64_t text = 0; text < c.B; ++text) texts.push_back(blocks(c, text, C * VL<T>, room));
    ++room;
    const int64_t per_text = TextSums<T>(c, 0, nullptr).count(), table = c.H * c.T * c.D, pairs_of = c.H * c.H;
    const int64_t of_convolution = c.H * c.convolved_queries * c.convolved_keys;
    const int64_t whole = c.B - c.B % c.threads;  // texts that one thread does alone
    const int64_t sharing = whole < c.B ? std::min<int64_t>(c.threads, texts[0].size()) : 0;  // threads, of each other text
    const int64_t threads = whole ? c.threads : sharing;
    // sums that several threads add to are kept apart and added in order, so that the same call gives the same bits
    std::vector<double> mixing(pairs_of * threads, 0), scoring(pairs_of * threads, 0), convolution(of_convolution * threads, 0);
    Buffer<T> of_table(table * threads), shared(per_text * std::max<int64_t>(sharing - 1, 0));
    std::vector<Gradients<T, C>> workers;
    for (int64_t t = 0; t < threads; ++t) workers.emplace_back(c, room);
    if (table) std::memset(of_table.get(), 0, table * threads * sizeof(T));
    // thread t adds a block of queries
    auto add = [&](int64_t t, const Rows& r, const TextSums<T>& sums) {
        workers[t].add(r, sums, of_table + t * table, &mixing[t * pairs_of], &scoring[t * pairs_of],
                       convolution.data() + t * of_convolution);
    };
#pragma omp parallel for num_threads((int)threads) schedule(static, 1) if (whole)
    for (int64_t t = 0; t < threads; ++t)
        for (int64_t text = t; text < whole; text += threads) {
            const TextSums<T> sums(c, text, nullptr);
            sums.clear();
            for (const Rows& r : texts[text]) add(t, r, sums);
        }
    for (int64_t text = whole; text < c.B; ++text) {  // those that all threads share: the first adds to the result, others apart
        const int64_t count = (int64_t)texts[text].size();
#pragma omp parallel for num_threads((int)sharing) schedule(static, 1)
        for (int64_t t = 0; t < sharing; ++t) {
            const TextSums<T> sums(c, text, t ? shared + (t - 1) * per_text : nullptr);
            sums.clear();
            // to and fro, since a later block sees more keys
            for (int64_t round = 0; round * sharing < count; ++round) {
                const int64_t i = round * sharing + (round % 2 ? sharing - 1 - t : t);
                if (i < count) add(t, texts[text][i], sums);
            }
        }
        for (int64_t t = 1; t < sharing; ++t) {
            const TextSums<T> all(c, text, nullptr), apart(c, text, shared + (t - 1) * per_text);
            for (int part = 0; part < TextSums<T>::PARTS; ++part) {
#pragma omp parallel for num_threads((int)sharing) schedule(static)
                for (int64_t i = 0; i < all.sizes[part]; ++i) all.parts[part][i] += apart.parts[part][i];
            }
        }
    }
    for (int64_t i = 0; i < table; ++i) {
        T sum = 0;
        for (int64_t t = 0; t < threads; ++t) sum += of_table[t * table + i];
        ((T*)c.d_table)[i] = sum;
    }
    auto add_up = [&](const std::vector<double>& sums, int64_t count, void* to) {
        for (int64_t i = 0; i < count; ++i) {
            double sum = 0;
            for (int64_t t = 0; t < threads; ++t) sum += sums[t * count + i];
            ((T*)to)[i] = (T)sum;
        }
    };
    if (c.mixing_kind == 1) add_up(mixing, pairs_of, c.d_mixing);
    if (c.scoring_kind == 1) add_up(scoring, pairs_of, c.d_scoring);
    if (c.convolution) add_up(convolution, of_convolution, c.d_convolution);
}

template <class T, int C> void run(const Call& c, bool backward) {
    MemoryPool::of_thread().most_bytes = c.threads > 1 ? 32 << 20 : 0;
    if (backward)
        run_backward<T, C>(c);
    else
        run_forward<T, C>(c);
}

// vectors of rows in a block: 32 rows of floats, as far as registers go
constexpr int WIDE = VECTOR_BYTES == 64 ? 2 : 4;

template <class T> void run(const Call& c, bool backward) {
    if (c.narrow)
        run<T, 1>(c, backward);
    else
        run<T, WIDE>(c, backward);
}
}  // namespace

// 0, or 1 where there is not enough memory; all of it is taken before threads begin
extern "C" int fullrank_mixed(const Call* call, int is_double, int backward) try {
    if (is_double)
        run<double>(*call, backward);
    else
        run<float>(*call, backward);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// x (rows, width) and weight (size, width) to out (rows, size); rows from 1 to 8
extern "C" void fullrank_linear(const void* x, const void* weight, const void* bias, void* out, int64_t rows, int64_t width,
                                int64_t size, int64_t threads, int is_double) {
    if (is_double)
        Linear<double>{(const double*)x, (const double*)weight, (const double*)bias, (double*)out, width, size}.run(rows, threads);
    else
        Linear<float>{(const float*)x, (const float*)weight, (const float*)bias, (float*)out, width, size}.run(rows, threads);
}

// query and out (texts, heads, width), keys and values (texts, heads, room, width); 1 where there is not enough memory
extern "C" int fullrank_one_query(const void* query, const void* keys, const void* values, const void* mixing, void* out,
                                  int64_t texts, int64_t heads, int64_t length, int64_t width, int64_t room, int64_t threads,
                                  int64_t of_each_text, int64_t is_double, double scale) try {
    auto attend = [&](auto zero) {
        using T = decltype(zero);
        OneQuery<T>{(const T*)query, (const T*)keys, (const T*)values, (const T*)mixing, (T*)out, texts, heads, length, width,
                    room, of_each_text != 0, (T)scale}.run(threads);
    };
    is_double ? attend(0.0) : attend(0.0f);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

extern "C" void fullrank_transpose(const float* from, int64_t apart, float* to, int64_t rows, int64_t columns, int64_t threads) {
    transpose(from, apart, to, rows, columns, threads);
}
