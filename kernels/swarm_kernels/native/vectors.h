// Sixteen floats at a time, by the compiler's vector extensions: one source for AVX-512, AVX2, SSE and NEON.
// Intrinsics appear only where the extensions cannot say it: bf16 dot products, rounding to bf16 in one instruction, and the lane shuffles of
// `transpose_sum`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define BF16_DOT 1
#endif

#define INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t WordVec __attribute__((vector_size(64)));
typedef uint16_t ShortVec __attribute__((vector_size(32)));
typedef float LooseVec __attribute__((vector_size(64), aligned(4)));

struct bfloat {
    uint16_t bits;
};
typedef _Float16 half;

enum Dtype : int32_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

constexpr int LANES = 16;

INLINE Vec splat(float x) { return Vec{} + x; }
INLINE Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
INLINE void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }
INLINE Vec pick(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }
INLINE Vec maximum(Vec a, Vec b) { return pick(a > b, a, b); }
INLINE IntVec lane_numbers() { return IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

INLINE float sum(Vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float parts[LANES];
    store(parts, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
    return parts[0];
#endif
}

INLINE float largest(Vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float parts[LANES], top = -INFINITY;
    store(parts, x);
    for (int i = 0; i < LANES; ++i) top = parts[i] > top ? parts[i] : top;
    return top;
#endif
}

// 2^x for x <= 0 to about 1 ulp; exactly 0 below 2^-126 and at minus infinity.
INLINE Vec exp2_nonpositive(Vec x) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer, held in the low bits
    const Vec clamped = maximum(x, splat(-126.0f));
    const Vec shifted = clamped + magic;
    const Vec f = clamped - (shifted - magic);
    Vec y = splat(1.540353039e-4f);
    y = y * f + splat(1.333355815e-3f);
    y = y * f + splat(9.618129108e-3f);
    y = y * f + splat(5.550410866e-2f);
    y = y * f + splat(2.402265070e-1f);
    y = y * f + splat(6.931471806e-1f);
    y = y * f + splat(1.0f);
    const IntVec exponent = (IntVec)shifted << 23;
    return pick(x < splat(-126.0f), Vec{}, (Vec)((IntVec)y + exponent));
}

// `load_pair` widens 32 elements into two vectors. bf16 comes out as (even elements, odd elements), because that takes one
// mask and one shift; the others in order. Sums over elements do not care, and `store_pair` undoes it.
INLINE void load_pair(const float* p, Vec& a, Vec& b) {
    a = load(p);
    b = load(p + LANES);
}
INLINE void store_pair(float* p, Vec a, Vec b) {
    store(p, a);
    store(p + LANES, b);
}

INLINE void load_pair(const bfloat* p, Vec& even, Vec& odd) {
    WordVec words;
    std::memcpy(&words, p, sizeof(words));
    even = (Vec)(words << 16);
    odd = (Vec)(words & 0xffff0000u);
}
#if defined(BF16_DOT)
INLINE void store_pair(bfloat* p, Vec even, Vec odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                                           17, 1, 16, 0);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even)));
}
#else
INLINE WordVec rounded_bits(Vec x) {  // round to nearest even in the upper half; a NaN stays one
    const WordVec bits = (WordVec)x;
    const WordVec up = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (WordVec)pick(x != x, (Vec)(bits | 0x00400000u), (Vec)up);
}
INLINE void store_pair(bfloat* p, Vec even, Vec odd) {
    const WordVec words = (rounded_bits(odd) & 0xffff0000u) | (rounded_bits(even) >> 16);
    std::memcpy(p, &words, sizeof(words));
}
#endif

