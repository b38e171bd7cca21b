// Dense microkernels of AVX-512: twelve rows times the two registers of a panel's columns are 24 of 32 registers.
#pragma once

#include <immintrin.h>

namespace pdserve {

constexpr int kBlockRows = 12;

template <class A>
constexpr double kEffort = 1;

inline constexpr int passes(int) {
  return 1;
}

// The sums of R rows of a tile, in registers. The loops over rows are unrolled by pragma: the compiler would do it by
// itself, but only after it has decided that the sums are an array and live in memory.
template <int R>
struct Sums {
  __m512 left[R], right[R];

  Sums() {
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) left[m] = right[m] = _mm512_setzero_ps();
  }

  void add(int m, float a, __m512 b0, __m512 b1) {
    const __m512 x = _mm512_set1_ps(a);
    left[m] = _mm512_fmadd_ps(x, b0, left[m]);
    right[m] = _mm512_fmadd_ps(x, b1, right[m]);
  }

  void leave(float* tile, bool add) const {
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m, tile += kPanel) {
      _mm512_storeu_ps(tile, add ? _mm512_add_ps(_mm512_loadu_ps(tile), left[m]) : left[m]);
      _mm512_storeu_ps(tile + 16, add ? _mm512_add_ps(_mm512_loadu_ps(tile + 16), right[m]) : right[m]);
    }
  }
};

template <FetchHint H, int R>
void block(const float* a, int64_t stride, const float* panel, int64_t k, Ahead ahead, float* tile, bool add) {
  Fetch<H> fetch(ahead);
  RowPointers<float, R> rows(a, stride);
  Sums<R> sums;
  for (int64_t i = 0; i < k; ++i, panel += kPanel, rows.advance(1)) {
    fetch();
    const __m512 b0 = _mm512_loadu_ps(panel), b1 = _mm512_loadu_ps(panel + 16);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) sums.add(m, *rows.row(m), b0, b1);
  }
  sums.leave(tile, add);
}

inline __m512 even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

inline __m512 odd_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

template <FetchHint H, int R>
void block(const float* a, int64_t stride, const bf16* panel, int64_t k, Ahead ahead, float* tile, bool add) {
  Fetch<H> fetch(ahead);
  RowPointers<float, R> rows(a, stride);
  Sums<R> sums;
  for (int64_t i = 0; i < k; i += 2, panel += 2 * kPanel, rows.advance(2)) {
    fetch();
    const __m512i b0 = _mm512_loadu_si512(panel), b1 = _mm512_loadu_si512(panel + kPanel);
    const __m512 even0 = even_of(b0), even1 = even_of(b1), odd0 = odd_of(b0), odd1 = odd_of(b1);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) sums.add(m, rows.row(m)[0], even0, even1);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) sums.add(m, rows.row(m)[1], odd0, odd1);
  }
  sums.leave(tile, add);
}

}  // namespace pdserve
