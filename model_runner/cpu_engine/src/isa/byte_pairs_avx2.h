// Pairs of bytes by AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../simd.h"

namespace pdserve {

struct BytePairs {
  Vec first, second;
};

inline __m128i load_pairs(const uint8_t* pairs) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs)); }

// Of eight pairs at `pairs` and of the eight after them.
template <class F>
Vec of_halves(const uint8_t* pairs, F&& f) {
  return {f(load_pairs(pairs)), f(load_pairs(pairs + 16))};
}

struct WideInt8 {
  static BytePairs widen(const uint8_t* pairs) {
    const auto first = [](__m128i words) {
      return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(_mm256_cvtepi16_epi32(words), 24), 24));
    };
    const auto second = [](__m128i words) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_cvtepi16_epi32(words), 8)); };
    return {of_halves(pairs, first), of_halves(pairs, second)};
  }
};

struct WideFp8E5M2 {
  static BytePairs widen(const uint8_t* pairs) {
    const __m128i upper = _mm_set1_epi16(static_cast<int16_t>(0xff00));
    return {of_halves(pairs, [](__m128i words) { return _mm256_cvtph_ps(_mm_slli_epi16(words, 8)); }),
            of_halves(pairs, [&](__m128i words) { return _mm256_cvtph_ps(_mm_and_si128(words, upper)); })};
  }
};

struct WideFp8E4M3 {
  static constexpr float kUnit = 256.0f;

  static BytePairs widen(const uint8_t* pairs) {
    const __m128i upper = _mm_set1_epi16(static_cast<int16_t>(0xff00));
    return {of_halves(pairs, [](__m128i words) { return _mm256_cvtph_ps(halves(_mm_slli_epi16(words, 8))); }),
            of_halves(pairs, [&](__m128i words) { return _mm256_cvtph_ps(halves(_mm_and_si128(words, upper))); })};
  }

  // The upper bytes, as float16 that are too small by kUnit.
  static __m128i halves(__m128i bytes) {
    return _mm_and_si128(_mm_srai_epi16(bytes, 1), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
  }
};

inline void store_pairs(uint32_t* out, const BytePairs& pairs) {
  const auto join = [](__m256 first, __m256 second) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(first), 16),
                           _mm256_and_si256(_mm256_castps_si256(second), upper));
  };
  auto* to = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(to, join(pairs.first.a, pairs.second.a));
  _mm256_storeu_si256(to + 1, join(pairs.first.b, pairs.second.b));
}

}  // namespace pdserve
