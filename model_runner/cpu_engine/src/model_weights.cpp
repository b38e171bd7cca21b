#include "model_weights.h"

#include <algorithm>

#include "packing.h"

namespace pdserve {

template <class T>
ModelWeights<T>::ModelWeights(const EngineConfig& config) : c_(config), layers_(config.layers) {
  const bool whole_panels = config.head_dim % kPanel == 0 && config.pool.dtype == dtype_of<T>();
  for (size_t i = 0; i < layers_.size(); ++i) {
    LayerWeights& layer = layers_[i];
    layer.fused = !config.is_latent() && whole_panels && config.ops[i].qkv.qk_norm == QKNorm::kNone;
    layer.qkv.next = config.latent.q_rank != 0 ? &layer.q_b : &layer.o;
    layer.q_b.next = &layer.o;
    if (config.is_latent()) {
      layer.k_b.resize(config.heads);
      layer.v_b.resize(config.heads);
    }
    const ExpertsOp& experts = config.ops[i].experts;
    layer.experts.resize(experts.count == 0 ? 0 : experts.count + (experts.shared_inner != 0));
    layer.o.next = layer.experts.empty() ? &layer.gate_up : &layer.router;
    layer.gate_up.next = &layer.down;
    layer.down.next = i + 1 < layers_.size() ? &layers_[i + 1].qkv : &head_;
  }
}

template <class T>
bool ModelWeights<T>::set_linear(const LinearPlace& place, const std::vector<WeightPart>& parts, const float* bias,
                                 Team& team) {
  PackedLinear& packed = linear(place);
  packed.product = static_cast<int>(place.kind);
  packed.activations = c_.activations;
  const bool fused = place.kind == LinearKind::kQKV && layers_[place.layer].fused;
  const LinearShape shape = linear_shape(c_, place, fused);
  if (place.kind == LinearKind::kRouter) return pack_linear<float>(shape, parts, bias, arena_, team, packed);
  return pack_linear<T>(shape, parts, bias, arena_, team, packed);
}

template <class T>
void ModelWeights<T>::set_norm(NormKind kind, int64_t layer, const float* weight) {
  int64_t size = c_.hidden;
  if (kind == NormKind::kQ || kind == NormKind::kK) {
    const int64_t heads = kind == NormKind::kQ ? c_.heads : c_.kv_heads;
    size = c_.head_dim * (c_.ops[layer].qkv.qk_norm == QKNorm::kAll ? heads : 1);
    if (c_.is_latent()) size = kind == NormKind::kQ ? c_.latent.q_rank : c_.latent.kv_rank;
  }
  const float* copy = keep(weight, size);
  (kind == NormKind::kFinal ? final_norm_ : layers_[layer].norms[static_cast<int>(kind)]) = copy;
}

template <class T>
void ModelWeights<T>::set_vector(VectorKind kind, int64_t layer, const float* values) {
  const int64_t size = kind == VectorKind::kSinks ? c_.heads : c_.ops[layer].experts.count;
  layers_[layer].vectors[static_cast<int>(kind)] = keep(values, size);
}

template <class T>
const float* ModelWeights<T>::keep(const float* values, int64_t size) {
  float* copy = arena_.allocate<float>(size);
  std::copy_n(values, size, copy);
  return copy;
}

template <class T>
PackedLinear& ModelWeights<T>::linear(const LinearPlace& place) {
  if (place.kind == LinearKind::kHead) return head_;
  LayerWeights& layer = layers_[place.layer];
  if (place.kind == LinearKind::kQB) return layer.q_b;
  if (place.kind == LinearKind::kKB) return layer.k_b[place.expert];
  if (place.kind == LinearKind::kVB) return layer.v_b[place.expert];
  ExpertWeights* expert = layer.experts.empty() ? nullptr : &layer.experts[place.expert];
  switch (place.kind) {
    case LinearKind::kQKV: return layer.qkv;
    case LinearKind::kO: return layer.o;
    case LinearKind::kGateUp: return expert == nullptr ? layer.gate_up : expert->gate_up;
    case LinearKind::kDown: return expert == nullptr ? layer.down : expert->down;
    default: return layer.router;
  }
}

template class ModelWeights<bf16>;
template class ModelWeights<float>;

}  // namespace pdserve
