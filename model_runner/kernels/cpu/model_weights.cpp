#include "model_weights.h"

#include <algorithm>

#include "packing.h"

namespace pdserve {

template <class T>
ModelWeights<T>::ModelWeights(const EngineConfig& config) : c_(config), layers_(config.layers) {
  const bool whole_panels = config.head_dim % kPanel == 0 && config.pool.dtype == dtype_of<T>();
  for (size_t i = 0; i < layers_.size(); ++i) {
    LayerWeights& layer = layers_[i];
    layer.fused = whole_panels && config.ops[i].qkv.qk_norm == QKNorm::kNone;
    layer.qkv.next = &layer.o;
    layer.o.next = &layer.gate_up;
    layer.gate_up.next = &layer.down;
    layer.down.next = i + 1 < layers_.size() ? &layers_[i + 1].qkv : &head_;
  }
}

template <class T>
bool ModelWeights<T>::set_linear(LinearKind kind, int64_t layer, const std::vector<WeightPart>& parts,
                                 const float* bias, Team& team) {
  PackedLinear& packed = linear(kind, layer);
  packed.product = static_cast<int>(kind);
  const bool fused = kind == LinearKind::kQKV && layers_[layer].fused;
  return pack_linear<T>(linear_shape(c_, kind, layer, fused), parts, bias, arena_, team, packed);
}

template <class T>
void ModelWeights<T>::set_norm(NormKind kind, int64_t layer, const float* weight) {
  int64_t size = c_.hidden;
  if (kind == NormKind::kQ || kind == NormKind::kK) {
    const int64_t heads = kind == NormKind::kQ ? c_.heads : c_.kv_heads;
    size = c_.head_dim * (c_.ops[layer].qkv.qk_norm == QKNorm::kAll ? heads : 1);
  }
  float* copy = arena_.allocate<float>(size);
  std::copy_n(weight, size, copy);
  (kind == NormKind::kFinal ? final_norm_ : layers_[layer].norms[static_cast<int>(kind)]) = copy;
}

template <class T>
PackedLinear& ModelWeights<T>::linear(LinearKind kind, int64_t layer) {
  switch (kind) {
    case LinearKind::kQKV: return layers_[layer].qkv;
    case LinearKind::kO: return layers_[layer].o;
    case LinearKind::kGateUp: return layers_[layer].gate_up;
    case LinearKind::kDown: return layers_[layer].down;
    case LinearKind::kHead: break;
  }
  return head_;
}

template class ModelWeights<bf16>;
template class ModelWeights<float>;

}  // namespace pdserve
