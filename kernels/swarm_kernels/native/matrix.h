// Scores by the matrix unit (AMX): sixteen keys times all query heads of a group in one instruction per 32 dimensions.
// Tile registers: 0 the totals, 1 and 6 keys, 2 to 5 the query, 32 dimensions each. (The compiler wants the numbers written out.)
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(BF16_DOT) && defined(__linux__)
#define MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>

namespace matrix {

// The operating system asks programs to request the unit's large registers before first use.
inline bool available() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return granted;
}

INLINE int columns(int group) { return group <= 4 ? 4 : group <= 8 ? 8 : 16; }

// Once a thread and call: other libraries configure the registers for themselves. Registers A and B hold 32 bf16 numbers a row, the first
// operand; all others `width` pairs or totals.
template <int A, int B>
void configure(int width) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {};
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) {
        shape.rows[i] = LANES;
        shape.bytes[i] = i == A || i == B ? 64 : static_cast<uint16_t>(4 * width);
    }
    _tile_loadconfig(&shape);
}

// One round of a transposition: where bit WIDTH tells a lane's number from its row's, the two rows trade places.
template <int WIDTH>
INLINE void trade(__m512i& upper, __m512i& lower) {
    constexpr __mmask16 bit = WIDTH == 1 ? 0xaaaa : WIDTH == 2 ? 0xcccc : WIDTH == 4 ? 0xf0f0 : 0xff00;
    constexpr __mmask16 rest = static_cast<__mmask16>(~bit);
    const __m512i a = upper, b = lower;
    if constexpr (WIDTH <= 2) {
        constexpr auto swap = static_cast<_MM_PERM_ENUM>(WIDTH == 1 ? 0xb1 : 0x4e);
        upper = _mm512_mask_shuffle_epi32(a, bit, b, swap);
        lower = _mm512_mask_shuffle_epi32(b, rest, a, swap);
    } else {
        constexpr int swap = WIDTH == 4 ? 0xb1 : 0x4e;
        upper = _mm512_mask_shuffle_i32x4(a, bit, b, b, swap);
        lower = _mm512_mask_shuffle_i32x4(b, rest, a, a, swap);
    }
}

// Sixteen rows of sixteen words.
INLINE void transpose(__m512i (&rows)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & 1)) trade<1>(rows[i], rows[i + 1]);
    for (int i = 0; i < LANES; ++i)
        if (!(i & 2)) trade<2>(rows[i], rows[i + 2]);
    for (int i = 0; i < LANES; ++i)
        if (!(i & 4)) trade<4>(rows[i], rows[i + 4]);
    for (int i = 0; i < LANES; ++i)
        if (!(i & 8)) trade<8>(rows[i], rows[i + 8]);
}

// Leaves the registers empty: full ones cost time whenever the thread is switched.
INLINE void release() { _tile_release(); }

// The unit wants its second operand with pairs of dimensions interleaved: (dimension / 2, head, 2).
template <int D>
void load_query(const bfloat* const* rows, int group) {
    const int width = columns(group);
    alignas(64) bfloat packed[D / 2 * LANES * 2] = {};
    for (int g = 0; g < group; ++g)
        for (int pair = 0; pair < D / 2; ++pair) std::memcpy(packed + (pair * width + g) * 2, rows[g] + 2 * pair, 2 * sizeof(bfloat));
    const int step = LANES * width * 2;
    asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler that they read memory
    _tile_loadd(2, packed, 4 * width);
    if constexpr (D > 32) _tile_loadd(3, packed + step, 4 * width);
    if constexpr (D > 64) _tile_loadd(4, packed + 2 * step, 4 * width);
    if constexpr (D > 96) _tile_loadd(5, packed + 3 * step, 4 * width);
}

// dots (token, columns(group)) = keys (token, D) . query
template <int D>
INLINE void dot(const bfloat* keys, float* dots, int group) {
    _tile_zero(0);
    _tile_loadd(1, keys, 2 * D);
    _tile_dpbf16ps(0, 1, 2);
    if constexpr (D > 32) {
        _tile_loadd(6, keys + 32, 2 * D);
        _tile_dpbf16ps(0, 6, 3);
    }
    if constexpr (D > 64) {
        _tile_loadd(1, keys + 64, 2 * D);
        _tile_dpbf16ps(0, 1, 4);
    }
    if constexpr (D > 96) {
        _tile_loadd(6, keys + 96, 2 * D);
        _tile_dpbf16ps(0, 6, 5);
    }
    _tile_stored(0, dots, 4 * columns(group));
}

// One head's column of `dots`.
INLINE Vec column(const float* dots, int head, int group) {
    const __m512i index = _mm512_mullo_epi32((__m512i)lane_numbers(), _mm512_set1_epi32(columns(group)));
    return (Vec)_mm512_i32gather_ps(index, dots + head, 4);
}

}  // namespace matrix
#endif
