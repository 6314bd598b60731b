// One layer's attention in a decode step: rotate, select, then attend, writing the new keys and values on the way.
#pragma once

#include "append.h"
#include "attention.h"
#include "selection.h"

struct DecodeArguments {  // mirrored by native/arguments.py
    AppendArguments append;
    SelectArguments select;
    AttendArguments attend;
    int32_t sparse;
};

namespace decode {

// Called by every thread of a team; `taken` as in `attention::attend`.
template <typename T>
void run(const DecodeArguments& a, int& taken) {
    append::rotate_queries<T>(a.append);
    // Selection knows the new page without its keys: the last two pages are always read.
    if (a.sparse) selection::select<T>(a.select);
    attention::attend<T>(a.attend, taken, &a.append);
}

}  // namespace decode
