// Transposed blocks by AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pdserve {

inline __m256i load_eight(const uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

// Lane 0 of both to `low`, lane 1 of both to `high`.
inline void store_lanes(__m256i a, __m256i b, uint32_t* low, uint32_t* high) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm256_permute2x128_si256(a, b, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm256_permute2x128_si256(a, b, 0x31));
}

// Eight times eight words of rows of sixteen.
inline void transpose_eight(const uint32_t* from, uint32_t* to, int64_t stride) {
  // Of four rows each: [g][c] has in lane k their words 4 k + c.
  __m256i four[2][4];
  for (int g = 0; g < 2; ++g) {
    __m256i row[4];
    for (int i = 0; i < 4; ++i) row[i] = load_eight(from + (4 * g + i) * 16);
    const __m256i low01 = _mm256_unpacklo_epi32(row[0], row[1]), high01 = _mm256_unpackhi_epi32(row[0], row[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(row[2], row[3]), high23 = _mm256_unpackhi_epi32(row[2], row[3]);
    four[g][0] = _mm256_unpacklo_epi64(low01, low23);
    four[g][1] = _mm256_unpackhi_epi64(low01, low23);
    four[g][2] = _mm256_unpacklo_epi64(high01, high23);
    four[g][3] = _mm256_unpackhi_epi64(high01, high23);
  }
  for (int c = 0; c < 4; ++c) store_lanes(four[0][c], four[1][c], to + c * stride, to + (c + 4) * stride);
}

inline void transpose_words(const uint32_t* from, uint32_t* to, int64_t stride) {
  for (int i = 0; i < 16; i += 8) {
    for (int s = 0; s < 16; s += 8) transpose_eight(from + i * 16 + s, to + s * stride + i, stride);
  }
}

inline void transpose_pairs(const uint32_t* from, uint32_t* to, int64_t stride) {
  for (int s = 0; s < 16; s += 8) {
    for (int i = 0; i < 8; i += 4) {
      // The lower halves of two neighbours, then their upper ones: 64 bits of each pair of slots.
      __m256i row[4];
      for (int r = 0; r < 4; ++r) {
        const __m256i words = load_eight(from + (i + r) * 16 + s);
        row[r] = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
      }
      uint32_t* out = to + s / 2 * stride + 2 * i;
      store_lanes(_mm256_unpacklo_epi64(row[0], row[1]), _mm256_unpacklo_epi64(row[2], row[3]), out, out + 2 * stride);
      out += stride;
      store_lanes(_mm256_unpackhi_epi64(row[0], row[1]), _mm256_unpackhi_epi64(row[2], row[3]), out, out + 2 * stride);
    }
  }
}

}  // namespace pdserve
