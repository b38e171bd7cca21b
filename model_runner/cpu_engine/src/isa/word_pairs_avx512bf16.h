// Pairs of bfloat16 on both sides, by the instruction for their dot product.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../simd.h"

namespace pdserve {

struct PairWords {
  using Element = bf16;
  static constexpr int kGroup = 2, kLeft = 1, kNarrow = 1;

  template <int R, int V, class Right>
  __attribute__((always_inline)) static void step(Vec (&acc)[R][V], const uint32_t* left, int64_t stride,
                                                  Right&& right) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i x = _mm512_set1_epi32(static_cast<int>(left[r * stride]));
        acc[r][v].v = _mm512_dpbf16_ps(acc[r][v].v, (__m512bh)x, (__m512bh)_mm512_loadu_si512(right(v)));
      }
    }
  }
};

}  // namespace pdserve
