// The dense microkernel: a block of up to kMaxRows rows times one panel, accumulated in registers.
#include <algorithm>
#include <utility>

#include "fetch.h"
#include "linear.h"
#include "simd.h"

namespace pdserve {
namespace {

// The loops over rows are unrolled by pragma: the compiler would do it by itself, but only after it has decided that
// the accumulators are an array and live in memory.

// A float32 product adds up its k in parts: the error of a sum grows with its length, and someone who asks for float32
// wants to see the reference's tokens. In bfloat16 the rounding of the factors drowns it.
constexpr int64_t kFloatChunk = 96;

template <class T>
constexpr int kGroup = sizeof(T) == 2 ? 2 : 1;

// Asks for what a step along k has to fetch, two lines at most; less is to ask for the same line again.
template <FetchHint H>
class Fetch {
 public:
  Fetch(const void* panel, Stream stream)
      : next_(static_cast<const char*>(panel) + stream.offset),
        second_(stream.part == Stream::kAll ? kLine : 0),
        step_(stream.part == Stream::kNone ? 0 : second_ + kLine) {}

  void step() {
    fetch<H>(next_);
    fetch<H>(next_ + second_);
    next_ += step_;
  }

 private:
  const char* next_;
  const int64_t second_, step_;
};

#if defined(__AVX512F__)

constexpr int kBlockRows = kMaxRows;

#if defined(__AVX512BF16__)
inline __m512 dot(__m512 acc, __m512i a, __m512i b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#else
inline __m512 dot(__m512 acc, __m512i a, __m512i b) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const auto odd = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, high)); };
  const auto even = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
  return _mm512_fmadd_ps(odd(a), odd(b), _mm512_fmadd_ps(even(a), even(b), acc));
}
#endif

template <FetchHint H, int R>
void block(const bf16* a, int64_t stride, const bf16* panel, int64_t k, Stream stream, float* tile) {
  Fetch<H> fetch(panel, stream);
  __m512 left[R], right[R];
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) left[m] = right[m] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 2, panel += 2 * kPanel) {
    fetch.step();
    const __m512i b0 = _mm512_loadu_si512(panel), b1 = _mm512_loadu_si512(panel + kPanel);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) {
      int32_t pair;
      std::memcpy(&pair, a + m * stride + i, sizeof pair);
      const __m512i both = _mm512_set1_epi32(pair);
      left[m] = dot(left[m], both, b0);
      right[m] = dot(right[m], both, b1);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) {
    _mm512_storeu_ps(tile + m * kPanel, left[m]);
    _mm512_storeu_ps(tile + m * kPanel + kLanes, right[m]);
  }
}

template <FetchHint H, int R>
void block(const float* a, int64_t stride, const float* panel, int64_t k, Stream stream, float* tile) {
  Fetch<H> fetch(panel, stream);
  __m512 left[R], right[R];
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) left[m] = right[m] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; ++i, panel += kPanel) {
    fetch.step();
    const __m512 b0 = _mm512_loadu_ps(panel), b1 = _mm512_loadu_ps(panel + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) {
      const __m512 x = _mm512_set1_ps(a[m * stride + i]);
      left[m] = _mm512_fmadd_ps(x, b0, left[m]);
      right[m] = _mm512_fmadd_ps(x, b1, right[m]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) {
    _mm512_storeu_ps(tile + m * kPanel, left[m]);
    _mm512_storeu_ps(tile + m * kPanel + kLanes, right[m]);
  }
}

#else

// Sixteen registers: three rows of half a panel's columns at a time would be best, two of all keep this short.
constexpr int kBlockRows = 2;

template <FetchHint H, int R>
void block(const bf16* a, int64_t stride, const bf16* panel, int64_t k, Stream stream, float* tile) {
  Fetch<H> fetch(panel, stream);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256 acc[R][4];
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) acc[m][c] = _mm256_setzero_ps();
  }
  for (int64_t i = 0; i < k; i += 2, panel += 2 * kPanel) {
    fetch.step();
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel) + c);
      const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
      const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(b, high));
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m) {
        acc[m][c] = _mm256_fmadd_ps(_mm256_set1_ps(to_float(a[m * stride + i])), even, acc[m][c]);
        acc[m][c] = _mm256_fmadd_ps(_mm256_set1_ps(to_float(a[m * stride + i + 1])), odd, acc[m][c]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) _mm256_storeu_ps(tile + m * kPanel + c * 8, acc[m][c]);
  }
}

