// Which pages a decode step reads: centroids scored against the mean query of the group, the best kept in ascending order.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

struct SelectArguments {  // mirrored by native/arguments.py
    const void* query;
    const void* centroids;
    const int32_t* table;
    const int32_t* lengths;
    const int32_t* budgets;  // pages of each sequence besides the reserved ones
    int32_t* pages;          // out: (sequence, KV head, list width), ascending, padded with -1
    int64_t query_sequence, query_head, centroid_page, centroid_head, table_sequence;
    int32_t dtype, batch, kv_heads, group, head_size, page_size, list_width, threads;
};

namespace selection {

constexpr int RESERVED = 3;  // the first page and the last two

// Floats as integers that sort the same way.
INLINE uint32_t sortable(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest threshold that at least `keep` of the scores reach, found bit by bit: no sort, and the scan after it yields ascending pages.
inline uint32_t threshold(const uint32_t* scores, int count, int keep) {
    uint32_t found = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        int reach = 0;
        for (int i = 0; i < count; ++i) reach += scores[i] >= (found | bit);
        if (reach >= keep) found |= bit;
    }
    return found;
}

template <typename T, int D>
void score_pages(const SelectArguments& a, int sequence, int head, int first, int count, uint32_t* scores) {
    float mean[D] = {};
    const T* query = static_cast<const T*>(a.query) + sequence * a.query_sequence + head * a.group * a.query_head;
    for (int g = 0; g < a.group; ++g)
        for (int d = 0; d < D; d += 32) {
            Vec x, y;
            load_pair(query + g * a.query_head + d, x, y);
            store_pair(mean + d, load(mean + d) + x, load(mean + d + LANES) + y);
        }
    for (int d = 0; d < D; ++d) mean[d] /= static_cast<float>(a.group);

    const int32_t* row = a.table + sequence * a.table_sequence;
    const T* centroids = static_cast<const T*>(a.centroids) + head * a.centroid_head;
    for (int i = 0; i < count; i += LANES) {
        const int here = std::min(LANES, count - i);
        const Vec dots = transpose_sum([&](int lane) __attribute__((always_inline)) {
            const int page = first + i + std::min(lane, here - 1);
            const T* centroid = centroids + row[page] * a.centroid_page;
            Vec total = Vec{};
            for (int d = 0; d < D; d += 32) {
                Vec x, y;
                load_pair(centroid + d, x, y);
                total += x * load(mean + d);
                total += y * load(mean + d + LANES);
            }
            return total;
        });
        float parts[LANES];
        store(parts, dots);
        for (int lane = 0; lane < here; ++lane) scores[i + lane] = sortable(parts[lane]);
    }
}

template <typename T, int D>
void select(const SelectArguments& a, int sequence, int head, std::vector<uint32_t>& scores) {
    int32_t* out = a.pages + (static_cast<int64_t>(sequence) * a.kv_heads + head) * a.list_width;
    const int count = (a.lengths[sequence] + a.page_size - 1) / a.page_size;
    const int keep = std::min(a.budgets[sequence] + RESERVED, a.list_width);
    int written = 0;
    if (count <= keep) {
        for (; written < count; ++written) out[written] = written;
    } else {
        const int first = 1, candidates = count - RESERVED, wanted = keep - RESERVED;
        scores.resize(candidates);
        score_pages<T, D>(a, sequence, head, first, candidates, scores.data());
        out[written++] = 0;
        if (wanted > 0) {
            const uint32_t least = threshold(scores.data(), candidates, wanted);
            int ties = wanted;  // of pages with the threshold's own score, the earliest fill what is left
            for (int i = 0; i < candidates; ++i) ties -= scores[i] > least;
            for (int i = 0; i < candidates; ++i)
                if (scores[i] > least || (scores[i] == least && ties-- > 0)) out[written++] = first + i;
        }
        out[written++] = count - 2;
        out[written++] = count - 1;
    }
    for (; written < a.list_width; ++written) out[written] = -1;
}

template <typename T, int D>
void select(const SelectArguments& a) {
    std::vector<uint32_t> scores;
#pragma omp for schedule(dynamic, 1)
    for (int pair = 0; pair < a.batch * a.kv_heads; ++pair) select<T, D>(a, pair % a.batch, pair / a.batch, scores);
}

template <typename T>
void select(const SelectArguments& a) {
    switch (a.head_size) {
        case 32: return select<T, 32>(a);
        case 64: return select<T, 64>(a);
        case 96: return select<T, 96>(a);
        case 128: return select<T, 128>(a);
    }
}

}  // namespace selection
