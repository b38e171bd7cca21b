// Masks of lanes by AVX2.
#pragma once

#include <cstdint>

#include "../simd.h"

namespace pdserve {

inline uint32_t mask_of(__m256 a, __m256 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(a)) | static_cast<uint32_t>(_mm256_movemask_ps(b)) << 8;
}
inline uint32_t at_least(Vec x, Vec y) {
  return mask_of(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
inline uint32_t not_a_number(Vec x) {
  return mask_of(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
}
inline Vec where(uint32_t mask, Vec x) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const auto half = [&](uint32_t low, __m256 v) {
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(low)), bits);
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bits)), v);
  };
  return {half(mask & 0xff, x.a), half(mask >> 8, x.b)};
}
inline Vec add_where(uint32_t mask, Vec a, Vec b) { return a + where(mask, b); }

}  // namespace pdserve
