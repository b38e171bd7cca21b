// Sixteen float32 rounded to bfloat16 (to nearest, ties to even), by AVX-512 without instructions of its own for that.
#pragma once

#include "vec_avx512.h"

namespace pdserve {

inline void store(bf16* p, Vec a) {
  __m512i x = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  x = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m256i bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
}

}  // namespace pdserve
