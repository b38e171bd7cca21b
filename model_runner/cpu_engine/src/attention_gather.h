// Puts the keys and values of small pages together into blocks of 16 slots (kv_blocks.h). Pages of 16 slots and more
// never come here.
#pragma once

#include <cstdint>
#include <cstring>

#include "kv_blocks.h"

namespace pdserve {

// Columns [0, S) of `words` rows of S words go to rows of 16.
template <int S, class Word>
void gather_keys(const Word* from, int64_t words, Word* to) {
  for (int64_t i = 0; i < words; ++i) std::memcpy(to + i * kBlockSlots, from + i * S, S * sizeof(Word));
}

// One page's keys, which are those from `key` of the tile on; `tile` is [kTile / 16][words][16].
template <class Word>
void gather_keys(const Word* from, int slots, int64_t words, int key, Word* tile) {
  Word* to = tile + key / kBlockSlots * words * kBlockSlots + key % kBlockSlots;
  switch (slots) {
    case 1: return gather_keys<1, Word>(from, words, to);
    case 2: return gather_keys<2, Word>(from, words, to);
    case 4: return gather_keys<4, Word>(from, words, to);
    default: return gather_keys<8, Word>(from, words, to);
  }
}

// A row of words from the values of two pages of one slot each; without `second` its halves are 0.
inline void pair_values(const bf16* first, const bf16* second, int64_t dim, uint32_t* to) {
  if (second == nullptr) {
    for (int64_t d = 0; d < dim; ++d) to[d] = first[d].bits;
  } else {
    for (int64_t d = 0; d < dim; ++d) to[d] = first[d].bits | static_cast<uint32_t>(second[d].bits) << 16;
  }
}

// The values of all `pages` of a tile of `count` keys; `tile` is [kTile / G][dim].
template <class Words>
void gather_values(const char* base, const int64_t* pages, int slots, int count, int64_t dim, uint32_t* tile) {
  if (slots < Words::kGroup) {
    for (int key = 0; key < count; key += 2) {
      const auto* second = key + 1 < count ? reinterpret_cast<const bf16*>(base + pages[key + 1]) : nullptr;
      pair_values(reinterpret_cast<const bf16*>(base + pages[key]), second, dim, tile + key / 2 * dim);
    }
    return;
  }
  for (int page = 0; page * slots < count; ++page) {
    std::memcpy(tile + page * slots / Words::kGroup * dim, base + pages[page], slots / Words::kGroup * dim * sizeof(uint32_t));
  }
}

// The same of values of one byte, which lie in pairs; `tile` is [kTile / 2][dim] of them.
inline void gather_byte_values(const uint8_t* base, const int64_t* pages, int slots, int count, int64_t dim,
                               uint8_t* tile) {
  if (slots > 1) {
    for (int page = 0; page * slots < count; ++page) std::memcpy(tile + page * slots * dim, base + pages[page], slots * dim);
    return;
  }
  for (int key = 0; key < count; ++key) {
    uint8_t* to = tile + key / 2 * dim * 2 + key % 2;
    for (int64_t d = 0; d < dim; ++d) to[2 * d] = base[pages[key] + d];
  }
}

}  // namespace pdserve