template <FetchHint H, int R>
void block(const float* a, int64_t stride, const float* panel, int64_t k, Stream stream, float* tile) {
  Fetch<H> fetch(panel, stream);
  __m256 acc[R][4];
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) acc[m][c] = _mm256_setzero_ps();
  }
  for (int64_t i = 0; i < k; ++i, panel += kPanel) {
    fetch.step();
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m256 b = _mm256_loadu_ps(panel + c * 8);
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m) acc[m][c] = _mm256_fmadd_ps(_mm256_set1_ps(a[m * stride + i]), b, acc[m][c]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) _mm256_storeu_ps(tile + m * kPanel + c * 8, acc[m][c]);
  }
}

#endif

template <class T>
using Block = void (*)(const T*, int64_t, const T*, int64_t, Stream, float*);

template <class T, FetchHint H, int... R>
Block<T> choose(int count, std::integer_sequence<int, R...>) {
  static constexpr Block<T> blocks[] = {&block<H, R + 1>...};
  return blocks[count - 1];
}

template <class T>
Block<T> choose(FetchHint hint, int count) {
  const auto rows = std::make_integer_sequence<int, kBlockRows>();
  return hint == FetchHint::kNonTemporal ? choose<T, FetchHint::kNonTemporal>(count, rows)
                                         : choose<T, FetchHint::kAllCaches>(count, rows);
}

}  // namespace

template <class T>
void pack_dense_panel(const T* source, int64_t k, const int32_t* rows, T* panel) {
  constexpr int group = kGroup<T>;
  for (int64_t i = 0; i < k; i += group) {
    for (int c = 0; c < kPanel; ++c) {
      for (int g = 0; g < group; ++g) *panel++ = rows[c] < 0 ? T{} : source[rows[c] * k + i + g];
    }
  }
}

template <class T>
void multiply_dense_panel(const T* a, int64_t a_stride, int count, const T* panel, int64_t k, Stream stream,
                          float* tile) {
  const FetchHint hint = fetch_hint();
  for (int done = 0; done < count; done += kBlockRows) {
    const int rows = count - done < kBlockRows ? count - done : kBlockRows;
    const auto multiply = choose<T>(hint, rows);
    const Stream ahead = done == 0 ? stream : Stream{0, Stream::kNone};
    const T* first = a + done * a_stride;
    float* sums = tile + done * kPanel;
    const int64_t chunk = sizeof(T) == 2 ? k : std::min(k, kFloatChunk);
    multiply(first, a_stride, panel, chunk, ahead, sums);
    for (int64_t i = chunk; i < k; i += kFloatChunk) {
      alignas(64) float part[kMaxRows * kPanel];
      multiply(first + i, a_stride, panel + i * kPanel, std::min(k - i, kFloatChunk), ahead, part);
      for (int at = 0; at < rows * kPanel; at += kLanes) store(sums + at, load(sums + at) + load(part + at));
    }
  }
}

template void pack_dense_panel(const bf16*, int64_t, const int32_t*, bf16*);
template void pack_dense_panel(const float*, int64_t, const int32_t*, float*);
template void multiply_dense_panel(const bf16*, int64_t, int, const bf16*, int64_t, Stream, float*);
template void multiply_dense_panel(const float*, int64_t, int, const float*, int64_t, Stream, float*);

}  // namespace pdserve
