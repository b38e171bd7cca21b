// Words and lanes by AVX-512.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../simd.h"

namespace pdserve {

template <int R>
constexpr int kBlockVecs = 4;  // 6 x 4 of 32 registers accumulate

inline Vec low_halves(const uint32_t* words) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(words), 16))};
}

inline Vec high_halves(const uint32_t* words) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(words), mask))};
}

inline void store_every_second(bf16* out, Vec x) {
  alignas(32) bf16 halves[kLanes];
  store(halves, x);
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
  _mm512_mask_storeu_epi16(out, 0x55555555u, words);
}

inline Vec mask_keys(Vec scores, int key, int visible) {
  const int lanes = std::clamp(visible - key, 0, kLanes);
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << lanes) - 1), nothing, scores.v)};
}

inline Vec mask_older_keys(Vec scores, int key, int first) {
  const int lanes = std::clamp(first - key, 0, kLanes);
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << lanes) - 1), scores.v, nothing)};
}

inline float first_lane(Vec x) { return _mm512_cvtss_f32(x.v); }

}  // namespace pdserve
