// All layers of a model over one decode step or some prompts, in one call: some twenty kernels a layer without a return to the interpreter.
#pragma once

#include "decode.h"
#include "elementwise.h"
#include "linear.h"
#include "low_rank.h"
#include "panel.h"
#include "prompt.h"

struct NormWeight {  // mirrored by native/arguments.py
    const void* weight;  // null: there is no such norm
    float epsilon;
};

struct LayerArguments {  // mirrored by native/arguments.py
    NormWeight input_norm, query_norm, key_norm, middle_norm;
    Product query, key, value, output, gate, up, down;  // they write into the buffers below, which all layers share
    void* cache_keys;
    void* cache_values;
    void* centroids;
    float scale;
    int32_t window, rotary, sparse;
};

struct StackArguments {  // mirrored by native/arguments.py
    DecodeArguments step;    // what layers share; a layer fills in the rest
    PromptArguments prompt;  // without chunks: a decode step. With them, `append` alone of the step counts
    const LayerArguments* layers;
    NormWeight final_norm;
    void* hidden;  // in: embeddings, (rows, width); then the residual stream
    void* normed;  // (rows, width); out: after the final norm
    void* delta;   // (rows, width): what the next norm adds to the residual stream
    void* query;   // (rows, query heads, head size)
    void* keys;    // (rows, KV heads, head size)
    void* values;
    void* attended;
    void* gates;   // (rows, inner width)
    void* ups;
    void* packed;  // room for the rows of the widest input of a product, see native/fill.py; null: many rows, see panel.h
    float* inner_product;  // (rows, largest rank of an adapter)
    int32_t rows, width, inner, count, threads;
};

namespace stack {

#if defined(MATRIX_UNIT)
inline void norm(const NormWeight& norm, void* hidden, const void* delta, void* out, int rows, int columns) {
    elementwise::norm<bfloat>({hidden, delta, norm.weight, hidden, out, BFLOAT16, rows, columns, 0, norm.epsilon});
}

template <int COUNT>
void multiply_plain(const StackArguments& s, const void* input, int inputs, const Product (&products)[COUNT]) {
    if (!s.packed) {
        for (const Product& product : products) panel::run({product, input, nullptr, s.rows, inputs, 0}, s.threads);
#pragma omp barrier
        return;
    }
    const linear::Packed x = {static_cast<bfloat*>(s.packed), s.rows, inputs};
    linear::pack(input, x);
    linear::multiply(x, products);
}

// Several products of the same input, and what their adapters add.
template <int COUNT>
void multiply(const StackArguments& s, const void* input, int inputs, const Product (&products)[COUNT]) {
    multiply_plain(s, input, inputs, products);
    for (const Product& product : products)
        if (product.rank) low_rank::add(product, input, s.rows, inputs, s.inner_product);
}

inline void attend_prompts(const StackArguments& s, const LayerArguments& layer) {
    PromptArguments prompt = s.prompt;
    prompt.keys = layer.cache_keys;
    prompt.values = layer.cache_values;
    prompt.scale = layer.scale;
    prompt.window = layer.window;
    prompt::run(prompt);
}

inline void attend(const StackArguments& s, const LayerArguments& layer, int& taken) {
    DecodeArguments step = s.step;
    step.append.cache_keys = layer.cache_keys;
    step.append.cache_values = layer.cache_values;
    step.append.centroids = layer.centroids;
    step.select.centroids = layer.centroids;
    if (!layer.rotary) step.append.cosines = step.append.sines = nullptr;
    if (s.prompt.chunks) {
        append::append<bfloat>(step.append);
        return attend_prompts(s, layer);
    }
    step.sparse = s.step.sparse && layer.sparse;
    if (!step.sparse) step.attend.pages = nullptr;
    step.attend.keys = layer.cache_keys;
    step.attend.values = layer.cache_values;
    step.attend.scale = layer.scale;
    step.attend.window = layer.window;
    decode::run<bfloat>(step, taken);
}

// `taken`: as many zeros as there are layers, see `attention::attend`.
inline void run(const StackArguments& s, int* taken) {
    const int heads = s.step.append.query_heads, kv_heads = s.step.append.kv_heads, size = s.step.append.head_size;
    for (int i = 0; i < s.count; ++i) {
        const LayerArguments& layer = s.layers[i];
        norm(layer.input_norm, s.hidden, i ? s.delta : nullptr, s.normed, s.rows, s.width);
        multiply(s, s.normed, s.width, {layer.query, layer.key, layer.value});
        if (layer.query_norm.weight) {
            norm(layer.query_norm, s.query, nullptr, s.query, s.rows * heads, size);
            norm(layer.key_norm, s.keys, nullptr, s.keys, s.rows * kv_heads, size);
        }
        attend(s, layer, taken[i]);
        multiply(s, s.attended, heads * size, {layer.output});
        norm(layer.middle_norm, s.hidden, s.delta, s.normed, s.rows, s.width);
        multiply(s, s.normed, s.width, {layer.gate, layer.up});
        elementwise::gate<bfloat>({s.gates, s.ups, s.gates, static_cast<int64_t>(s.rows) * s.inner, BFLOAT16, 0});
        multiply(s, s.gates, s.inner, {layer.down});
    }
    norm(s.final_norm, s.hidden, s.delta, s.normed, s.rows, s.width);
}
#else
inline void run(const StackArguments&, int*) {}
#endif

}  // namespace stack