INLINE Vec widen(const half* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    float parts[LANES];
    for (int i = 0; i < LANES; ++i) parts[i] = static_cast<float>(p[i]);
    return load(parts);
#endif
}
INLINE void narrow(half* p, Vec x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    float parts[LANES];
    store(parts, x);
    for (int i = 0; i < LANES; ++i) p[i] = static_cast<half>(parts[i]);
#endif
}
INLINE void load_pair(const half* p, Vec& a, Vec& b) {
    a = widen(p);
    b = widen(p + LANES);
}
INLINE void store_pair(half* p, Vec a, Vec b) {
    narrow(p, a);
    narrow(p + LANES, b);
}

// Sixteen elements in order, for what cannot do without it.
INLINE Vec widen(const float* p) { return load(p); }
INLINE void narrow(float* p, Vec x) { store(p, x); }
INLINE Vec widen(const bfloat* p) {
    ShortVec bits;
    std::memcpy(&bits, p, sizeof(bits));
    return (Vec)(__builtin_convertvector(bits, WordVec) << 16);
}
INLINE void narrow(bfloat* p, Vec x) {
#if defined(BF16_DOT)
    const __m256bh bits = _mm512_cvtneps_pbh((__m512)x);
#else
    const ShortVec bits = __builtin_convertvector(rounded_bits(x) >> 16, ShortVec);
#endif
    std::memcpy(p, &bits, sizeof(bits));
}
template <typename T>
INLINE Vec rounded_to(Vec x) {
    T parts[LANES];
    narrow(parts, x);
    return widen(parts);
}
#if defined(BF16_DOT)
template <>
INLINE Vec rounded_to<bfloat>(Vec x) {
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
}
#endif

INLINE float to_float(float x) { return x; }
INLINE float to_float(half x) { return static_cast<float>(x); }
INLINE float to_float(bfloat x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof(y));
    return y;
}
template <typename T>
INLINE T from_float(float x) {
    return static_cast<T>(x);
}
template <>
INLINE bfloat from_float<bfloat>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if (x != x) return bfloat{static_cast<uint16_t>((bits >> 16) | 0x40)};
    return bfloat{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#if defined(__AVX512F__)
// One step of the butterfly: lane i gets the pair sum over lanes i and i ^ WIDTH, of `a` where bit WIDTH of i is 0, else of `b`.
template <int WIDTH>
INLINE Vec pair_sums(Vec a, Vec b) {
    constexpr __mmask16 bit = WIDTH == 1 ? 0xaaaa : WIDTH == 2 ? 0xcccc : WIDTH == 4 ? 0xf0f0 : 0xff00;
    const __m512 x = (__m512)a, y = (__m512)b;
    const __m512 kept = _mm512_mask_blend_ps(bit, x, y), moved = _mm512_mask_blend_ps(bit, y, x);
    if constexpr (WIDTH == 1) return (Vec)_mm512_add_ps(kept, _mm512_permute_ps(moved, 0xb1));
    if constexpr (WIDTH == 2) return (Vec)_mm512_add_ps(kept, _mm512_permute_ps(moved, 0x4e));
    if constexpr (WIDTH == 4) return (Vec)_mm512_add_ps(kept, _mm512_shuffle_f32x4(moved, moved, 0xb1));
    return (Vec)_mm512_add_ps(kept, _mm512_shuffle_f32x4(moved, moved, 0x4e));
}

template <int FIRST, int STRIDE, typename F>
INLINE Vec transpose_sum_step(const F& row) {
    if constexpr (STRIDE == LANES)
        return row(FIRST);
    else
        return pair_sums<STRIDE>(transpose_sum_step<FIRST, STRIDE * 2>(row), transpose_sum_step<FIRST + STRIDE, STRIDE * 2>(row));
}
#endif

// Lane i of the result is the sum over the lanes of row(i), for sixteen rows: 15 butterflies instead of 16 reductions.
template <typename F>
INLINE Vec transpose_sum(const F& row) {
#if defined(__AVX512F__)
    return transpose_sum_step<0, 1>(row);
#else
    float parts[LANES];
    for (int i = 0; i < LANES; ++i) parts[i] = sum(row(i));
    return load(parts);
#endif
}
