// y = x W^T + bias for a few rows of bf16, by the matrix unit (AMX), over the weights as they lie: they are read once, from memory, and a
// decode step is little else. Transposed, Y^T = W X^T, the weight is the unit's first operand and only the rows x are packed for it.
#pragma once

#include "matrix.h"

struct LinearArguments {  // mirrored by native/arguments.py
    const void* input;    // (rows, inputs), contiguous
    const void* weight;   // (outputs, inputs), contiguous
    const void* bias;     // (outputs); null: none
    void* out;            // (rows, outputs), contiguous
    void* packed;         // room for rows, rounded up to 16, times inputs
    int32_t rows, inputs, outputs, threads;
};

namespace linear {

#if defined(MATRIX_UNIT)
constexpr int TILE = 16;   // rows of a tile
constexpr int DEPTH = 32;  // bf16 numbers in a row of a tile
constexpr int BLOCK = 32;  // outputs that are computed at once: two tiles of weights

// Tile registers: 0 to 3 the totals (first and second sixteen rows of x by first and second sixteen outputs), 4 and 5 weights, 6 and 7 x.

// Sixteen rows of x with pairs of inputs interleaved: for each DEPTH inputs (pair, row, 2).
inline void pack(const LinearArguments& a, int first, int columns, bfloat* to) {
    const bfloat* x = static_cast<const bfloat*>(a.input) + static_cast<int64_t>(first) * a.inputs;
    const int rows = a.rows - first < columns ? a.rows - first : columns;
    for (int depth = 0; depth < a.inputs; depth += 2)
        for (int row = 0; row < columns; ++row, to += 2) {
            if (row < rows)
                std::memcpy(to, x + static_cast<int64_t>(row) * a.inputs + depth, 2 * sizeof(bfloat));
            else
                std::memset(to, 0, 2 * sizeof(bfloat));
        }
}

// totals (output, row of x) of one tile -> out, with the bias.
inline void write(const LinearArguments& a, const float* totals, int output, int first, int columns) {
    const int rows = a.rows - first < columns ? a.rows - first : columns;
    const bfloat* bias = a.bias ? static_cast<const bfloat*>(a.bias) + output : nullptr;
    for (int row = 0; row < rows; ++row) {
        bfloat* out = static_cast<bfloat*>(a.out) + static_cast<int64_t>(first + row) * a.outputs + output;
        for (int i = 0; i < TILE; ++i) out[i] = from_float<bfloat>(totals[i * columns + row] + (bias ? to_float(bias[i]) : 0.0f));
    }
}

inline void multiply(const LinearArguments& a) {
    const int columns = a.rows < TILE ? a.rows : TILE, groups = (a.rows + TILE - 1) / TILE;
    bfloat* packed = static_cast<bfloat*>(a.packed);
    const int64_t group_size = static_cast<int64_t>(columns) * a.inputs;
    for (int group = 0; group < groups; ++group) pack(a, group * TILE, columns, packed + group * group_size);
    const int64_t row_bytes = 2 * static_cast<int64_t>(a.inputs);
#pragma omp parallel num_threads(a.threads)
    {
        matrix::configure<4, 5>(columns);
        alignas(64) float totals[4][TILE * TILE];
#pragma omp for schedule(static)
        for (int output = 0; output < a.outputs; output += BLOCK) {
            const bfloat* weight = static_cast<const bfloat*>(a.weight) + static_cast<int64_t>(output) * a.inputs;
            const char* ahead = reinterpret_cast<const char*>(weight) + BLOCK * row_bytes;
            for (int group = 0; group < groups; group += 2) {
                const bool pair = group + 1 < groups;
                const bfloat *x = packed + group * group_size, *y = x + group_size;
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler that they read memory
                for (int depth = 0; depth < a.inputs; depth += DEPTH) {
                    if (group == 0)  // the next block comes from memory while this one is computed
                        for (int line = 0; line < BLOCK; ++line) _mm_prefetch(ahead + depth * 2 * BLOCK + line * 64, _MM_HINT_T1);
                    _tile_loadd(4, weight + depth, row_bytes);
                    _tile_loadd(5, weight + TILE * static_cast<int64_t>(a.inputs) + depth, row_bytes);
                    _tile_loadd(6, x + static_cast<int64_t>(depth) * columns, 4 * columns);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 5, 6);
                    if (pair) {
                        _tile_loadd(7, y + static_cast<int64_t>(depth) * columns, 4 * columns);
                        _tile_dpbf16ps(2, 4, 7);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
                _tile_stored(0, totals[0], 4 * columns);
                _tile_stored(1, totals[1], 4 * columns);
                _tile_stored(2, totals[2], 4 * columns);
                _tile_stored(3, totals[3], 4 * columns);
                asm volatile("" ::: "memory");
                write(a, totals[0], output, group * TILE, columns);
                write(a, totals[1], output + TILE, group * TILE, columns);
                if (pair) {
                    write(a, totals[2], output, (group + 1) * TILE, columns);
                    write(a, totals[3], output + TILE, (group + 1) * TILE, columns);
                }
            }
        }
        matrix::release();
    }
}

inline bool available() { return matrix::available(); }
#else
inline void multiply(const LinearArguments&) {}
inline bool available() { return false; }
#endif

}  // namespace linear
