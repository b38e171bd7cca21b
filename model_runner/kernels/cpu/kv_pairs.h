// The pool's order for bfloat16 dot products: keys and values lie as multiply reads them, so that attention neither
// gathers nor transposes anything, and streams pages from memory as fast as the bus brings them.
//
// The span of a (page, layer, keys or values) is [page_size / 16][K heads] blocks of 16 slots. A block is made of 32-bit
// words, pairs of bfloat16:
//   keys:   [D / 2][16 slots]   a word holds dimensions 2 i and 2 i + 1 of a slot
//   values: [8][D]              a word holds a dimension of slots 2 i and 2 i + 1
// Size, and the place of a page, a layer and a slot's block of 16, are the same as in token order.
#pragma once

#include <cstdint>

#include "attention.h"
#include "simd.h"

namespace pdserve {

constexpr int kBlockSlots = 16;

// A slot's keys in a layer: where the first head's block begins, in elements, and the slot's place in a block.
struct PairsPlace {
  int64_t block;
  int slot;
};

inline PairsPlace find_pairs(const KVPoolView& pool, int64_t layer, int64_t slot) {
  const int64_t size = pool.page_size, first = slot % size / kBlockSlots * kBlockSlots;
  return {((slot / size * pool.num_layers + layer) * 2 * size + first) * pool.kv_heads * pool.head_dim,
          static_cast<int>(slot % kBlockSlots)};
}

#if defined(__AVX512BF16__)

// Dimensions [d, d + 16) of a slot's key; `block` is the head's, `slot` below 16.
inline void store_key_pairs(bf16* block, int slot, int64_t d, Vec x) {
  alignas(32) uint32_t words[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), (__m256i)_mm512_cvtneps_pbh(x.v));
  uint32_t* out = reinterpret_cast<uint32_t*>(block) + d / 2 * kBlockSlots + slot;
  for (int i = 0; i < 8; ++i) out[i * kBlockSlots] = words[i];
}

// Dimensions [d, d + 16) of a slot's value. Its neighbour's halves are left alone, also while another thread writes them.
inline void store_value_pairs(bf16* block, int slot, int64_t dim, int64_t d, Vec x) {
  const __m512i halves = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v));
  bf16* out = block + (slot / 2 * dim + d) * 2;
  if (slot % 2 == 0) {
    _mm512_mask_storeu_epi16(out, 0x55555555u, halves);
  } else {
    _mm512_mask_storeu_epi16(out, 0xaaaaaaaau, _mm512_slli_epi32(halves, 16));
  }
}

#endif

}  // namespace pdserve
