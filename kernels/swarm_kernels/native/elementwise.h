// What lies between the matrix products of a layer: residual sum with RMS norm, and the middle of a gated MLP.
#pragma once

#include "vectors.h"

struct NormArguments {  // mirrored by native/arguments.py
    const void* hidden;
    const void* delta;  // null: nothing is added
    const void* weight;
    void* total;        // hidden + delta; unused without delta
    void* out;
    int32_t dtype, rows, columns, threads;
    float epsilon;
};

struct GateArguments {  // mirrored by native/arguments.py
    const void* gates;
    const void* values;
    void* out;
    int64_t count;
    int32_t dtype, threads;
};

namespace elementwise {

constexpr float LOG2E = 1.4426950408889634f;

template <typename T>
void norm_row(const NormArguments& a, int row) {
    const int64_t at = static_cast<int64_t>(row) * a.columns;
    const T* from = static_cast<const T*>(a.hidden) + at;
    if (a.delta) {
        const T* delta = static_cast<const T*>(a.delta) + at;
        T* total = static_cast<T*>(a.total) + at;
        for (int c = 0; c < a.columns; c += 2 * LANES) {
            Vec x, y, dx, dy;
            load_pair(from + c, x, y);
            load_pair(delta + c, dx, dy);
            store_pair(total + c, x + dx, y + dy);
        }
        from = total;
    }
    Vec squares = Vec{};
    for (int c = 0; c < a.columns; c += 2 * LANES) {
        Vec x, y;
        load_pair(from + c, x, y);
        squares += x * x + y * y;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(a.columns) + a.epsilon);
    T* out = static_cast<T*>(a.out) + at;
    for (int c = 0; c < a.columns; c += LANES)
        narrow(out + c, rounded_to<T>(widen(from + c) * factor) * widen(static_cast<const T*>(a.weight) + c));
}

template <typename T>
void norm(const NormArguments& a) {
#pragma omp for schedule(static)
    for (int row = 0; row < a.rows; ++row) norm_row<T>(a, row);
}

// x / (1 + exp(-x)), with an exponent that is never positive.
INLINE Vec silu(Vec x) {
    const Vec e = exp2_nonpositive(pick(x < Vec{}, x, -x) * LOG2E);
    return x * pick(x < Vec{}, e, splat(1.0f)) / (e + 1.0f);
}

template <typename T>
void gate(const GateArguments& a) {
    const T* gates = static_cast<const T*>(a.gates);
    const T* values = static_cast<const T*>(a.values);
    T* out = static_cast<T*>(a.out);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a.count; i += LANES) narrow(out + i, rounded_to<T>(silu(widen(gates + i))) * widen(values + i));
}

}  // namespace elementwise
