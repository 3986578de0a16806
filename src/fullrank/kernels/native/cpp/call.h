// What is asked for, and the blocks that it is done in.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace {

struct Call {  // the fields of `_Call` in ../__init__.py, in their order
    int64_t B, H, N, M, D, T;  // texts, heads, queries, keys, numbers of a head (a multiple of the vector), distances (0: none)
    // numbers from one text, head and row to the next; d_out has out_steps
    int64_t query_steps[3], position_steps[3], out_steps[3], d_query_steps[3], d_position_steps[3];
    int64_t K;  // rows from the keys, and the values, of one head to those of the next: M, or more where they are part of a cache
    int64_t threads;
    int64_t narrow;       // blocks of one vector of rows, for few queries
    int64_t convolved_queries, convolved_keys;  // of the kernel
    int64_t mixing_kind, scoring_kind;  // of mixing and scoring; 0: none, 1: (H, H), 2: (B, N, H, H)
    int64_t packed;       // texts have documents, so that the first key of a query differs between them
    int64_t sigsoftmax;
    int64_t dropped;     // a weight is dropped where 32 random bits are below it
    int64_t first_text;  // of a larger batch, whose texts draw for dropout as if they were all here
    uint64_t seed;
    double scale, kept_scale;
    const void *query, *keys, *values;           // (B, H, N, D) in any order, (B, H, M of K, D) twice
    const void *mixing, *scoring;                // of weights and scores, or null
    const void *key_mixing, *key_scoring;        // what keys add to them, (B, M, H, H), or null
    const void* convolution;                     // of scores, (H, convolved queries, convolved keys), or null
    const void *position, *table;                // as the query, (H, T, D)
    const int32_t *first, *end, *own_key, *base; // (N,), first (B, N) if packed; (M,): table row of a pair is n + base[k]
    const uint8_t* tokens;                       // (B, M) or null
    void *out, *lse;                             // in any order, (B, H, N)
    const void* d_out;
    void *d_query, *d_keys, *d_values, *d_mixing, *d_scoring, *d_key_mixing, *d_key_scoring;
    void *d_convolution, *d_position, *d_table;

    bool scored_at_once() const { return T || convolution; }  // at all keys of a block
    bool mixes_scores() const { return scoring_kind || key_scoring; }

    // a row of (B, H, N, D) of any order
    template <class P> static P* row(P* p, const int64_t* steps, int64_t text, int64_t head, int64_t row) {
        return p + text * steps[0] + head * steps[1] + row * steps[2];
    }
    template <class T> const T* key(int64_t text, int64_t head, int64_t place) const {
        return (const T*)keys + ((text * H + head) * K + place) * D;
    }
    const int32_t* first_of(int64_t text) const { return first + (packed ? text * N : 0); }
};

struct Piece {  // of memory
    size_t bytes;
    void* data;
};

// The memory of calls, kept for the next: the system clears pages that were given back to it before it lends them again, and
// several threads wait for that longer than one.
class MemoryPool {
    static constexpr size_t MOST_PIECES = 128, PAGE = 4096;
    std::vector<Piece> pieces;  // that no buffer uses, the oldest first
    size_t bytes = 0;           // of all of them

    Piece remove(size_t index) {
        const Piece piece = pieces[index];
        pieces.erase(pieces.begin() + index);
        bytes -= piece.bytes;
        return piece;
    }
    void free_oldest() { ::operator delete(remove(0).data, std::align_val_t(64)); }

public:
    size_t most_bytes = 0;  // more are given back

    MemoryPool() { pieces.reserve(MOST_PIECES); }
    ~MemoryPool() {
        while (!pieces.empty()) free_oldest();
    }
    static MemoryPool& of_thread() {
        static thread_local MemoryPool pool;
        return pool;
    }
    Piece take(size_t needed) {
        needed = (needed + PAGE - 1) / PAGE * PAGE;
        for (size_t i = 0; i < pieces.size(); ++i)
            if (needed <= pieces[i].bytes && pieces[i].bytes <= 2 * needed) return remove(i);
        return {needed, ::operator new(needed, std::align_val_t(64))};
    }
    void give_back(Piece piece) noexcept {
        if (pieces.size() == MOST_PIECES) free_oldest();
        pieces.push_back(piece);
        bytes += piece.bytes;
        while (bytes > most_bytes) free_oldest();
    }
};

template <class T> class Buffer {
    Piece piece{0, nullptr};

public:
    explicit Buffer(int64_t count) {
        if (count) piece = MemoryPool::of_thread().take(count * sizeof(T));
    }
    Buffer(Buffer&& other) noexcept { std::swap(piece, other.piece); }
    Buffer(const Buffer&) = delete;
    ~Buffer() {
        if (piece.data) MemoryPool::of_thread().give_back(piece);
    }
    operator T*() const { return (T*)piece.data; }
    T* get() const { return (T*)piece.data; }
};

constexpr int TILE = 64;  // keys that are mixed at a time

struct Rows {  // a block of query rows of one text
    int64_t text, row, count, keys_from, keys_to, all_from, all_to;  // every row sees the keys all_from .. all_to - 1
};

// the blocks of W rows of one text; `room` becomes at least the most keys that one of them sees
inline std::vector<Rows> blocks(const Call& c, int64_t text, int64_t W, int64_t& room) {
    std::vector<Rows> found;
    const int32_t* first = c.first_of(text);
    for (int64_t row = 0; row < c.N; row += W) {
        Rows r{text, row, std::min(W, c.N - row), c.M, 0, 0, c.M};
        for (int64_t n = row; n < row + r.count; ++n) {
            r.keys_from = std::min<int64_t>(r.keys_from, first[n]);
            r.keys_to = std::max<int64_t>(r.keys_to, c.end[n]);
            r.all_from = std::max<int64_t>(r.all_from, first[n]);
            r.all_to = std::min<int64_t>(r.all_to, c.end[n]);
        }
        room = std::max(room, r.keys_to - r.keys_from);
        found.push_back(r);
    }
    return found;
}
}  // namespace
