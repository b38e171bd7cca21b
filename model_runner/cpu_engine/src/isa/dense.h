// The dense microkernels: a few rows of activations times one panel of weights, accumulated in registers.
//
// For each pair of types (A of the activations, W of the weights) that a level can multiply there is
//   template <FetchHint H, int R> void block(const A* a, int64_t stride, const W* panel, int64_t k, Ahead ahead,
//                                            float* tile, bool add)
// for R in [1, kBlockRows], which adds to the tile or overwrites it; it goes `passes(R)` times through the panel, in a
// loop of which each step reads kStepBytes. Every level has
//   float x float    the panel is [k][kPanel]
// and one of
//   bf16 x bf16      the panel is [k / 2][kPanel][2]
//   float x bf16     the same panel, its weights widened in registers: two operations of integers for the products of a
//                    block of rows, which cost nothing beside them; a panel widened once for all blocks is no faster
// `kEffort<A>` says what they cost (work_grid.h).
//
// `Factor<T>` is the type that activations of type T must have to be multiplied with weights of type T.
#pragma once

#include "../fetch.h"
#include "../linear.h"

namespace pdserve {

constexpr int64_t kStepBytes = 128;

// What a block asks of memory while it computes: lines from `next` on, `step` bytes for each step of its loop. Two
// lines at most; less is to ask for the same line again.
struct Ahead {
  const char* next;
  int64_t step;
};

template <FetchHint H>
class Fetch {
 public:
  explicit Fetch(Ahead ahead) : next_(ahead.next), step_(ahead.step), second_(ahead.step > kLine ? kLine : 0) {}

  void operator()() {
    fetch<H>(next_);
    fetch<H>(next_ + second_);
    next_ += step_;
  }

 private:
  const char* next_;
  const int64_t step_, second_;
};

// Rows `stride` elements apart, by one pointer for three of them: addresses of three rows need no registers but the
// pointer's and the stride's, and twelve pointers would not leave any for the loop.
template <class T, int R>
class RowPointers {
 public:
  RowPointers(const T* first, int64_t stride) : stride_(stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kPointers; ++i) at_[i] = first + 3 * i * stride;
  }

  const T* row(int m) const { return at_[m / 3] + m % 3 * stride_; }

  void advance(int64_t elements) {
#pragma GCC unroll 16
    for (int i = 0; i < kPointers; ++i) at_[i] += elements;
  }

 private:
  static constexpr int kPointers = (R + 2) / 3;
  const int64_t stride_;
  const T* at_[kPointers];
};

}  // namespace pdserve

#if defined(__AVX512F__)
#include "dense_avx512.h"
#else
#include "dense_avx2.h"
#endif

#if defined(__AVX512BF16__)
#include "pairs_avx512bf16.h"
#else
namespace pdserve {
template <class T>
using Factor = float;
}
#endif
