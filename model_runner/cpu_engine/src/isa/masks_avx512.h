// Masks of lanes by AVX-512.
#pragma once

#include <cstdint>

#include "../simd.h"

namespace pdserve {

inline uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t not_a_number(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
inline Vec where(uint32_t mask, Vec a) { return {_mm512_maskz_mov_ps(static_cast<__mmask16>(mask), a.v)}; }
inline Vec add_where(uint32_t mask, Vec a, Vec b) {
  return {_mm512_mask_add_ps(a.v, static_cast<__mmask16>(mask), a.v, b.v)};
}

}  // namespace pdserve
