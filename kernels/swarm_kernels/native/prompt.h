// Dense causal attention of many new tokens a sequence over its pages, in bf16 by the matrix unit (AMX): what prefill needs.
// Everything is computed transposed, scores (key, query) and sums (dimension, query), so that a vector holds sixteen queries and the softmax
// is arithmetic between vectors; keys are then the unit's first operand as they lie in their pages.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "matrix.h"

struct PromptArguments {  // mirrored by native/arguments.py
    const void* query;      // (tokens, query heads, head size)
    const void* keys;
    const void* values;
    const int32_t* bounds;  // (chunks + 1): the tokens of each chunk
    const int32_t* starts;  // (chunks): tokens of the sequence before them
    const int32_t* table;   // (chunks, pages)
    void* out;              // as query
    int64_t query_token, query_head, page_stride, head_stride, table_sequence, out_token, out_head;
    int32_t chunks, kv_heads, group, head_size, page_size, window, threads;
    float scale;
};

namespace prompt {

#if defined(MATRIX_UNIT)
constexpr int TILE = 16;
constexpr int QUERIES = 64;  // tokens of one task: what its values cost to transpose is shared by these
constexpr int KEYS = 128;    // whose softmax is done together
constexpr int DEPTH = 32;    // bf16 numbers in a row of a tile
constexpr int TILES = 16 * QUERIES / TILE;  // of queries in a task: sixteen heads at most share a KV head
constexpr float LOG2E = 1.4426950408889634f;

// Tile registers: 0 to 3 totals, 4 the second operand (queries, then probabilities), 5 and 6 the first (keys, then values).

template <int D>
struct Scratch {
    alignas(64) bfloat values[KEYS / DEPTH][D][DEPTH];          // transposed: (keys, dimension, key), see transpose_values
    alignas(64) bfloat query[TILES][D / DEPTH][TILE][DEPTH];    // (tile of queries, depth, pair, query, 2)
    alignas(64) float sums[TILES][D][TILE];                     // sum of probability times value, and
    alignas(64) float top[TILES][TILE], mass[TILES][TILE];      // running maximum (log2) and sum of 2^(score - maximum)
    alignas(64) float scores[KEYS][TILE];
    alignas(64) bfloat weights[KEYS / DEPTH][TILE][DEPTH];      // (keys, pair, query, 2): key i and key i + 16 are a pair
    const bfloat* keys[KEYS / TILE];
};

struct Span {  // the queries of a task: tokens [first, first + count) of a chunk, whose first token stands at `position` of the sequence
    int chunk, head, row, count, position;
};

// 2^x for x <= 0, as exact as bf16 can tell; 0 where x is far below.
INLINE __m512 exp2_roughly(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(9.618129e-3f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550411e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ), y, whole);
}

// Sixteen tokens' queries of one head, pairs of dimensions interleaved; past the last token, that one again.
template <int D>
void pack_query(const PromptArguments& a, const Span& span, Scratch<D>& s) {
    const int tiles = (span.count + TILE - 1) / TILE;
    for (int g = 0; g < a.group; ++g)
        for (int tile = 0; tile < tiles; ++tile)
            for (int depth = 0; depth < D / DEPTH; ++depth) {
                __m512i words[TILE];
                for (int i = 0; i < TILE; ++i) {
                    const int64_t token = span.row + std::min(tile * TILE + i, span.count - 1);
                    const bfloat* row = static_cast<const bfloat*>(a.query) + token * a.query_token + (span.head * a.group + g) * a.query_head;
                    words[i] = _mm512_loadu_si512(row + depth * DEPTH);
                }
                matrix::transpose(words);
                for (int pair = 0; pair < TILE; ++pair) _mm512_store_si512(s.query[g * tiles + tile][depth][pair], words[pair]);
            }
}

// Values of 32 keys, transposed; in a row, key i and key i + 16 are neighbours. Keys that are no keys, null or from `limit` on, become 0.
template <int D>
INLINE void transpose_values(const bfloat* low, const bfloat* high, int limit, bfloat (*to)[DEPTH]) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (int depth = 0; depth < D; depth += DEPTH) {
        __m512i a[TILE], b[TILE];
        for (int key = 0; key < TILE; ++key) {
            a[key] = key < limit ? _mm512_loadu_si512(low + key * D + depth) : _mm512_setzero_si512();
            b[key] = key + TILE < limit ? _mm512_loadu_si512(high + key * D + depth) : _mm512_setzero_si512();
        }
        matrix::transpose(a);
        matrix::transpose(b);
        for (int pair = 0; pair < TILE; ++pair) {
            _mm512_store_si512(to[depth + 2 * pair], _mm512_or_si512(_mm512_andnot_si512(upper, a[pair]), _mm512_slli_epi32(b[pair], 16)));
            _mm512_store_si512(to[depth + 2 * pair + 1], _mm512_or_si512(_mm512_srli_epi32(a[pair], 16), _mm512_and_si512(upper, b[pair])));
        }
    }
}

