// How keys and values lie in the pool: as the products read them, so that attention neither gathers nor transposes
// anything, and streams pages from memory as fast as the bus brings them. The same on every processor.
//
// The span of a (page, layer, keys or values) is [K heads][page_size / S] blocks of S slots: 16, or all of a smaller
// page. A block is made of 32-bit words, which are G = 2 bfloat16 or G = 1 float32:
//   keys:   [D / G][S slots]   a word holds dimensions G i to G i + G - 1 of a slot
//   values: [S / G][D]         a word holds a dimension of slots G i to G i + G - 1
// A page of one slot has no pairs of slots: its values, like its keys, are the slot's D elements in their order.
// Rows of latent attention are keys, without values.
// Elements of one byte lie as bfloat16 do, in words of 16 bits, and a block's are followed by its slots' scales, S float32.
// So the heads of a range lie in one piece at every page size, and all heads of a token that fills a page too.
// disaggregation/page_order.py says the same in numpy, for pages that come from elsewhere.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "isa/words.h"

namespace pdserve {

constexpr int kBlockSlots = 16;

// A slot's keys: from a layer's begin in the first page on, where the first head's block begins, in elements, the slots of a block, and which of them it
// is.
struct SlotPlace {
  int64_t block;
  int32_t slots;
  int32_t slot;
};

inline SlotPlace find_slot(const KVPoolView& pool, int64_t slot) {
  const int64_t size = pool.page_size, offset = slot % size, slots = std::min<int64_t>(size, kBlockSlots);
  const int64_t head = slot / size * pool.num_layers * pool.layer_size();
  return {head + offset / slots * slots * pool.slot_elements(), static_cast<int32_t>(slots),
          static_cast<int32_t>(offset % slots)};
}

// From one head's block to the next head's, and from the keys of a layer to its values, in elements.
inline int64_t head_stride(const KVPoolView& pool) { return pool.page_size * pool.slot_elements(); }
inline int64_t values_offset(const KVPoolView& pool) { return pool.keys_size(); }

// Dimensions [d, d + 16) of a slot's key; `block` is the head's.
inline void store_key_block(float* block, const SlotPlace& place, int64_t d, Vec x) {
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  float* out = block + d * place.slots + place.slot;
  for (int i = 0; i < kLanes; ++i) out[i * place.slots] = lanes[i];
}

inline void store_key_block(bf16* block, const SlotPlace& place, int64_t d, Vec x) {
  alignas(32) uint32_t words[kLanes / 2];
  store(reinterpret_cast<bf16*>(words), x);
  uint32_t* out = reinterpret_cast<uint32_t*>(block) + d / 2 * place.slots + place.slot;
  for (int i = 0; i < kLanes / 2; ++i) out[i * place.slots] = words[i];
}

// Dimensions [d, d + 16) of a slot's value. Its neighbours' elements are left alone, also while other threads write them.
inline void store_value_block(float* block, const SlotPlace& place, int64_t dim, int64_t d, Vec x) {
  store(block + place.slot * dim + d, x);
}

inline void store_value_block(bf16* block, const SlotPlace& place, int64_t dim, int64_t d, Vec x) {
  if (place.slots == 1) {
    store(block + d, x);
  } else {
    store_every_second(block + (place.slot / 2 * dim + d) * 2 + place.slot % 2, x);
  }
}

}  // namespace pdserve
