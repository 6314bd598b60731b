// Decode attention over pages: one query token a sequence, online softmax in float32, work cut by (KV head, split, sequence).
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "append.h"
#include "matrix.h"
#include "vectors.h"

struct AttendArguments {  // mirrored by native/arguments.py
    const void* query;
    const void* keys;
    const void* values;
    const int32_t* table;
    const int32_t* lengths;
    const int32_t* pages;  // null: every page
    void* out;
    float* lse;
    float* partial;  // (sequence, KV head, split, group, head size + 2); unused when splits is 1
    int64_t query_sequence, query_head, page_stride, head_stride, table_sequence, pages_sequence, pages_head, out_sequence, out_head;
    int32_t dtype, batch, kv_heads, group, head_size, page_size, list_width, window, splits, threads;
    float scale;
};

namespace attention {

constexpr int MAX_GROUP = 16;
constexpr int MAX_HEAD = 128;
constexpr int BLOCK = 4;             // tiles of sixteen tokens whose softmax is done together
constexpr int MIN_SPLIT_PAGES = 16;  // a split smaller than this costs more to merge than to read
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

template <typename T>
struct Tile {  // sixteen neighbouring tokens of one page; those in [low, high) count
    const T* keys;
    const T* values;
    int low, high;
};

template <typename T>
struct Block {
    const Tile<T>* tiles;
    int count;            // at most BLOCK
    const Tile<T>* next;  // the block after this one, perhaps of another task
    int ahead;            // its size
};

template <typename T>
struct Rows {  // what one (sequence, KV head) carries through its tiles
    int group;
    float scale;                              // of the scores, in units of log2
    const T* raw[MAX_GROUP];                  // the query rows as they came
    float query[MAX_GROUP][MAX_HEAD];         // widened, in the order of load_pair
    float sums[MAX_GROUP][MAX_HEAD];          // running sum of probability times value, same order
    float top[MAX_GROUP], mass[MAX_GROUP];    // running maximum (log2) and sum of 2^(score - maximum)
    float weights[MAX_GROUP][BLOCK * LANES];  // scores, then probabilities, of the current block
    float fade[MAX_GROUP];
};

template <typename T>
struct Task {  // one split of one (sequence, KV head)
    int number;
    bool ends_sequence;  // whether the last page is in it
    std::vector<Tile<T>> tiles;
};

// Asks for one token's row of a tile that comes next. Called between the arithmetic of the tile at hand, a row at a time: pages
// lie anywhere, so the hardware does not foresee them, and a burst of prefetches would fill the line buffers and stall.
template <typename T, int D>
INLINE void prefetch_row(const T* row) {
    for (unsigned i = 0; i < D * sizeof(T); i += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + i);
}

// Dot products of sixteen keys with one query row; with AHEAD, the keys at `ahead` are prefetched meanwhile.
template <typename T, int D, bool AHEAD>
INLINE Vec tile_scores(const T* keys, const float* query, const T*, const T* ahead) {
    return transpose_sum([&](int token) __attribute__((always_inline)) {
        if constexpr (AHEAD) prefetch_row<T, D>(ahead + token * D);
        Vec total = Vec{};
        for (int d = 0; d < D; d += 2 * LANES) {
            Vec a, b;
            load_pair(keys + token * D + d, a, b);
            total += a * load(query + d);
            total += b * load(query + d + LANES);
        }
        return total;
    });
}

#if defined(BF16_DOT)
template <typename T, int D, bool AHEAD>
INLINE Vec tile_scores(const bfloat* keys, const float*, const bfloat* raw, const bfloat* ahead) {
    __m512bh query[D / 32];
    for (int i = 0; i < D / 32; ++i) query[i] = (__m512bh)_mm512_loadu_si512(raw + 32 * i);
    return transpose_sum([&](int token) __attribute__((always_inline)) {
        if constexpr (AHEAD) prefetch_row<T, D>(ahead + token * D);
        __m512 total = _mm512_setzero_ps();
        for (int i = 0; i < D / 32; ++i) total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_loadu_si512(keys + token * D + 32 * i), query[i]);
        return (Vec)total;
    });
}
#endif

