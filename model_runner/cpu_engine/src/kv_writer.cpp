// Keys and values of whole tokens, whatever the types of activations and pool.
#include "kv_writer.h"

#include "kv_quantization.h"

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

// Of elements of one byte.
template <class Codec, class Rows>
void store_quantized(const KVPoolView& pool, int64_t layer, const SlotPlace* places, const TokenRows& k,
                     const TokenRows& v, int64_t begin, int64_t end) {
  const int64_t dim = pool.head_dim, stride = head_stride(pool);
  uint8_t* keys = static_cast<uint8_t*>(pool.data) + layer * 2 * values_offset(pool);
  for (int64_t token = begin; token < end; ++token) {
    const Rows* key = static_cast<const Rows*>(k.data) + token * k.stride;
    const Rows* value = static_cast<const Rows*>(v.data) + token * v.stride;
    uint8_t* block = keys + places[token].block;
    for (int64_t head = 0; head < pool.kv_heads; ++head, key += dim, value += dim, block += stride) {
      quantize_key<Codec>(key, dim, block, places[token]);
      quantize_value<Codec>(value, dim, block + values_offset(pool), places[token]);
    }
  }
}

template <class Codec>
void store_quantized(const KVPoolView& pool, int64_t layer, const SlotPlace* places, const TokenRows& k,
                     const TokenRows& v, int64_t begin, int64_t end) {
  const auto store_them = k.dtype == DType::kFloat32 ? store_quantized<Codec, float> : store_quantized<Codec, bf16>;
  store_them(pool, layer, places, k, v, begin, end);
}

}  // namespace

void store_kv(const KVPoolView& pool, int64_t layer, const SlotPlace* places, const TokenRows& k, const TokenRows& v,
              int64_t begin, int64_t end) {
  switch (pool.dtype) {
    case DType::kFloat32: return store_rows<float>(pool, layer, places, k, v, begin, end);
    case DType::kBFloat16: return store_rows<bf16>(pool, layer, places, k, v, begin, end);
    case DType::kInt8: return store_quantized<Int8>(pool, layer, places, k, v, begin, end);
    case DType::kFp8E4M3: return store_quantized<Fp8E4M3>(pool, layer, places, k, v, begin, end);
    case DType::kFp8E5M2: return store_quantized<Fp8E5M2>(pool, layer, places, k, v, begin, end);
  }
}

}  // namespace pdserve
