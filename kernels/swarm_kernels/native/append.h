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

template <typename T>
void write_token(const AppendArguments& a, int token) {
    const int64_t slot = a.slots[token], size = a.head_size;
    const T* cosine = static_cast<const T*>(a.cosines) + (a.cosines ? token * a.angle_token : 0);
    const T* sine = static_cast<const T*>(a.sines) + (a.sines ? token * a.angle_token : 0);
    if (a.query && a.cosines)
        for (int h = 0; h < a.query_heads; ++h) {
            T* query = static_cast<T*>(a.query) + token * a.query_token + h * a.query_head;
            rotate(query, query, cosine, sine, a.head_size);
        }
    if (slot < 0) return;
    const int64_t at = slot / a.page_size * a.page_stride + slot % a.page_size * size;
    for (int h = 0; h < a.kv_heads; ++h) {
        const T* key = static_cast<const T*>(a.keys) + token * a.key_token + h * a.key_head;
        const T* value = static_cast<const T*>(a.values) + token * a.value_token + h * a.value_head;
        T* to = static_cast<T*>(a.cache_keys) + at + h * a.head_stride;
        if (a.cosines)
            rotate(key, to, cosine, sine, a.head_size);
        else
            std::memcpy(to, key, size * sizeof(T));
        std::memcpy(static_cast<T*>(a.cache_values) + at + h * a.head_stride, value, size * sizeof(T));
    }
}

template <typename T>
void write_centroid(const AppendArguments& a, int token) {
    const int64_t slot = a.slots[token], size = a.head_size;
    if (slot < 0 || slot % a.page_size != a.page_size - 1) return;
    const int64_t page = slot / a.page_size;
    for (int h = 0; h < a.kv_heads; ++h) {
        const T* keys = static_cast<const T*>(a.cache_keys) + page * a.page_stride + h * a.head_stride;
        T* centroid = static_cast<T*>(a.centroids) + page * a.centroid_page + h * a.centroid_head;
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
}

template <typename T>
void append(const AppendArguments& a) {
#pragma omp for schedule(static)
    for (int token = 0; token < a.tokens; ++token) write_token<T>(a, token);
#pragma omp for schedule(static)
    for (int token = 0; token < a.tokens; ++token) write_centroid<T>(a, token);
}

}  // namespace append
