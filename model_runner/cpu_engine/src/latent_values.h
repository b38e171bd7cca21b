// Values of latent attention: the beginning of each row, which lies in the pool as a key does (kv_blocks.h). A tile's are
// put into the order of values once for all the queries that read it.
#pragma once

#include <cstdint>

#include "isa/transpose.h"
#include "kv_blocks.h"

namespace pdserve {

// One block of 16 keys, of which the first `dim` dimensions (a multiple of 16) become values [16 / G][dim].
inline void values_of_keys(const uint32_t* keys, int64_t dim, FloatWords, uint32_t* values) {
  for (int64_t d = 0; d < dim; d += kBlockSlots) transpose_words(keys + d * kBlockSlots, values + d, dim);
}

inline void values_of_keys(const uint32_t* keys, int64_t dim, PairWords, uint32_t* values) {
  for (int64_t d = 0; d < dim; d += kBlockSlots) transpose_pairs(keys + d / 2 * kBlockSlots, values + d, dim);
}

}  // namespace pdserve
