// Pairs of bfloat16 in the pool, float32 on the left: without instructions for pairs, two products on the same words.
#pragma once

#include "../word_products.h"

namespace pdserve {

struct PairWords {
  using Element = float;
  static constexpr int kGroup = 2, kLeft = 2, kNarrow = 1;

  template <int R, int V, class Right>
  __attribute__((always_inline)) static void step(Vec (&acc)[R][V], const uint32_t* left, int64_t stride,
                                                  Right&& right) {
    Vec half[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) half[v] = low_halves(right(v));
    add_products(acc, left, stride, half);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) half[v] = high_halves(right(v));
    add_products(acc, left + 1, stride, half);
  }
};

}  // namespace pdserve
