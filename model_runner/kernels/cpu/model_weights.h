// The weights of a model as a pass reads them: packed, in the order in which it does.
#pragma once

#include <vector>

#include "arena.h"
#include "engine.h"
#include "linear.h"
#include "team.h"

namespace pdserve {

struct LayerWeights {
  PackedLinear qkv, o, gate_up, down;
  bool fused = false;  // rotation and the store to the pool happen as qkv is computed
  const float* norms[kLayerNorms] = {};

  const float* norm(NormKind kind) const { return norms[static_cast<int>(kind)]; }
};

template <class T>
class ModelWeights {
 public:
  explicit ModelWeights(const EngineConfig& config);

  // As in EngineBase.
  bool set_linear(LinearKind kind, int64_t layer, const std::vector<WeightPart>& parts, const float* bias, Team& team);
  void set_norm(NormKind kind, int64_t layer, const float* weight);
  void set_embedding(const void* table) { embedding_ = static_cast<const T*>(table); }

  const LayerWeights& layer(int64_t index) const { return layers_[index]; }
  const PackedLinear& head() const { return head_; }
  const float* final_norm() const { return final_norm_; }
  const T* embedding() const { return embedding_; }  // [V, N]

 private:
  PackedLinear& linear(LinearKind kind, int64_t layer);

  const EngineConfig& c_;
  Arena arena_;
  std::vector<LayerWeights> layers_;
  PackedLinear head_;
  const float* final_norm_ = nullptr;
  const T* embedding_ = nullptr;
};

}  // namespace pdserve
