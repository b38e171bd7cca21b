// The dense microkernel of processors that multiply pairs of bfloat16: activations stay as they are.
#pragma once

#include <immintrin.h>

#include <cstring>

namespace pdserve {

template <class T>
using Factor = T;

template <>
inline constexpr double kEffort<bf16> = 0.5;

template <FetchHint H, int R>
void block(const bf16* a, int64_t stride, const bf16* panel, int64_t k, Ahead ahead, float* tile, bool add) {
  Fetch<H> fetch(ahead);
  Sums<R> sums;
  for (int64_t i = 0; i < k; i += 2, panel += 2 * kPanel) {
    fetch();
    const __m512bh b0 = (__m512bh)_mm512_loadu_si512(panel), b1 = (__m512bh)_mm512_loadu_si512(panel + kPanel);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) {
      int32_t pair;
      std::memcpy(&pair, a + m * stride + i, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sums.left[m] = _mm512_dpbf16_ps(sums.left[m], both, b0);
      sums.right[m] = _mm512_dpbf16_ps(sums.right[m], both, b1);
    }
  }
  sums.leave(tile, add);
}

}  // namespace pdserve
