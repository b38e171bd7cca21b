// Copies of keys and values of one byte as words that the products read, exact, without their scales: those are applied to
// what comes of a product with a key, and to the weight of a value, once for a slot instead of once for an element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "attention_tile.h"
#include "isa/byte_pairs.h"
#include "kv_blocks.h"

namespace pdserve {

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

template <class Words>
void widen(DType type, const uint8_t* from, int64_t rows, int64_t width, uint32_t* to) {
  if (type == DType::kInt8) {
    widen<Words, WideInt8>(from, rows, width, to);
  } else if (type == DType::kFp8E4M3) {
    widen<Words, WideFp8E4M3>(from, rows, width, to);
  } else {
    widen<Words, WideFp8E5M2>(from, rows, width, to);
  }
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
