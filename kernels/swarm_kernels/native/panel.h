// y = x W^T + bias in bf16 by the matrix unit (AMX) for many rows, as of a prompt: there the rows are the unit's first operand as they lie, and
// the weights are packed, panel by panel. The sums are those of linear.h to the bit: both add the products of a row in the order of its inputs.
#pragma once

#include <memory>

#include "linear.h"

namespace panel {

#if defined(MATRIX_UNIT)
using linear::BLOCK, linear::DEPTH, linear::TILE;
struct alignas(64) Line {
    bfloat numbers[BLOCK];
};
constexpr int64_t PANEL = 1 << 19;  // bytes of packed weights that stay in a core's cache while rows pass by

// Tile registers: 0 to 3 the totals (first and second sixteen rows by first and second sixteen outputs), 4 and 5 rows, 6 and 7 weights.

inline int blocks_of(int inputs) { return static_cast<int>(std::max<int64_t>(1, PANEL / (2 * BLOCK * static_cast<int64_t>(inputs)))); }

// Weights of `count` blocks of outputs, pairs of inputs interleaved: (block, depth, two tiles of (pair, output, 2)).
inline void pack(const bfloat* weight, int inputs, int count, bfloat* to) {
    for (int tile = 0; tile < 2 * count; ++tile)
        for (int depth = 0; depth < inputs; depth += DEPTH) {
            __m512i words[TILE];
            for (int row = 0; row < TILE; ++row) words[row] = _mm512_loadu_si512(weight + static_cast<int64_t>(tile * TILE + row) * inputs + depth);
            matrix::transpose(words);
            bfloat* into = to + (static_cast<int64_t>(tile / 2) * inputs + depth) * BLOCK + tile % 2 * TILE * DEPTH;
            for (int pair = 0; pair < TILE; ++pair) _mm512_store_si512(into + pair * DEPTH, words[pair]);
        }
}

// totals (2, row, output) of two tiles side by side -> sixteen rows of out.
inline void write(const float (*totals)[TILE * TILE], Vec low, Vec high, bfloat* out, int64_t outputs) {
    for (int row = 0; row < TILE; ++row) {
        const Vec a = load(totals[0] + row * TILE) + low, b = load(totals[1] + row * TILE) + high;
        _mm512_storeu_si512(out + row * outputs, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
    }
}

// One block of outputs of 32 rows; x and out begin at the first of them.
inline void multiply(const Product& product, int output, const bfloat* packed, const bfloat* x, int inputs, bfloat* out) {
    alignas(64) float totals[4][TILE * TILE];
    const int64_t row_bytes = 2 * static_cast<int64_t>(inputs);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler that they read memory
    for (int depth = 0; depth < inputs; depth += DEPTH, packed += BLOCK * DEPTH) {
        _tile_loadd(4, x + depth, row_bytes);
        _tile_loadd(6, packed, 2 * DEPTH);
        _tile_loadd(7, packed + TILE * DEPTH, 2 * DEPTH);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + TILE * static_cast<int64_t>(inputs) + depth, row_bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, totals[0], 64);
    _tile_stored(1, totals[1], 64);
    _tile_stored(2, totals[2], 64);
    _tile_stored(3, totals[3], 64);
    asm volatile("" ::: "memory");
    const bfloat* bias = static_cast<const bfloat*>(product.bias);
    const Vec low = bias ? widen(bias + output) : Vec{}, high = bias ? widen(bias + output + TILE) : Vec{};
    write(totals, low, high, out + output, product.outputs);
    write(totals + 2, low, high, out + static_cast<int64_t>(TILE) * product.outputs + output, product.outputs);
}

// Called by every thread of a team, which does not wait for the others at the end. At least 32 rows.
inline void run(const LinearArguments& a, int threads) {
    const Product& product = a.product;
    const int blocks = product.outputs / BLOCK;
    // As many panels for each thread, of as nearly the same width as can be.
    const int needed = std::max(1, (blocks + blocks_of(a.inputs) - 1) / blocks_of(a.inputs)), wanted = (needed + threads - 1) / threads * threads;
    const int width = (blocks + wanted - 1) / wanted, panels = (blocks + width - 1) / width;
    // Where there are fewer panels than threads, the rows are shared out too; each share has 32 at least.
    const int shares = std::max(1, std::min((threads + panels - 1) / panels, a.rows / (2 * BLOCK)));
    const std::unique_ptr<Line[]> packed(new Line[static_cast<int64_t>(width) * a.inputs]);
    matrix::configure<4, 5>(TILE);
#pragma omp for schedule(static) nowait
    for (int task = 0; task < panels * shares; ++task) {
        const int first = task / shares * width, count = std::min(width, blocks - first), share = task % shares;
        const int begin = static_cast<int>(static_cast<int64_t>(a.rows) * share / shares);
        const int end = static_cast<int>(static_cast<int64_t>(a.rows) * (share + 1) / shares);
        pack(static_cast<const bfloat*>(product.weight) + static_cast<int64_t>(first) * BLOCK * a.inputs, a.inputs, count, packed[0].numbers);
        for (int next = begin; next < end; next += BLOCK) {
            const int64_t row = std::min(next, end - BLOCK);  // the last rows of a share may be computed twice
            const bfloat* x = static_cast<const bfloat*>(a.input) + row * a.inputs;
            bfloat* out = static_cast<bfloat*>(product.out) + row * product.outputs;
            for (int block = 0; block < count; ++block)
                multiply(product, (first + block) * BLOCK, packed[static_cast<int64_t>(block) * a.inputs].numbers, x, a.inputs, out);
        }
    }
    matrix::release();
}
#else
inline void run(const LinearArguments&, int) {}
#endif

}  // namespace panel