// scores (64 keys, query) = keys . query
template <int D>
INLINE void score(const bfloat* const* keys, const bfloat (*query)[TILE][DEPTH], float* scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler that they read memory
    for (int depth = 0; depth < D / DEPTH; ++depth) {
        _tile_loadd(4, query[depth], 64);
        _tile_loadd(5, keys[0] + depth * DEPTH, 2 * D);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, keys[1] + depth * DEPTH, 2 * D);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(5, keys[2] + depth * DEPTH, 2 * D);
        _tile_dpbf16ps(2, 5, 4);
        _tile_loadd(6, keys[3] + depth * DEPTH, 2 * D);
        _tile_dpbf16ps(3, 6, 4);
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + TILE * TILE, 64);
    _tile_stored(2, scores + 2 * TILE * TILE, 64);
    _tile_stored(3, scores + 3 * TILE * TILE, 64);
    asm volatile("" ::: "memory");
}

// sums (up to 64 dimensions, query) += values (dimension, key) . weights (key, query)
template <int TILES>
INLINE void add_values(const bfloat* values, int64_t step, const bfloat* weights, int steps, float* sums) {
    asm volatile("" ::: "memory");
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + TILE * TILE, 64);
    if constexpr (TILES > 2) _tile_loadd(2, sums + 2 * TILE * TILE, 64);
    if constexpr (TILES > 2) _tile_loadd(3, sums + 3 * TILE * TILE, 64);
    for (int i = 0; i < steps; ++i, values += step, weights += TILE * DEPTH) {
        _tile_loadd(4, weights, 64);
        _tile_loadd(5, values, 64);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, values + TILE * DEPTH, 64);
        _tile_dpbf16ps(1, 6, 4);
        if constexpr (TILES > 2) {
            _tile_loadd(5, values + 2 * TILE * DEPTH, 64);
            _tile_dpbf16ps(2, 5, 4);
            _tile_loadd(6, values + 3 * TILE * DEPTH, 64);
            _tile_dpbf16ps(3, 6, 4);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE * TILE, 64);
    if constexpr (TILES > 2) _tile_stored(2, sums + 2 * TILE * TILE, 64);
    if constexpr (TILES > 2) _tile_stored(3, sums + 3 * TILE * TILE, 64);
    asm volatile("" ::: "memory");
}

// One tile of queries against the keys [from, from + count) of the sequence; its first query stands at `position`.
template <int D>
void attend_keys(Scratch<D>& s, int tile, int from, int count, int position, int window, float scale) {
    const int steps = (count + DEPTH - 1) / DEPTH, rows = steps * DEPTH;
    for (int key = 0; key < rows; key += 4 * TILE) score<D>(s.keys + key / TILE, s.query[tile], s.scores[key]);
    const __m512 factor = _mm512_set1_ps(scale), nothing = _mm512_set1_ps(-INFINITY);
    const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(position), (__m512i)lane_numbers());
    const bool whole = from + rows - 1 <= position && (window == 0 || from > position + TILE - 1 - window);
    __m512 top = _mm512_load_ps(s.top[tile]);
    const __m512 before = top;
    for (int key = 0; key < rows; ++key) {
        __m512 score = _mm512_mul_ps(_mm512_load_ps(s.scores[key]), factor);
        if (!whole) {
            const __m512i here = _mm512_set1_epi32(from + key);
            __mmask16 seen = _mm512_cmple_epi32_mask(here, at);
            if (window) seen &= _mm512_cmpgt_epi32_mask(here, _mm512_sub_epi32(at, _mm512_set1_epi32(window)));
            if (key >= count) seen = 0;  // of the last query's copies
            score = _mm512_mask_blend_ps(seen, nothing, score);
        }
        _mm512_store_ps(s.scores[key], score);
        top = _mm512_max_ps(top, score);
    }
    // A query that has seen nothing yet is measured against 0.
    const __m512 anchor = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(top, nothing, _CMP_EQ_OQ), top, _mm512_setzero_ps());
    const __m512 fade = exp2_roughly(_mm512_sub_ps(before, anchor));
    __m512 mass = _mm512_mul_ps(_mm512_load_ps(s.mass[tile]), fade);
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                                 18, 2, 17, 1, 16, 0);
    for (int step = 0; step < steps; ++step)
        for (int pair = 0; pair < TILE; ++pair) {
            const __m512 low = exp2_roughly(_mm512_sub_ps(_mm512_load_ps(s.scores[step * DEPTH + pair]), anchor));
            const __m512 high = exp2_roughly(_mm512_sub_ps(_mm512_load_ps(s.scores[step * DEPTH + pair + TILE]), anchor));
            mass = _mm512_add_ps(mass, _mm512_add_ps(low, high));
            _mm512_store_si512(s.weights[step][pair], _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
        }
    _mm512_store_ps(s.top[tile], top);
    _mm512_store_ps(s.mass[tile], mass);
    float* sums = s.sums[tile][0];
    for (int d = 0; d < D; ++d) _mm512_store_ps(sums + d * TILE, _mm512_mul_ps(_mm512_load_ps(sums + d * TILE), fade));
    const bfloat *values = s.values[0][0], *weights = s.weights[0][0];
    constexpr int64_t STEP = D * DEPTH;
    int d = 0;
    for (; d + 64 <= D; d += 64) add_values<4>(values + d * DEPTH, STEP, weights, steps, sums + d * TILE);
    if (d < D) add_values<2>(values + d * DEPTH, STEP, weights, steps, sums + d * TILE);
}

