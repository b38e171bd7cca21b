// Transposed blocks by AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pdserve {

// Lane k of each goes to row k, side by side; rows are `stride` words apart.
inline void store_lanes(__m512i a, __m512i b, __m512i c, __m512i d, uint32_t* to, int64_t stride) {
  const __m512i ab_even = _mm512_shuffle_i64x2(a, b, 0x88), ab_odd = _mm512_shuffle_i64x2(a, b, 0xdd);
  const __m512i cd_even = _mm512_shuffle_i64x2(c, d, 0x88), cd_odd = _mm512_shuffle_i64x2(c, d, 0xdd);
  _mm512_storeu_si512(to, _mm512_shuffle_i64x2(ab_even, cd_even, 0x88));
  _mm512_storeu_si512(to + stride, _mm512_shuffle_i64x2(ab_odd, cd_odd, 0x88));
  _mm512_storeu_si512(to + 2 * stride, _mm512_shuffle_i64x2(ab_even, cd_even, 0xdd));
  _mm512_storeu_si512(to + 3 * stride, _mm512_shuffle_i64x2(ab_odd, cd_odd, 0xdd));
}

inline void transpose_words(const uint32_t* from, uint32_t* to, int64_t stride) {
  // Of four rows each: [g][c] has in lane k their words 4 k + c.
  __m512i four[4][4];
  for (int g = 0; g < 4; ++g) {
    __m512i row[4];
    for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_si512(from + (4 * g + i) * 16);
    const __m512i low01 = _mm512_unpacklo_epi32(row[0], row[1]), high01 = _mm512_unpackhi_epi32(row[0], row[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(row[2], row[3]), high23 = _mm512_unpackhi_epi32(row[2], row[3]);
    four[g][0] = _mm512_unpacklo_epi64(low01, low23);
    four[g][1] = _mm512_unpackhi_epi64(low01, low23);
    four[g][2] = _mm512_unpacklo_epi64(high01, high23);
    four[g][3] = _mm512_unpackhi_epi64(high01, high23);
  }
  for (int c = 0; c < 4; ++c) store_lanes(four[0][c], four[1][c], four[2][c], four[3][c], to + c * stride, 4 * stride);
}

inline void transpose_pairs(const uint32_t* from, uint32_t* to, int64_t stride) {
  // The lower halves of two neighbours, then their upper ones: 64 bits of each pair of slots.
  __m512i row[8];
  for (int i = 0; i < 8; ++i) {
    const __m512i words = _mm512_loadu_si512(from + i * 16);
    row[i] = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(words, 0xd8), 0xd8);
  }
  __m512i even[4], odd[4];
  for (int g = 0; g < 4; ++g) {
    even[g] = _mm512_unpacklo_epi64(row[2 * g], row[2 * g + 1]);
    odd[g] = _mm512_unpackhi_epi64(row[2 * g], row[2 * g + 1]);
  }
  store_lanes(even[0], even[1], even[2], even[3], to, 2 * stride);
  store_lanes(odd[0], odd[1], odd[2], odd[3], to + stride, 2 * stride);
}

}  // namespace pdserve
