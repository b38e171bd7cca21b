// Pairs of bytes by AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../simd.h"

namespace pdserve {

struct BytePairs {
  Vec first, second;
};

inline __m256i load_pairs(const uint8_t* pairs) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
}

struct WideInt8 {
  static BytePairs widen(const uint8_t* pairs) {
    const __m512i words = _mm512_cvtepi16_epi32(load_pairs(pairs));
    return {{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24))},
            {_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 8))}};
  }
};

struct WideFp8E5M2 {
  static BytePairs widen(const uint8_t* pairs) {
    const __m256i words = load_pairs(pairs), upper = _mm256_set1_epi16(static_cast<int16_t>(0xff00));
    return {{_mm512_cvtph_ps(_mm256_slli_epi16(words, 8))}, {_mm512_cvtph_ps(_mm256_and_si256(words, upper))}};
  }
};

struct WideFp8E4M3 {
  static constexpr float kUnit = 256.0f;

  static BytePairs widen(const uint8_t* pairs) {
    const __m256i words = load_pairs(pairs), upper = _mm256_set1_epi16(static_cast<int16_t>(0xff00));
    return {{_mm512_cvtph_ps(halves(_mm256_slli_epi16(words, 8)))},
            {_mm512_cvtph_ps(halves(_mm256_and_si256(words, upper)))}};
  }

  // The upper bytes, as float16 that are too small by kUnit.
  static __m256i halves(__m256i bytes) {
    return _mm256_and_si256(_mm256_srai_epi16(bytes, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  }
};

inline __m512i join_pairs(const BytePairs& pairs) {
  const __m512i first = _mm512_srli_epi32(_mm512_castps_si512(pairs.first.v), 16);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i second = _mm512_castps_si512(pairs.second.v);
  return _mm512_ternarylogic_epi32(second, upper, first, 0xea);  // (second & upper) | first
}

inline void store_pairs(uint32_t* out, const BytePairs& pairs) { _mm512_storeu_si512(out, join_pairs(pairs)); }

#if defined(__AVX512BF16__)
// As PairWords, of pairs of bytes.
template <class Codec>
struct BytePairWords {
  using Element = bf16;
  static constexpr int kGroup = 2, kLeft = 1, kNarrow = 2;

  template <int R, int V, class Right>
  __attribute__((always_inline)) static void step(Vec (&acc)[R][V], const uint32_t* left, int64_t stride,
                                                  Right&& right) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const __m512i words = join_pairs(Codec::widen(reinterpret_cast<const uint8_t*>(right(v))));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i x = _mm512_set1_epi32(static_cast<int>(left[r * stride]));
        acc[r][v].v = _mm512_dpbf16_ps(acc[r][v].v, (__m512bh)x, (__m512bh)words);
      }
    }
  }
};
#endif

}  // namespace pdserve
