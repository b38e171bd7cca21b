// Sixteen float32 rounded to bfloat16 (to nearest, ties to even), by the instruction for it.
#pragma once

#include "vec_avx512.h"

namespace pdserve {

inline void store(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}

}  // namespace pdserve
