// Words and lanes by AVX2.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../simd.h"

namespace pdserve {

template <int R>
constexpr int kBlockVecs = R > 3 ? 1 : 2;  // a Vec is two of 16 registers

inline Vec low_halves(const uint32_t* words) {
  const auto* p = reinterpret_cast<const __m256i*>(words);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p + 1), 16))};
}

inline Vec high_halves(const uint32_t* words) {
  const auto* p = reinterpret_cast<const __m256i*>(words);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p + 1), mask))};
}

inline void store_every_second(bf16* out, Vec x) {
  alignas(32) bf16 halves[kLanes];
  store(halves, x);
  for (int i = 0; i < kLanes; ++i) out[2 * i] = halves[i];
}

inline Vec mask_keys(Vec scores, int key, int visible) {
  const int lanes = std::clamp(visible - key, 0, kLanes);
  float lane[kLanes];
  store(lane, scores);
  std::fill(lane + lanes, lane + kLanes, -std::numeric_limits<float>::infinity());
  return load(lane);
}

inline Vec mask_older_keys(Vec scores, int key, int first) {
  const int lanes = std::clamp(first - key, 0, kLanes);
  float lane[kLanes];
  store(lane, scores);
  std::fill(lane, lane + lanes, -std::numeric_limits<float>::infinity());
  return load(lane);
}

inline float first_lane(Vec x) { return _mm256_cvtss_f32(x.a); }

}  // namespace pdserve
