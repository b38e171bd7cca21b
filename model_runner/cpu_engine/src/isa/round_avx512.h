// Sixteen float32 rounded to bfloat16 (to nearest, ties to even), by AVX-512 without instructions of its own for that.
#pragma once

#include "vec_avx512.h"

namespace pdserve {

inline void store(bf16* p, Vec a) {
  const __m512i x = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(x, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  // A NaN would round to infinity, or to 0 beyond it.
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_or_epi32(_mm512_srli_epi32(sum, 16), nan, high, _mm512_set1_epi32(0x40));
  const __m256i bits = _mm512_cvtepi32_epi16(rounded);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
}

}  // namespace pdserve
