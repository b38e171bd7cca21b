// Writes keys and values to their slots of the pool.
#pragma once

#include <cstdint>

#include "attention.h"
#include "kv_blocks.h"

namespace pdserve {

// One layer of a pool of elements of type `Pool`. Places are those of find_slot.
template <class Pool>
class KVWriter {
 public:
  KVWriter(const KVPoolView& pool, int64_t layer)
      : dim_(pool.head_dim),
        head_stride_(head_stride(pool)),
        keys_(static_cast<Pool*>(pool.data) + layer * pool.layer_size()),
        values_(keys_ + values_offset(pool)) {}

  // Dimensions [d, d + 16) of a token's key of `head`.
  void key(const SlotPlace& place, int64_t head, int64_t d, Vec x) const {
    store_key_block(keys_ + place.block + head * head_stride_, place, d, x);
  }

  void value(const SlotPlace& place, int64_t head, int64_t d, Vec x) const {
    store_value_block(values_ + place.block + head * head_stride_, place, dim_, d, x);
  }

 private:
  const int64_t dim_, head_stride_;
  Pool *const keys_, *const values_;
};

// Writes k and v (K heads a token, of one type; latent rows are k alone) of tokens [begin, end) to `places` ([T]) of `layer`.
void store_kv(const KVPoolView& pool, int64_t layer, const SlotPlace* places, const TokenRows& k, const TokenRows& v,
              int64_t begin, int64_t end);

}  // namespace pdserve
