#include "model_weights.h"

#include "packing.h"

namespace pdserve {

template <class T>
ModelWeights<T>::ModelWeights(const EngineConfig& config) : c_(config), layers_(config.layers) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    LayerWeights& layer = layers_[i];
    layer.fused = is_fused(config, dtype_of<T>(), static_cast<int64_t>(i));
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
bool ModelWeights<T>::set_linear(const LinearPlace& place, const std::vector<WeightPart>& parts, const uint8_t* panels,
                                 const float* bias) {
  PackedLinear& packed = linear(place);
  packed.product = static_cast<int>(place.kind);
  packed.activations = c_.activations;
  packed.bias = bias;
  const LinearShape shape = linear_shape(c_, dtype_of<T>(), place);
  if (place.kind == LinearKind::kRouter) return arrange_linear<float>(shape, parts, panels, packed);
  return arrange_linear<T>(shape, parts, panels, packed);
}

template <class T>
void ModelWeights<T>::set_norm(NormKind kind, int64_t layer, const float* weight) {
  (kind == NormKind::kFinal ? final_norm_ : layers_[layer].norms[static_cast<int>(kind)]) = weight;
}

template <class T>
void ModelWeights<T>::set_vector(VectorKind kind, int64_t layer, const float* values) {
  layers_[layer].vectors[static_cast<int>(kind)] = values;
}

template <class T>
void ModelWeights<T>::embed(int64_t token, float scale, float* x) const {
  const int64_t hidden = c_.hidden;
  if (embedding_ == nullptr) {
    const int64_t panel = token / kPanel;
    const auto* data = reinterpret_cast<const T*>(head_.of(panel).panel(panel));
    unpack_dense_column(data, static_cast<int>(token % kPanel), hidden, scale, x);
    return;
  }
  const T* row = embedding_ + token * hidden;
  for (int64_t i = 0; i < hidden; ++i) x[i] = scale * to_float(row[i]);
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
