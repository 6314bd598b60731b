// The C interface of the CPU kernels, called through ctypes (native/backend.py), which checks the arguments.
// Teams of threads are formed here and nowhere else: what the headers define is called by every thread of a team.
#include "append.h"
#include "attention.h"
#include "decode.h"
#include "draw.h"
#include "elementwise.h"
#include "linear.h"
#include "logprob.h"
#include "panel.h"
#include "prompt.h"
#include "selection.h"
#include "stack.h"

#define FOR_DTYPE(dtype, call, ...)                                      \
    switch (dtype) {                                                     \
        case FLOAT32: call<float>(*a, ##__VA_ARGS__); break;             \
        case FLOAT16: call<half>(*a, ##__VA_ARGS__); break;              \
        case BFLOAT16: call<bfloat>(*a, ##__VA_ARGS__); break;           \
    }

constexpr int64_t WORTH_THREADS = 1 << 16;  // elements: below, waking a thread costs more than it saves

static int team(int threads, int64_t elements) { return elements < WORTH_THREADS ? 1 : threads; }

extern "C" {

void swarm_append(const AppendArguments* a) {
#pragma omp parallel num_threads(team(a->threads, static_cast<int64_t>(a->tokens) * a->kv_heads * a->head_size * 4))
    FOR_DTYPE(a->dtype, append::append)
}

void swarm_select(const SelectArguments* a) {
#pragma omp parallel num_threads(a->threads)
    FOR_DTYPE(a->dtype, selection::select)
}

void swarm_attend(const AttendArguments* a) {
    int taken = 0;
#pragma omp parallel num_threads(a->threads)
    FOR_DTYPE(a->dtype, attention::attend, taken)
}

// One layer of one decode step in one call.
void swarm_decode(const DecodeArguments* a) {
    int taken = 0;
#pragma omp parallel num_threads(a->attend.threads)
    FOR_DTYPE(a->attend.dtype, decode::run, taken)
}

void swarm_norm(const NormArguments* a) {
#pragma omp parallel num_threads(team(a->threads, static_cast<int64_t>(a->rows) * a->columns))
    FOR_DTYPE(a->dtype, elementwise::norm)
}

void swarm_gate(const GateArguments* a) {
#pragma omp parallel num_threads(team(a->threads, a->count))
    FOR_DTYPE(a->dtype, elementwise::gate)
}

void swarm_linear(const LinearArguments* a) {
#pragma omp parallel num_threads(a->threads)
    if (a->packed)
        linear::run(*a);
    else
        panel::run(*a, a->threads);
}

// Prefill's attention.
void swarm_attend_prompts(const PromptArguments* a) {
#pragma omp parallel num_threads(a->threads)
    prompt::run(*a);
}

// All layers of a decode step, or of prompts.
void swarm_stack(const StackArguments* a) {
    std::vector<int> taken(a->count);
#pragma omp parallel num_threads(a->threads)
    stack::run(*a, taken.data());
}

// Whether `swarm_linear`, `swarm_attend_prompts` and `swarm_stack` do anything: they need the matrix unit.
int32_t swarm_has_linear() { return linear::available(); }

void swarm_logprob_forward(const LogprobArguments* a) {
#pragma omp parallel num_threads(a->threads)
    FOR_DTYPE(a->dtype, logprob::forward)
}

void swarm_logprob_backward(const LogprobArguments* a) {
#pragma omp parallel num_threads(a->threads)
    FOR_DTYPE(a->dtype, logprob::backward)
}

void swarm_draw(const DrawArguments* a) {
#pragma omp parallel num_threads(team(a->threads, static_cast<int64_t>(a->rows) * a->columns))
    FOR_DTYPE(a->dtype, draw::draw)
}

// Reads memory once and returns the sum of its words: the floor that other kernels are measured against.
uint64_t swarm_read(const uint64_t* words, int64_t count, int32_t threads) {
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) total += words[i];
    return total;
}

// Sizes of the argument structures, so that the caller can tell that both sides agree on them.
int32_t swarm_argument_bytes(int32_t which) {
    const size_t sizes[] = {sizeof(AppendArguments), sizeof(SelectArguments), sizeof(AttendArguments), sizeof(DecodeArguments), sizeof(LogprobArguments),
                            sizeof(NormArguments), sizeof(GateArguments), sizeof(LinearArguments), sizeof(LayerArguments), sizeof(StackArguments), sizeof(DrawArguments),
                            sizeof(PromptArguments)};
    return static_cast<int32_t>(sizes[which]);
}

}  // extern "C"