template <int D>
void write(const PromptArguments& a, const Span& span, const Scratch<D>& s) {
    const int tiles = (span.count + TILE - 1) / TILE;
    for (int g = 0; g < a.group; ++g)
        for (int tile = 0; tile < tiles; ++tile) {
            const int number = g * tiles + tile;
            const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(s.mass[number]));
            for (int d = 0; d < D; d += DEPTH) {
                __m512i low[TILE], high[TILE];
                for (int i = 0; i < TILE; ++i) {
                    low[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(s.sums[number][d + i]), share);
                    high[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(s.sums[number][d + TILE + i]), share);
                }
                matrix::transpose(low);
                matrix::transpose(high);
                for (int i = 0; i < std::min(TILE, span.count - tile * TILE); ++i) {
                    bfloat* row = static_cast<bfloat*>(a.out) + (span.row + tile * TILE + i) * a.out_token + (span.head * a.group + g) * a.out_head;
                    _mm512_storeu_si512(row + d, (__m512i)_mm512_cvtne2ps_pbh((__m512)high[i], (__m512)low[i]));
                }
            }
        }
}

template <int D>
void attend(const PromptArguments& a, const Span& span, Scratch<D>& s) {
    const int tiles = (span.count + TILE - 1) / TILE, length = span.position + span.count;
    const int first = a.window > 0 ? std::max(0, span.position - a.window + 1) / TILE * TILE : 0;
    const int32_t* row = a.table + span.chunk * a.table_sequence;
    const auto locate = [&](int token) { return row[token / a.page_size] * a.page_stride + span.head * a.head_stride + token % a.page_size * D; };
    pack_query(a, span, s);
    for (int tile = 0; tile < a.group * tiles; ++tile) {
        std::fill(s.top[tile], s.top[tile] + TILE, -INFINITY);
        std::fill(s.mass[tile], s.mass[tile] + TILE, 0.0f);
        std::fill(s.sums[tile][0], s.sums[tile][0] + D * TILE, 0.0f);
    }
    for (int from = first; from < length; from += KEYS) {
        const int count = std::min(KEYS, length - from);
        for (int key = 0; key < KEYS; key += TILE) {  // where there are no keys, those of the first tile stand in
            const int64_t at = locate(key < count ? from + key : from);
            s.keys[key / TILE] = static_cast<const bfloat*>(a.keys) + at;
        }
        for (int key = 0; key < count; key += DEPTH) {
            const bfloat* values = static_cast<const bfloat*>(a.values);
            transpose_values<D>(values + locate(from + key), key + TILE < count ? values + locate(from + key + TILE) : nullptr, count - key,
                                s.values[key / DEPTH]);
        }
        for (int tile = 0; tile < tiles; ++tile) {
            const int position = span.position + tile * TILE;
            const int seen = std::min(count, span.position + std::min((tile + 1) * TILE, span.count) - from);  // by its last query
            if (seen <= 0 || (a.window > 0 && from + count - 1 <= position - a.window)) continue;
            for (int g = 0; g < a.group; ++g) attend_keys<D>(s, g * tiles + tile, from, seen, position, a.window, a.scale * LOG2E);
        }
    }
    write(a, span, s);
}

template <int D>
void attend(const PromptArguments& a) {
    std::vector<Span> spans;
    for (int chunk = 0; chunk < a.chunks; ++chunk)
        for (int row = a.bounds[chunk]; row < a.bounds[chunk + 1]; row += QUERIES)
            for (int head = 0; head < a.kv_heads; ++head)
                spans.push_back({chunk, head, row, std::min(QUERIES, a.bounds[chunk + 1] - row), a.starts[chunk] + row - a.bounds[chunk]});
    const std::unique_ptr<Scratch<D>> scratch(new Scratch<D>);
    matrix::configure<5, 6>(TILE);
    // Late tokens see most: the longest spans first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
    for (int i = static_cast<int>(spans.size()) - 1; i >= 0; --i) attend<D>(a, spans[i], *scratch);
    matrix::release();
}

// Called by every thread of a team.
inline void run(const PromptArguments& a) {
    switch (a.head_size) {
        case 32: return attend<32>(a);
        case 64: return attend<64>(a);
        case 96: return attend<96>(a);
        case 128: return attend<128>(a);
    }
}
#else
inline void run(const PromptArguments&) {}
#endif

}  // namespace prompt
