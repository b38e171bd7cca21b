// The folder isa/ holds all that depends on the instruction set, and is the only place that asks for it: a part NAME is
// one file for each way to write it, NAME_LEVEL.h, all with the same functions, and NAME.h, which includes the one for
// the level that is being compiled (LEVELS of build.py). What uses a part includes NAME.h and has no #if of its own;
// what is the same for all levels does not belong here.
//
// This part: sixteen float32 lanes.
#pragma once

#include "../types.h"

namespace pdserve {

constexpr int kLanes = 16;

}  // namespace pdserve

#if defined(__AVX512BF16__)
#include "round_avx512bf16.h"
#elif defined(__AVX512F__)
#include "round_avx512.h"
#else
#include "vec_avx2.h"
#endif
