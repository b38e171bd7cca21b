// Brings a tile of keys and values into the order that multiply_block reads (see attention_tile.h).
#pragma once

#include "attention_fetch.h"
#include "attention_tile.h"

namespace pdserve {

#if defined(__AVX512F__)

constexpr int kSquare = 16;

// 16 rows of 16 words become 16 columns. `words` below 16: only so many words of each row are read.
inline void transpose_square(const uint32_t* const* rows, int64_t at, int words, uint32_t* out, int64_t out_stride) {
  __m512i a[16], b[16];
  const __mmask16 mask = static_cast<__mmask16>((1u << words) - 1);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + at);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // Now a[4 g + j] holds words j, j + 4, j + 8, j + 12 of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    b[j] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    b[8 + j] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    b[4 + j] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    b[12 + j] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i < words) _mm512_storeu_si512(out + i * out_stride, b[i]);
  }
}

#else

constexpr int kSquare = 8;

inline void transpose_square(const uint32_t* const* rows, int64_t at, int, uint32_t* out, int64_t out_stride) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    float* low = reinterpret_cast<float*>(out + i * out_stride);
    float* high = reinterpret_cast<float*>(out + (i + 4) * out_stride);
    _mm256_storeu_ps(low, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(high, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

#endif

// Lines to ask for after each square, so that packing a head's keys asks for a quarter of the next tile's share.
constexpr int kSquareLines = kSquare * kSquare / 32;

// out [words][kTile] from `keys` rows (a multiple of kLanes) of `words` words (a multiple of 8).
inline void pack_keys(const uint32_t* const* rows, int keys, int64_t words, uint32_t* out, TileFetch& ahead) {
  for (int64_t w = 0; w < words; w += kSquare) {
    const int count = static_cast<int>(std::min<int64_t>(kSquare, words - w));
    for (int key = 0; key < keys; key += kSquare) {
      transpose_square(rows + key, w, count, out + w * kTile + key, kTile);
      ahead.fetch(kSquareLines);
    }
  }
}

#if defined(__AVX512BF16__)
// out [keys / 2][dim] words, each the values of two neighbouring keys.
inline void pack_values(PairWords, const uint32_t* const* rows, int keys, int64_t dim, uint32_t* out,
                        TileFetch& ahead) {
  alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int key = 0; key < keys; key += 2, out += dim) {
    ahead.fetch(dim / 16);
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
      const __m512i a = _mm512_loadu_si512(rows[key] + d / 2), b = _mm512_loadu_si512(rows[key + 1] + d / 2);
      _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(out + d + 16, _mm512_permutex2var_epi16(a, high, b));
    }
    if (d < dim) {
      const __m512i a = _mm512_maskz_loadu_epi32(0xff, rows[key] + d / 2);
      const __m512i b = _mm512_maskz_loadu_epi32(0xff, rows[key + 1] + d / 2);
      _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(a, low, b));
    }
  }
}
#endif

inline void pack_values(FloatWords, const uint32_t* const* rows, int keys, int64_t dim, uint32_t* out,
                        TileFetch& ahead) {
  for (int key = 0; key < keys; ++key) {
    ahead.fetch(dim / 16);
    std::memcpy(out + key * dim, rows[key], dim * sizeof(uint32_t));
  }
}

}  // namespace pdserve