// sums[r..r+GROUP) += weights * values over COLUMNS pairs of sixteen columns, held in registers over the whole block
template <typename T, int D, int GROUP, int COLUMNS>
INLINE void add_values(Rows<T>& rows, int r, int column, Block<T> block) {
    const Tile<T>* tiles = block.tiles;
    Vec total[GROUP][COLUMNS][2];
    for (int g = 0; g < GROUP; ++g)
        for (int c = 0; c < COLUMNS; ++c)
            for (int k = 0; k < 2; ++k) total[g][c][k] = load(&rows.sums[r + g][column + 32 * c + LANES * k]) * rows.fade[r + g];
    for (int t = 0; t < block.count; ++t) {
        const bool ask = t < block.ahead && r == 0 && column == 0;
        const float* weights = &rows.weights[r][t * LANES];
        for (int token = tiles[t].low; token < tiles[t].high; ++token) {  // masked tokens are never read: they may hold NaN
            if (ask) prefetch_row<T, D>(block.next[t].values + token * D);
            Vec values[COLUMNS][2];
            for (int c = 0; c < COLUMNS; ++c) load_pair(tiles[t].values + token * D + column + 32 * c, values[c][0], values[c][1]);
            for (int g = 0; g < GROUP; ++g)
                for (int c = 0; c < COLUMNS; ++c)
                    for (int k = 0; k < 2; ++k) total[g][c][k] += values[c][k] * weights[g * BLOCK * LANES + token];
        }
    }
    for (int g = 0; g < GROUP; ++g)
        for (int c = 0; c < COLUMNS; ++c)
            for (int k = 0; k < 2; ++k) store(&rows.sums[r + g][column + 32 * c + LANES * k], total[g][c][k]);
}

template <typename T, int D, int GROUP>
INLINE void add_value_columns(Rows<T>& rows, int r, Block<T> block) {
    int column = 0;
    for (; column + 64 <= D; column += 64) add_values<T, D, GROUP, 2>(rows, r, column, block);
    if constexpr (D % 64) add_values<T, D, GROUP, 1>(rows, r, column, block);
}

template <typename T>
INLINE void put_scores(Rows<T>& rows, const Tile<T>& tile, int t, int g, Vec dots) {
    Vec scores = dots * rows.scale;
    if (tile.low > 0 || tile.high < LANES) {
        const IntVec lane = lane_numbers();
        scores = pick((lane >= tile.low) & (lane < tile.high), scores, splat(-INFINITY));
    }
    store(&rows.weights[g][t * LANES], scores);
}

template <typename T, int D>
INLINE void score_block(Rows<T>& rows, Block<T> block) {
    for (int t = 0; t < block.count; ++t)
        for (int g = 0; g < rows.group; ++g) {
            const T* keys = block.tiles[t].keys;
            const Vec dots = g == 0 && t < block.ahead ? tile_scores<T, D, true>(keys, rows.query[g], rows.raw[g], block.next[t].keys)
                                                       : tile_scores<T, D, false>(keys, rows.query[g], rows.raw[g], nullptr);
            put_scores(rows, block.tiles[t], t, g, dots);
        }
}

#if defined(MATRIX_UNIT)
template <int D>
INLINE void score_block_by_matrix(Rows<bfloat>& rows, Block<bfloat> block) {
    alignas(64) float dots[BLOCK][LANES * MAX_GROUP];
    for (int t = 0; t < block.count; ++t) {
        if (t < block.ahead)
            for (int token = 0; token < LANES; ++token) prefetch_row<bfloat, D>(block.next[t].keys + token * D);
        matrix::dot<D>(block.tiles[t].keys, dots[t], rows.group);
    }
    for (int t = 0; t < block.count; ++t)
        for (int g = 0; g < rows.group; ++g) put_scores(rows, block.tiles[t], t, g, matrix::column(dots[t], g, rows.group));
}
#endif

template <typename T, int D>
void attend_block(Rows<T>& rows, Block<T> block) {
    const Tile<T>* tiles = block.tiles;
    const int count = block.count;
    for (int t = count; t < block.ahead; ++t)  // those that have no tile of this block to be asked for beside
        for (int token = 0; token < LANES; ++token) {
            prefetch_row<T, D>(block.next[t].keys + token * D);
            prefetch_row<T, D>(block.next[t].values + token * D);
        }
#if defined(MATRIX_UNIT)
    if constexpr (std::is_same_v<T, bfloat>) {
        if (matrix::available())
            score_block_by_matrix<D>(rows, block);
        else
            score_block<T, D>(rows, block);
    } else
#endif
        score_block<T, D>(rows, block);
    for (int g = 0; g < rows.group; ++g) {
        Vec top = splat(rows.top[g]);
        for (int t = 0; t < count; ++t) top = maximum(top, load(&rows.weights[g][t * LANES]));
        const float highest = largest(top);
        Vec mass = Vec{};
        for (int t = 0; t < count; ++t) {
            const Vec p = exp2_nonpositive(load(&rows.weights[g][t * LANES]) - highest);
            store(&rows.weights[g][t * LANES], p);
            mass += p;
        }
        rows.fade[g] = rows.top[g] == highest ? 1.0f : std::exp2(rows.top[g] - highest);
        rows.top[g] = highest;
        rows.mass[g] = rows.mass[g] * rows.fade[g] + sum(mass);
    }
    int r = 0;
    for (; r + 4 <= rows.group; r += 4) add_value_columns<T, D, 4>(rows, r, block);
    if (rows.group - r == 3) add_value_columns<T, D, 3>(rows, r, block);
    if (rows.group - r == 2) add_value_columns<T, D, 2>(rows, r, block);
    if (rows.group - r == 1) add_value_columns<T, D, 1>(rows, r, block);
}

