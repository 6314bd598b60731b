// y = x W^T + bias in bf16 by the matrix unit (AMX), over the weights as they lie: few rows cost what reading the weights once costs, and a
// decode step is little else. Transposed, Y^T = W X^T, the weight is the unit's first operand and only the rows x are packed for it.
#pragma once

#include <algorithm>

#include "matrix.h"

struct Product {  // mirrored by native/arguments.py
    const void* weight;  // (outputs, inputs), contiguous
    const void* bias;    // (outputs); null: none
    void* out;           // (rows, outputs), contiguous
    const float* a;      // (rank, inputs): an adapter, see low_rank.h, which only `swarm_stack` looks at
    const float* b;      // (rank, outputs), scaled
    int32_t outputs, rank;  // 0: no adapter
};

struct LinearArguments {  // mirrored by native/arguments.py
    Product product;
    const void* input;  // (rows, inputs), contiguous
    void* packed;       // room for the rows, see native/fill.py; null: many rows, see panel.h
    int32_t rows, inputs, threads;
};

namespace linear {

#if defined(MATRIX_UNIT)
constexpr int TILE = 16;   // rows of a tile
constexpr int DEPTH = 32;  // bf16 numbers in a row of a tile
constexpr int BLOCK = 32;  // outputs that are computed at once: two tiles of weights
constexpr int64_t CACHED = 1 << 20;  // bytes of x that stay in a core's cache while all weights pass by

// Tile registers: 0 to 3 the totals (first and second sixteen rows of x by first and second sixteen outputs), 4 and 5 weights, 6 and 7 x.

// Rows of x, packed: groups of sixteen rows (of fewer, where there are no sixteen) with pairs of inputs interleaved, (pair, row, 2) each.
struct Packed {
    bfloat* data;
    int rows, inputs;
    int columns() const { return std::min(rows, TILE); }
    int groups() const { return (rows + TILE - 1) / TILE; }
    bfloat* group(int g) const { return data + static_cast<int64_t>(g) * columns() * inputs; }
};

// Called by every thread of a team, as all functions here that have an `omp for`.
inline void pack(const void* input, const Packed& x) {
    const int deep = x.inputs / DEPTH;
    const __mmask16 columns = static_cast<__mmask16>((1u << x.columns()) - 1);
#pragma omp for schedule(static)
    for (int piece = 0; piece < x.groups() * deep; ++piece) {
        const int group = piece / deep, depth = piece % deep * DEPTH;
        __m512i words[TILE];
        for (int row = 0; row < TILE; ++row) {
            const int64_t from = std::min(group * TILE + row, x.rows - 1);  // what stands in the rows past the last is never written out
            words[row] = _mm512_loadu_si512(static_cast<const bfloat*>(input) + from * x.inputs + depth);
        }
        matrix::transpose(words);
        bfloat* to = x.group(group) + static_cast<int64_t>(depth) * x.columns();
        for (int pair = 0; pair < TILE; ++pair) _mm512_mask_storeu_epi32(to + pair * 2 * x.columns(), columns, words[pair]);
    }
}

// totals (output, row of x) of one tile -> out, with the bias.
inline void write(const Product& product, const float* totals, int output, const Packed& x, int group) {
    const int columns = x.columns(), rows = std::min(columns, x.rows - group * TILE);
    const __mmask16 mask = static_cast<__mmask16>((1u << columns) - 1);
    __m512i words[TILE];
    for (int i = 0; i < TILE; ++i) words[i] = _mm512_maskz_loadu_epi32(mask, totals + i * columns);
    matrix::transpose(words);
    const Vec bias = product.bias ? widen(static_cast<const bfloat*>(product.bias) + output) : Vec{};
    bfloat* out = static_cast<bfloat*>(product.out) + static_cast<int64_t>(group) * TILE * product.outputs + output;
    for (int row = 0; row < rows; ++row) {
        const __m256bh narrowed = _mm512_cvtneps_pbh((__m512)((Vec)words[row] + bias));
        std::memcpy(out + static_cast<int64_t>(row) * product.outputs, &narrowed, sizeof(narrowed));
    }
}

// BLOCK outputs of the groups [first, last).
inline void multiply_block(const Product& product, int output, const Packed& x, int first, int last) {
    const bfloat* weight = static_cast<const bfloat*>(product.weight) + static_cast<int64_t>(output) * x.inputs;
    const int64_t row_bytes = 2 * static_cast<int64_t>(x.inputs), columns = x.columns();
    alignas(64) float totals[4][TILE * TILE];
    for (int group = first; group < last; group += 2) {
        const bool pair = group + 1 < last;
        const bfloat *x0 = x.group(group), *x1 = x.group(group + 1);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler that they read memory
        for (int64_t depth = 0; depth < x.inputs; depth += DEPTH) {
            _tile_loadd(4, weight + depth, row_bytes);
            _tile_loadd(5, weight + TILE * static_cast<int64_t>(x.inputs) + depth, row_bytes);
            _tile_loadd(6, x0 + depth * columns, 4 * columns);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (pair) {
                _tile_loadd(7, x1 + depth * columns, 4 * columns);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, totals[0], 4 * columns);
        _tile_stored(1, totals[1], 4 * columns);
        _tile_stored(2, totals[2], 4 * columns);
        _tile_stored(3, totals[3], 4 * columns);
        asm volatile("" ::: "memory");
        write(product, totals[0], output, x, group);
        write(product, totals[1], output + TILE, x, group);
        if (pair) {
            write(product, totals[2], output, x, group + 1);
            write(product, totals[3], output + TILE, x, group + 1);
        }
    }
}

// Several products of the same x, their outputs shared out among the team as if they were one.
template <int COUNT>
void multiply(const Packed& x, const Product (&products)[COUNT]) {
    int total = 0;
    for (const Product& product : products) total += product.outputs;
    const int groups = x.groups();
    const int step = static_cast<int>(std::max<int64_t>(2, CACHED / (2 * TILE * x.inputs) / 2 * 2));
    matrix::configure<4, 5>(x.columns());
    for (int first = 0; first < groups; first += step) {
#pragma omp for schedule(static) nowait
        for (int output = 0; output < total; output += BLOCK) {
            int which = 0, within = output;
            while (within >= products[which].outputs) within -= products[which++].outputs;
            multiply_block(products[which], within, x, first, std::min(first + step, groups));
        }
    }
    matrix::release();
#pragma omp barrier
}

inline void run(const LinearArguments& a) {
    const Packed x = {static_cast<bfloat*>(a.packed), a.rows, a.inputs};
    pack(a.input, x);
    multiply(x, {a.product});
}

inline bool available() { return matrix::available(); }
#else
inline void run(const LinearArguments&) {}
inline bool available() { return false; }
#endif

}  // namespace linear
