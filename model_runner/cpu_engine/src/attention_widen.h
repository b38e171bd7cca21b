// Keys and values of one byte as words that the products read, exact, without their scales: those are applied to what comes
// of a product with a key, and to the weight of a value, once for a slot instead of once for an element. A few rows of
// queries widen words in registers, as they multiply with them; for more of them a tile is widened once, into a copy. To a
// row of queries both are the same numbers in the same order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "attention_tile.h"
#include "isa/byte_pairs.h"
#include "kv_blocks.h"
#include "word_products.h"

namespace pdserve {

// Of pairs of bytes, by the products of two float32.
template <class Codec>
struct ByteFloatWords {
  using Element = float;
  static constexpr int kGroup = 2, kLeft = 2, kNarrow = 2;

  template <int R, int V, class Right>
  __attribute__((always_inline)) static void step(Vec (&acc)[R][V], const uint32_t* left, int64_t stride,
                                                  Right&& right) {
    Vec first[V], second[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const BytePairs pairs = Codec::widen(reinterpret_cast<const uint8_t*>(right(v)));
      first[v] = pairs.first;
      second[v] = pairs.second;
    }
    add_products(acc, left, stride, first);
    add_products(acc, left + 1, stride, second);
  }
};

// The words that widen in registers to what `Words` reads.
template <class Words, class Codec>
struct Narrow {
  using type = ByteFloatWords<Codec>;
};

#if defined(__AVX512BF16__)
template <class Codec>
struct Narrow<PairWords, Codec> {
  using type = BytePairWords<Codec>;
};
#endif

// A tile's bytes of one head, by blocks of 16 slots.
struct ByteBlocks {
  const uint8_t* keys[kTile / kBlockSlots];
  const uint8_t* values[kTile / kBlockSlots];
};

// `rows` rows of `width` pairs of bytes become as many rows of words, or twice as many of float32: the first of each pair
// in one, the second in the next. `width` is a multiple of 16.
template <class Words, class Codec>
void widen(const uint8_t* from, int64_t rows, int64_t width, uint32_t* to) {
  for (int64_t r = 0; r < rows; ++r, to += width * (Words::kGroup == 2 ? 1 : 2)) {
    for (int64_t i = 0; i < width; i += kLanes, from += 2 * kLanes) {
      const BytePairs pairs = Codec::widen(from);
      if constexpr (Words::kGroup == 2) {
        store_pairs(to + i, pairs);
      } else {
        store(reinterpret_cast<float*>(to) + i, pairs.first);
        store(reinterpret_cast<float*>(to) + width + i, pairs.second);
      }
    }
  }
}

// `f(codec)` of a type that has scales.
template <class F>
void with_codec(DType type, F&& f) {
  if (type == DType::kInt8) {
    f(WideInt8{});
  } else if (type == DType::kFp8E4M3) {
    f(WideFp8E4M3{});
  } else {
    f(WideFp8E5M2{});
  }
}

template <class Words>
void widen(DType type, const uint8_t* from, int64_t rows, int64_t width, uint32_t* to) {
  with_codec(type, [&](auto codec) { widen<Words, decltype(codec)>(from, rows, width, to); });
}

// The scales of a tile of `count` keys, times what widened elements are too small by. `base` plus an offset is where the
// scales of a block's `slots` are. Beyond `count` they are 0, as what was never written may be NaN.
inline void copy_scales(DType type, const char* base, const int64_t* offsets, int slots, int count, float* scales) {
  for (int i = 0; i * slots < count; ++i) {
    std::memcpy(scales + i * slots, base + offsets[i], std::min(slots, count - i * slots) * sizeof(float));
  }
  for (int key = count; key % kLanes != 0; ++key) scales[key] = 0.0f;
  if (type != DType::kFp8E4M3) return;
  for (int key = 0; key < count; key += kLanes) {
    store(scales + key, load(scales + key) * broadcast(WideFp8E4M3::kUnit));
  }
}

}  // namespace pdserve