// The tiles of list entries [begin, end) that hold visible tokens; entries of -1 and pages past the end are skipped.
template <typename T, int D>
void list_tiles(const AttendArguments& a, int sequence, int head, int begin, int end, std::vector<Tile<T>>& list) {
    list.clear();
    const int length = a.lengths[sequence], first = a.window > 0 && length > a.window ? length - a.window : 0;
    const int32_t* chosen = a.pages ? a.pages + sequence * a.pages_sequence + head * a.pages_head : nullptr;
    for (int entry = begin; entry < end; ++entry) {
        const int64_t page = chosen ? chosen[entry] : entry;
        const int64_t start = page * a.page_size;
        if (page < 0 || start >= length || start + a.page_size <= first) continue;
        const int64_t offset = a.table[sequence * a.table_sequence + page] * a.page_stride + head * a.head_stride;
        for (int t = 0; t < a.page_size; t += LANES) {
            const int64_t low = first - start - t, high = length - start - t;
            if (high <= 0 || low >= LANES) continue;
            list.push_back({static_cast<const T*>(a.keys) + offset + t * D, static_cast<const T*>(a.values) + offset + t * D,
                             static_cast<int>(std::max<int64_t>(low, 0)), static_cast<int>(std::min<int64_t>(high, LANES))});
        }
    }
}

template <typename T, int D>
void write_row(const AttendArguments& a, int sequence, int query_head, const float* sums, float top, float mass) {
    T* out = static_cast<T*>(a.out) + sequence * a.out_sequence + query_head * a.out_head;
    const float share = mass > 0 ? 1.0f / mass : 0.0f;
    for (int d = 0; d < D; d += 32) store_pair(out + d, load(sums + d) * share, load(sums + d + LANES) * share);
    a.lse[static_cast<int64_t>(sequence) * a.kv_heads * a.group + query_head] = mass > 0 ? (top + std::log2(mass)) * LN2 : -INFINITY;
}

// Sequences innermost: those that share a prompt read its pages one after the other, from the cache of the core.
INLINE void place(const AttendArguments& a, int task, int& sequence, int& head, int& split) {
    sequence = task % a.batch;
    head = task / a.batch / a.splits;
    split = task / a.batch % a.splits;
}

// The next task that nobody has taken, with its tiles.
template <typename T, int D>
void take(const AttendArguments& a, int& taken, Task<T>& task) {
#pragma omp atomic capture
    task.number = taken++;
    task.tiles.clear();
    if (task.number >= a.batch * a.kv_heads * a.splits) return;
    int sequence, head, split;
    place(a, task.number, sequence, head, split);
    // How a list is cut depends on its own pages, not on the padding that the longest list of the batch gives it.
    int entries = a.pages ? a.list_width : (a.lengths[sequence] + a.page_size - 1) / a.page_size;
    if (a.pages) {
        const int32_t* list = a.pages + sequence * a.pages_sequence + head * a.pages_head;
        while (entries > 0 && list[entries - 1] < 0) --entries;
    }
    const int share = std::max((entries + a.splits - 1) / a.splits, MIN_SPLIT_PAGES);
    task.ends_sequence = entries > 0 && split == (entries - 1) / share;
    list_tiles<T, D>(a, sequence, head, split * share, std::min((split + 1) * share, entries), task.tiles);
}

