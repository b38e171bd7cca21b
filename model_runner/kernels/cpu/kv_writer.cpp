// Keys and values of whole tokens, whatever the types of activations and pool.
#include "kv_writer.h"

namespace pdserve {
namespace {

template <class Pool, class Rows>
void store_rows(const KVPoolView& pool, int64_t layer, const SlotPlace* places, const TokenRows& k, const TokenRows& v,
                int64_t begin, int64_t end) {
  const KVWriter<Pool> writer(pool, layer);
  const int64_t dim = pool.head_dim;
  for (int64_t token = begin; token < end; ++token) {
    const Rows* key = static_cast<const Rows*>(k.data) + token * k.stride;
    if (pool.is_latent()) {
      for (int64_t d = 0; d < dim; d += kLanes) writer.key(places[token], 0, d, load(key + d));
      continue;
    }
    const Rows* value = static_cast<const Rows*>(v.data) + token * v.stride;
    for (int64_t head = 0; head < pool.kv_heads; ++head, key += dim, value += dim) {
      for (int64_t d = 0; d < dim; d += kLanes) {
        writer.key(places[token], head, d, load(key + d));
        writer.value(places[token], head, d, load(value + d));
      }
    }
  }
}

template <class Pool>
void store_rows(const KVPoolView& pool, int64_t layer, const SlotPlace* places, const TokenRows& k, const TokenRows& v,
                int64_t begin, int64_t end) {
  const auto store_them = k.dtype == DType::kFloat32 ? store_rows<Pool, float> : store_rows<Pool, bf16>;
  store_them(pool, layer, places, k, v, begin, end);
}

}  // namespace

void store_kv(const KVPoolView& pool, int64_t layer, const SlotPlace* places, const TokenRows& k, const TokenRows& v,
              int64_t begin, int64_t end) {
  const auto store_them = pool.dtype == DType::kFloat32 ? store_rows<float> : store_rows<bf16>;
  store_them(pool, layer, places, k, v, begin, end);
}

}  // namespace pdserve
