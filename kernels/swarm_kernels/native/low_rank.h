// out += scale * (x A^T) B^T in float32, for the adapters of bf16 linear layers (LoRA): few numbers, so vectors do, without the matrix unit.
#pragma once

#include <algorithm>

#include "linear.h"

namespace low_rank {

constexpr int TOGETHER = 4;  // rows, or numbers of the inner product, that share what is read

// inner (row, rank) = x . A
inline void shrink(const Product& product, const bfloat* x, int rows, int inputs, float* inner) {
#pragma omp for schedule(static)
    for (int row = 0; row < rows; ++row)
        for (int first = 0; first < product.rank; first += TOGETHER) {
            const int count = std::min(TOGETHER, product.rank - first);
            const float* a[TOGETHER];
            for (int k = 0; k < TOGETHER; ++k) a[k] = product.a + static_cast<int64_t>(first + std::min(k, count - 1)) * inputs;
            Vec total[TOGETHER] = {};
            for (int i = 0; i < inputs; i += LANES) {
                const Vec here = widen(x + static_cast<int64_t>(row) * inputs + i);
                for (int k = 0; k < TOGETHER; ++k) total[k] += here * load(a[k] + i);
            }
            for (int k = 0; k < count; ++k) inner[static_cast<int64_t>(row) * product.rank + first + k] = sum(total[k]);
        }
}

// out (row, outputs) += inner . B; the sum is rounded once more, as the adapted layer of the policy does it.
inline void expand(const Product& product, int rows, const float* inner) {
    const int blocks = (rows + TOGETHER - 1) / TOGETHER, columns = product.outputs / (2 * LANES);
#pragma omp for schedule(static)
    for (int task = 0; task < blocks * columns; ++task) {
        const int first = task / columns * TOGETHER, count = std::min(TOGETHER, rows - first), output = task % columns * 2 * LANES;
        Vec total[TOGETHER][2] = {};
        for (int k = 0; k < product.rank; ++k) {
            const float* b = product.b + static_cast<int64_t>(k) * product.outputs + output;
            const Vec low = load(b), high = load(b + LANES);
            for (int r = 0; r < TOGETHER; ++r) {
                const float weight = inner[static_cast<int64_t>(first + std::min(r, count - 1)) * product.rank + k];
                total[r][0] += low * weight;
                total[r][1] += high * weight;
            }
        }
        for (int r = 0; r < count; ++r) {
            bfloat* out = static_cast<bfloat*>(product.out) + static_cast<int64_t>(first + r) * product.outputs + output;
            narrow(out, widen(out) + total[r][0]);
            narrow(out + LANES, widen(out + LANES) + total[r][1]);
        }
    }
}

// Called by every thread of a team. `inner` has room for (rows, rank).
inline void add(const Product& product, const void* x, int rows, int inputs, float* inner) {
    shrink(product, static_cast<const bfloat*>(x), rows, inputs, inner);
    expand(product, rows, inner);
}

}  // namespace low_rank
