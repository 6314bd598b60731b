// Writing new tokens into their slots, rotated on the way, and the centroids of pages that they complete.
#pragma once

#include "vectors.h"

struct AppendArguments {  // mirrored by native/arguments.py
    const void* keys;
    const void* values;
    void* query;           // rotated in place; null: left alone
    const void* cosines;   // (token, head size); null: no rotation
    const void* sines;
    const int64_t* slots;  // page * page size + offset; -1: the token is not written
    void* cache_keys;
    void* cache_values;
    void* centroids;
    int64_t key_token, key_head, value_token, value_head, query_token, query_head, angle_token;
    int64_t page_stride, head_stride, centroid_page, centroid_head;
    int32_t dtype, tokens, kv_heads, query_heads, head_size, page_size, threads;
};

namespace append {

// As transformers' modules compute it: both products are rounded to the type of the model before they are added.
template <typename T>
INLINE void rotate(const T* from, T* to, const T* cosine, const T* sine, int size) {
    const int half_size = size / 2;
    for (int i = 0; i < half_size; i += LANES) {
        const Vec x = widen(from + i), y = widen(from + i + half_size);
        const Vec xc = rounded_to<T>(x * widen(cosine + i)), ys = rounded_to<T>(y * widen(sine + i));
        const Vec yc = rounded_to<T>(y * widen(cosine + i + half_size)), xs = rounded_to<T>(x * widen(sine + i + half_size));
        narrow(to + i, xc - ys);
        narrow(to + i + half_size, yc + xs);
    }
}

// The angles of a token; null where nothing is rotated.
template <typename T>
INLINE const T* angles(const AppendArguments& a, const void* all, int token) {
    return all ? static_cast<const T*>(all) + token * a.angle_token : nullptr;
}

template <typename T>
void rotate_query(const AppendArguments& a, int token) {
    if (!a.query || !a.cosines) return;
    for (int h = 0; h < a.query_heads; ++h) {
        T* query = static_cast<T*>(a.query) + token * a.query_token + h * a.query_head;
        rotate(query, query, angles<T>(a, a.cosines, token), angles<T>(a, a.sines, token), a.head_size);
    }
}

template <typename T>
void write_token(const AppendArguments& a, int token, int head) {
    const int64_t slot = a.slots[token], size = a.head_size;
    if (slot < 0) return;
    const int64_t at = slot / a.page_size * a.page_stride + head * a.head_stride + slot % a.page_size * size;
    const T* key = static_cast<const T*>(a.keys) + token * a.key_token + head * a.key_head;
    const T* value = static_cast<const T*>(a.values) + token * a.value_token + head * a.value_head;
    T* to = static_cast<T*>(a.cache_keys) + at;
    if (a.cosines)
        rotate(key, to, angles<T>(a, a.cosines, token), angles<T>(a, a.sines, token), a.head_size);
    else
        std::memcpy(to, key, size * sizeof(T));
    std::memcpy(static_cast<T*>(a.cache_values) + at, value, size * sizeof(T));
}

// Where the token is the last of its page.
template <typename T>
void write_centroid(const AppendArguments& a, int token, int head) {
    const int64_t slot = a.slots[token], size = a.head_size;
    if (slot < 0 || slot % a.page_size != a.page_size - 1) return;
    const int64_t page = slot / a.page_size;
    const T* keys = static_cast<const T*>(a.cache_keys) + page * a.page_stride + head * a.head_stride;
    T* centroid = static_cast<T*>(a.centroids) + page * a.centroid_page + head * a.centroid_head;
    for (int64_t d = 0; d < size; d += 32) {
        Vec even = Vec{}, odd = Vec{};
        for (int t = 0; t < a.page_size; ++t) {
            Vec x, y;
            load_pair(keys + t * size + d, x, y);
            even += x;
            odd += y;
        }
        const float share = 1.0f / static_cast<float>(a.page_size);
        store_pair(centroid + d, even * share, odd * share);
    }
}

// These are called by every thread of a team.
template <typename T>
void rotate_queries(const AppendArguments& a) {
#pragma omp for schedule(static)
    for (int token = 0; token < a.tokens; ++token) rotate_query<T>(a, token);
}

template <typename T>
void append(const AppendArguments& a) {
    rotate_queries<T>(a);
#pragma omp for schedule(static)
    for (int token = 0; token < a.tokens; ++token)
        for (int head = 0; head < a.kv_heads; ++head) write_token<T>(a, token, head);
#pragma omp for schedule(static)
    for (int token = 0; token < a.tokens; ++token)
        for (int head = 0; head < a.kv_heads; ++head) write_centroid<T>(a, token, head);
}

}  // namespace append
