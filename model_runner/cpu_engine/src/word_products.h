// Products with rows of 32-bit words, which the pool's keys and values are (kv_blocks.h): a word is one float32 or a pair
// of bfloat16. Each kind of word is a struct, FloatWords here and PairWords in isa/word_pairs.h:
//   kGroup    elements of a word
//   kNarrow   how many of its words lie in 32 bits of memory: 2 where they are widened as they are multiplied
//   Element   of the left side, which is queries or softmax weights; kLeft 32-bit words of it meet one word of the pool
//   step      to R rows of V vectors of sums, adds the words at left[r * stride] times the sixteen that right(v) points to
#pragma once

#include <cstdint>
#include <cstring>

#include "isa/words.h"

namespace pdserve {

// Adds a word of each row times V vectors, which are in registers by now: all rows use them.
template <int R, int V>
__attribute__((always_inline)) inline void add_products(Vec (&acc)[R][V], const uint32_t* left, int64_t stride,
                                                        const Vec (&right)[V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float x;
    std::memcpy(&x, left + r * stride, sizeof x);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = fma(broadcast(x), right[v], acc[r][v]);
  }
}

struct FloatWords {
  using Element = float;
  static constexpr int kGroup = 1, kLeft = 1, kNarrow = 1;

  template <int R, int V, class Right>
  __attribute__((always_inline)) static void step(Vec (&acc)[R][V], const uint32_t* left, int64_t stride,
                                                  Right&& right) {
    Vec row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = load(reinterpret_cast<const float*>(right(v)));
    add_products(acc, left, stride, row);
  }
};

}  // namespace pdserve

#include "isa/word_pairs.h"
