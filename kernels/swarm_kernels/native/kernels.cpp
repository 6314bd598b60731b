// The C interface of the CPU kernels, called through ctypes (native/library.py), which checks the arguments.
#include "append.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "logprob.h"
#include "selection.h"

#define FOR_DTYPE(dtype, call)                   \
    switch (dtype) {                             \
        case FLOAT32: return call<float>(*a);    \
        case FLOAT16: return call<half>(*a);     \
        case BFLOAT16: return call<bfloat>(*a);  \
    }

struct DecodeArguments {  // mirrored by native/library.py
    AppendArguments append;
    SelectArguments select;
    AttendArguments attend;
    int32_t sparse;
};

extern "C" {

void swarm_append(const AppendArguments* a) { FOR_DTYPE(a->dtype, append::append) }

void swarm_select(const SelectArguments* a) { FOR_DTYPE(a->dtype, selection::select) }

void swarm_attend(const AttendArguments* a) { FOR_DTYPE(a->dtype, attention::attend) }

// One layer of one decode step in one call.
void swarm_decode(const DecodeArguments* a) {
    swarm_append(&a->append);
    if (a->sparse) swarm_select(&a->select);
    swarm_attend(&a->attend);
}

void swarm_norm(const NormArguments* a) { FOR_DTYPE(a->dtype, elementwise::norm) }

void swarm_gate(const GateArguments* a) { FOR_DTYPE(a->dtype, elementwise::gate) }

void swarm_linear(const LinearArguments* a) { linear::multiply(*a); }

// Whether `swarm_linear` does anything: it needs the matrix unit.
int32_t swarm_has_linear() { return linear::available(); }

void swarm_logprob_forward(const LogprobArguments* a) { FOR_DTYPE(a->dtype, logprob::forward) }

void swarm_logprob_backward(const LogprobArguments* a) { FOR_DTYPE(a->dtype, logprob::backward) }

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
                            sizeof(NormArguments), sizeof(GateArguments), sizeof(LinearArguments)};
    return static_cast<int32_t>(sizes[which]);
}

}  // extern "C"
