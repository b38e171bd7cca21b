#include "model_weights.h"

#include <algorithm>

#include "packing.h"

namespace pdserve {

template <class T>
ModelWeights<T>::ModelWeights(const EngineConfig& config, bool fused)
    : c_(config), fused_(fused), layers_(config.layers) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    LayerWeights& layer = layers_[i];
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
  return pack_linear<T>(linear_shape(c_, kind, fused_), parts, bias, arena_, team, packed);
}

template <class T>
void ModelWeights<T>::set_norm(NormKind kind, int64_t layer, const float* weight) {
  const bool of_head = kind == NormKind::kQ || kind == NormKind::kK;
  const int64_t size = of_head ? c_.head_dim : c_.hidden;
  float* copy = arena_.allocate<float>(size);
  std::copy_n(weight, size, copy);
  norm(kind, layer) = copy;
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

template <class T>
const float*& ModelWeights<T>::norm(NormKind kind, int64_t layer) {
  switch (kind) {
    case NormKind::kAttention: return layers_[layer].attention_norm;
    case NormKind::kMlp: return layers_[layer].mlp_norm;
    case NormKind::kQ: return layers_[layer].q_norm;
    case NormKind::kK: return layers_[layer].k_norm;
    case NormKind::kFinal: break;
  }
  return final_norm_;
}

template class ModelWeights<bf16>;
template class ModelWeights<float>;

}  // namespace pdserve
