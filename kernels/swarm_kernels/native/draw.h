// One token a row from softmax(logits / temperature), by inverting the cumulative distribution at one uniform number, and its log-probability.
#pragma once

#include <vector>

#include "logprob.h"

struct DrawArguments {  // mirrored by native/arguments.py
    const void* logits;
    const double* uniforms;  // (rows), in (0, 1)
    int64_t* ids;            // out
    float* logprobs;         // out; NaN: the row of logits is not finite
    int64_t row_stride;
    int32_t dtype, rows, columns;
    float temperature;
    int32_t threads;
};

namespace draw {

constexpr int BLOCK = 256;  // ids whose weights are summed in float32 before they join the sum in double

using logprob::LOG2E;
using logprob::over_row;

// exp(logits / temperature - top). Division is most of the work, and dividing by 1 the usual case.
INLINE Vec weights(Vec x, float top, float temperature) {
    return exp2_nonpositive(((temperature == 1.0f ? x : x / temperature) - top) * LOG2E);
}

template <typename T>
void draw_row(const DrawArguments& a, int row, std::vector<double>& sums) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.row_stride;
    Vec best = splat(-INFINITY);
    IntVec broken = IntVec{};
    over_row(logits, a.columns, [&](int, Vec x, Vec y) __attribute__((always_inline)) {
        best = maximum(best, maximum(x, y));
        broken |= (x != x) | (y != y);
    });
    const float top = largest(best) / a.temperature;
    a.ids[row] = 0;
    a.logprobs[row] = NAN;
    if (!std::isfinite(top) || largest(pick(broken, splat(1.0f), Vec{})) > 0) return;

    const int blocks = (a.columns + BLOCK - 1) / BLOCK;
    const auto size = [&](int block) { return std::min(BLOCK, a.columns - block * BLOCK); };
    sums.resize(blocks);
    double total = 0;
    for (int block = 0; block < blocks; ++block) {
        Vec mass = Vec{};
        over_row(logits + block * BLOCK, size(block), [&](int, Vec x, Vec y) __attribute__((always_inline)) {
            mass += weights(x, top, a.temperature) + weights(y, top, a.temperature);
        });
        sums[block] = total += sum(mass);
    }
    // Rounding may lift the target to the total, which nothing exceeds.
    const double target = std::min(a.uniforms[row] * total, std::nextafter(total, 0.0));
    const int block = static_cast<int>(std::upper_bound(sums.begin(), sums.end(), target) - sums.begin());
    double below = block ? sums[block - 1] : 0;
    int last = -1;  // the last id of the block with a weight: where the two sums of a block differ by their rounding, the draw ends there
    for (int i = 0; i < size(block); ++i) {
        const float x = to_float(logits[block * BLOCK + i]);
        const float weight = weights(splat(x), top, a.temperature)[0];
        if (weight == 0) continue;
        last = i;
        if ((below += weight) > target) break;
    }
    a.ids[row] = block * BLOCK + last;
    a.logprobs[row] = to_float(logits[a.ids[row]]) / a.temperature - top - static_cast<float>(std::log(total));
}

template <typename T>
void draw(const DrawArguments& a) {
    std::vector<double> sums;
#pragma omp for schedule(static)
    for (int row = 0; row < a.rows; ++row) draw_row<T>(a, row, sums);
}

}  // namespace draw
