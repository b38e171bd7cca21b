// Dense microkernels of AVX2. Its sixteen registers hold the sums of three rows of a panel, or of six rows of half a
// panel: four to six rows go through each half of the panel by itself, which the nearest cache then holds.
#pragma once

#include <immintrin.h>

namespace pdserve {

constexpr int kBlockRows = 6;

template <class A>
constexpr double kEffort = 2;

inline constexpr int passes(int rows) {
  return rows > 3 ? 2 : 1;
}

// The sums of R rows of C registers of columns. The loops are unrolled by pragma: the compiler would do it by itself,
// but only after it has decided that the sums are an array and live in memory.
template <int R, int C>
struct Sums {
  __m256 at[R][C];

  Sums() {
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) at[m][c] = _mm256_setzero_ps();
    }
  }

  void add(int m, float a, const __m256* b) {
    const __m256 x = _mm256_set1_ps(a);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) at[m][c] = _mm256_fmadd_ps(x, b[c], at[m][c]);
  }

  void leave(float* tile, bool add) const {
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m, tile += kPanel) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        _mm256_storeu_ps(tile + c * 8, add ? _mm256_add_ps(_mm256_loadu_ps(tile + c * 8), at[m][c]) : at[m][c]);
      }
    }
  }
};

// Of `panel` and `tile` the part that begins at their pointers and is C registers wide.
template <FetchHint H, int R, int C>
void part(const float* a, int64_t stride, const float* panel, int64_t k, Ahead ahead, float* tile, bool add) {
  Fetch<H> fetch(ahead);
  RowPointers<float, R> rows(a, stride);
  Sums<R, C> sums;
  for (int64_t i = 0; i < k; ++i, panel += kPanel, rows.advance(1)) {
    fetch();
    __m256 b[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) b[c] = _mm256_loadu_ps(panel + c * 8);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) sums.add(m, *rows.row(m), b);
  }
  sums.leave(tile, add);
}

inline __m256i load_pairs(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

inline __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

template <FetchHint H, int R, int C>
void part(const float* a, int64_t stride, const bf16* panel, int64_t k, Ahead ahead, float* tile, bool add) {
  Fetch<H> fetch(ahead);
  RowPointers<float, R> rows(a, stride);
  Sums<R, C> sums;
  for (int64_t i = 0; i < k; i += 2, panel += 2 * kPanel, rows.advance(2)) {
    fetch();
    __m256 b[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) b[c] = even_of(load_pairs(panel + c * 16));
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) sums.add(m, rows.row(m)[0], b);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) b[c] = odd_of(load_pairs(panel + c * 16));
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) sums.add(m, rows.row(m)[1], b);
  }
  sums.leave(tile, add);
}

template <FetchHint H, int R, class W>
void block(const float* a, int64_t stride, const W* panel, int64_t k, Ahead ahead, float* tile, bool add) {
  if constexpr (passes(R) == 1) {
    part<H, R, 4>(a, stride, panel, k, ahead, tile, add);
  } else {
    constexpr int kGroup = 4 / sizeof(W);
    const int64_t step = ahead.step / 2, steps = k / kGroup;
    part<H, R, 2>(a, stride, panel, k, {ahead.next, step}, tile, add);
    part<H, R, 2>(a, stride, panel + kPanel / 2 * kGroup, k, {ahead.next + step * steps, step}, tile + kPanel / 2, add);
  }
}

}  // namespace pdserve