// `next` are the tiles of the task that follows: pages lie anywhere, and a short task's own would come too late. The new token is written
// right before it is read: a first touch of memory that was left alone for a while is slow, least so where a stream of reads leads up to it.
template <typename T, int D>
void attend_split(const AttendArguments& a, const Task<T>& task, const std::vector<Tile<T>>& next, const AppendArguments* fresh, Rows<T>& rows) {
    int sequence, head, split;
    place(a, task.number, sequence, head, split);
    rows.group = a.group;
    rows.scale = a.scale * LOG2E;
    for (int g = 0; g < a.group; ++g) {
        rows.raw[g] = static_cast<const T*>(a.query) + sequence * a.query_sequence + (head * a.group + g) * a.query_head;
        for (int d = 0; d < D; d += 32) {
            Vec x, y;
            load_pair(rows.raw[g] + d, x, y);
            store_pair(&rows.query[g][d], x, y);
            store_pair(&rows.sums[g][d], Vec{}, Vec{});
        }
        rows.top[g] = -INFINITY;
        rows.mass[g] = 0;
    }
#if defined(MATRIX_UNIT)
    if constexpr (std::is_same_v<T, bfloat>)
        if (matrix::available()) matrix::load_query<D>(rows.raw, a.group);
#endif
    const int count = static_cast<int>(task.tiles.size());
    for (int t = 0; t < count; t += BLOCK) {
        const bool last = t + BLOCK >= count;
        if (last && task.ends_sequence && fresh) {
            append::write_token<T>(*fresh, sequence, head);
            append::write_centroid<T>(*fresh, sequence, head);
        }
        const int here = last ? count - t : BLOCK, left = last ? static_cast<int>(next.size()) : count - t - here;
        attend_block<T, D>(rows, {task.tiles.data() + t, here, last ? next.data() : task.tiles.data() + t + BLOCK, std::min(BLOCK, left)});
    }
    for (int g = 0; g < a.group; ++g) {
        if (a.splits == 1) {
            write_row<T, D>(a, sequence, head * a.group + g, rows.sums[g], rows.top[g], rows.mass[g]);
            continue;
        }
        float* to = a.partial + (((static_cast<int64_t>(sequence) * a.kv_heads + head) * a.splits + split) * a.group + g) * (D + 2);
        std::memcpy(to, rows.sums[g], D * sizeof(float));
        to[D] = rows.top[g];
        to[D + 1] = rows.mass[g];
    }
}

template <typename T, int D>
void merge_splits(const AttendArguments& a, int sequence, int head) {
    for (int g = 0; g < a.group; ++g) {
        const float* from = a.partial + ((static_cast<int64_t>(sequence) * a.kv_heads + head) * a.splits * a.group + g) * (D + 2);
        const int64_t step = static_cast<int64_t>(a.group) * (D + 2);
        float top = -INFINITY, mass = 0, sums[D] = {};
        for (int s = 0; s < a.splits; ++s) top = from[s * step + D] > top ? from[s * step + D] : top;
        for (int s = 0; s < a.splits; ++s) {
            const float* part = from + s * step;
            if (part[D + 1] == 0) continue;  // an empty split
            const float weight = std::exp2(part[D] - top);
            mass += part[D + 1] * weight;
            for (int d = 0; d < D; ++d) sums[d] += part[d] * weight;
        }
        write_row<T, D>(a, sequence, head * a.group + g, sums, top, mass);
    }
}

template <typename T, int D>
void attend(const AttendArguments& a, int& taken, const AppendArguments* fresh) {
    const int pairs = a.batch * a.kv_heads, tasks = pairs * a.splits;
    Rows<T> rows;
    Task<T> task, next;
#if defined(MATRIX_UNIT)
    if constexpr (std::is_same_v<T, bfloat>)
        if (matrix::available()) matrix::configure<1, 6>(matrix::columns(a.group));
#endif
    take<T, D>(a, taken, task);
    while (task.number < tasks) {
        take<T, D>(a, taken, next);
        attend_split<T, D>(a, task, next.tiles, fresh, rows);
        std::swap(task, next);
    }
#pragma omp barrier
    if (a.splits > 1) {
#pragma omp for schedule(static)
        for (int pair = 0; pair < pairs; ++pair) merge_splits<T, D>(a, pair / a.kv_heads, pair % a.kv_heads);
    }
#if defined(MATRIX_UNIT)
    if constexpr (std::is_same_v<T, bfloat>)
        if (matrix::available()) matrix::release();
#endif
}

// `taken` is the team's count of tasks that somebody works on: 0 at the start, and not used again. `fresh` are the last tokens of the
// sequences, if they are still to be written; lists must have their pages last.
template <typename T>
void attend(const AttendArguments& a, int& taken, const AppendArguments* fresh = nullptr) {
    switch (a.head_size) {
        case 32: return attend<T, 32>(a, taken, fresh);
        case 64: return attend<T, 64>(a, taken, fresh);
        case 96: return attend<T, 96>(a, taken, fresh);
        case 128: return attend<T, 128>(a, taken, fresh);
    }
}

}  // namespace attention
