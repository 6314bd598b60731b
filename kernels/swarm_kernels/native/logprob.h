// Log-probability of one token a row under softmax(logits / temperature), and its gradient, without a second array of logits.
#pragma once

#include "vectors.h"

struct LogprobArguments {  // mirrored by native/arguments.py
    const void* logits;
    const int64_t* targets;  // a column of this piece of the vocabulary, or outside [0, columns): then it is in another piece
    const float* sharpness;  // 1 / temperature of each row
    float* top;              // forward, in and out: running maximum of logits / temperature
    float* mass;             // forward, in and out: running sum of exp(logit / temperature - maximum)
    float* chosen;           // forward, out where the target is here: its logit / temperature
    const float* lse;        // backward: log-sum-exp of each row
    const float* scale;      // backward: incoming gradient of each row
    void* gradient;          // backward, out: may be the logits themselves
    int64_t row_stride, gradient_stride;
    int32_t dtype, rows, columns, threads;
};

namespace logprob {

constexpr float LOG2E = 1.4426950408889634f;

template <typename T, typename F>
INLINE void over_row(const T* row, int columns, const F& visit) {
    int c = 0;
    for (; c + 2 * LANES <= columns; c += 2 * LANES) {
        Vec x, y;
        load_pair(row + c, x, y);
        visit(c, x, y);
    }
    if (c < columns) {
        T rest[2 * LANES];
        for (int i = 0; i < 2 * LANES; ++i) rest[i] = c + i < columns ? row[c + i] : from_float<T>(-INFINITY);
        Vec x, y;
        load_pair(rest, x, y);
        visit(c, x, y);
    }
}

template <typename T>
void forward_row(const LogprobArguments& a, int row) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.row_stride;
    const float sharpness = a.sharpness[row];
    Vec best = splat(-INFINITY);
    IntVec broken = IntVec{};
    over_row(logits, a.columns, [&](int, Vec x, Vec y) __attribute__((always_inline)) {
        best = maximum(best, maximum(x, y));
        broken |= (x != x) | (y != y);
    });
    if (largest(pick(broken, splat(1.0f), Vec{})) > 0) a.mass[row] = NAN;  // and whatever is added to it
    const float top = std::fmax(a.top[row], largest(best) * sharpness);
    if (top == -INFINITY) return;
    Vec mass = Vec{};
    over_row(logits, a.columns, [&](int, Vec x, Vec y) __attribute__((always_inline)) {
        mass += exp2_nonpositive((x * sharpness - top) * LOG2E) + exp2_nonpositive((y * sharpness - top) * LOG2E);
    });
    a.mass[row] = a.mass[row] * std::exp(a.top[row] - top) + sum(mass);
    a.top[row] = top;
    const int64_t target = a.targets[row];
    if (target >= 0 && target < a.columns) a.chosen[row] = to_float(logits[target]) * sharpness;
}

template <typename T>
void backward_row(const LogprobArguments& a, int row) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.row_stride;
    T* gradient = static_cast<T*>(a.gradient) + row * a.gradient_stride;
    const float sharpness = a.sharpness[row], lse = a.lse[row], scale = a.scale[row] * sharpness;
    const int64_t target = a.targets[row];
    // The target's own entry is scale * (1 - p), computed before `gradient` overwrites the logits it may share memory with.
    const bool here = target >= 0 && target < a.columns;
    const float own = here ? scale * (1.0f - std::exp(to_float(logits[target]) * sharpness - lse)) : 0.0f;
    over_row(logits, a.columns, [&](int c, Vec x, Vec y) __attribute__((always_inline)) {
        x = exp2_nonpositive((x * sharpness - lse) * LOG2E) * -scale;
        y = exp2_nonpositive((y * sharpness - lse) * LOG2E) * -scale;
        if (c + 2 * LANES <= a.columns) {
            store_pair(gradient + c, x, y);
        } else {
            T rest[2 * LANES];
            store_pair(rest, x, y);
            std::memcpy(gradient + c, rest, (a.columns - c) * sizeof(T));
        }
    });
    if (here) gradient[target] = from_float<T>(own);
}

template <typename T>
void forward(const LogprobArguments& a) {
#pragma omp for schedule(static)
    for (int row = 0; row < a.rows; ++row) forward_row<T>(a, row);
}

template <typename T>
void backward(const LogprobArguments& a) {
#pragma omp for schedule(static)
    for (int row = 0; row < a.rows; ++row) backward_row<T>(a, row);
}

}  // namespace logprob
