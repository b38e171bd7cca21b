// Columns of bytes in 256 bits.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pdserve {

constexpr int kColumns = 8;       // of one register
constexpr int kAccumulators = 4;  // registers of sums that leave room for a run's numbers
constexpr int kWideRows = 4;     // rows that share a word of weights
constexpr int kWideSums = 8;     // registers of their sums, at most

struct Bytes {
  __m256i v;  // kColumns times four bytes
};
struct Ints {
  __m256i v;
};
struct Floats {
  __m256 v;
};

inline Bytes load_bytes(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline Bytes low_nibbles(Bytes x) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes x) { return {_mm256_and_si256(_mm256_srli_epi16(x.v, 4), _mm256_set1_epi8(15))}; }

// base | (x * 2^Shift & mask), for bytes whose bits of interest stay in their byte.
template <int Shift>
inline Bytes insert(Bytes base, Bytes x, int8_t mask) {
  const __m256i moved = Shift >= 0 ? _mm256_slli_epi16(x.v, Shift & 15) : _mm256_srli_epi16(x.v, -Shift & 15);
  return {_mm256_or_si256(base.v, _mm256_and_si256(moved, _mm256_set1_epi8(mask)))};
}

// table[x] for x of 0 to 15.
inline Bytes look_up(const uint8_t* table, Bytes x) {
  const __m128i one = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(one), x.v)};
}

inline Ints spread(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline Floats spread(float x) { return {_mm256_set1_ps(x)}; }
inline Floats zero_floats() { return {_mm256_setzero_ps()}; }
template <int N>
inline Ints shift_left(Ints x) {
  return {_mm256_slli_epi32(x.v, N)};
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats negative(Floats a) { return {_mm256_sub_ps(_mm256_setzero_ps(), a.v)}; }
inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a.v); }

inline Floats load_halves(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Floats load_unsigned(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline Floats load_signed(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

struct Words {
  __m256i v;  // 16-bit sums of two products
};

// Four activations, for every column.
inline Bytes four_bytes(const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, sizeof four);
  return {_mm256_set1_epi32(four)};
}
inline Words multiply(Bytes w, Bytes q) { return {_mm256_maddubs_epi16(w.v, q.v)}; }
inline Words operator+(Words a, Words b) { return {_mm256_add_epi16(a.v, b.v)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Words load_words(const int16_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline void store(int16_t* p, Words x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }
// Bytes 0 and 2 of each column as words, and bytes 1 and 3.
inline Words even_bytes(Bytes x) { return {_mm256_and_si256(x.v, _mm256_set1_epi16(0xff))}; }
inline Words odd_bytes(Bytes x) { return {_mm256_srli_epi16(x.v, 8)}; }
// Each two words that follow each other, as one number.
inline Ints add_pairs(Words a) { return {_mm256_madd_epi16(a.v, _mm256_set1_epi16(1))}; }

// sum + the products with two activations, for every column.
inline Ints multiply_add(Ints sum, Words w, const int16_t* q) {
  int32_t two;
  std::memcpy(&two, q, sizeof two);
  return sum + Ints{_mm256_madd_epi16(w.v, _mm256_set1_epi32(two))};
}

}  // namespace pdserve
