// The weights of a model as a pass reads them: packed, in the order in which it does. They lie in memory of the caller.
#pragma once

#include <vector>

#include "engine.h"
#include "linear.h"

namespace pdserve {

struct ExpertWeights {
  PackedLinear gate_up, down;
};

struct LayerWeights {
  PackedLinear qkv, o, gate_up, down;
  PackedLinear q_b;                    // of latent attention
  std::vector<PackedLinear> k_b, v_b;  // by head
  PackedLinear router;                 // float32, whatever the rest is
  std::vector<ExpertWeights> experts;  // in the place of gate_up and down, the shared one last
  bool fused = false;                  // rotation and the store to the pool happen as qkv is computed
  const float* norms[kLayerNorms] = {};
  const float* vectors[kLayerVectors] = {};

  const float* norm(NormKind kind) const { return norms[static_cast<int>(kind)]; }
  const float* vector(VectorKind kind) const { return vectors[static_cast<int>(kind)]; }  // null: there is none
};

template <class T>
class ModelWeights {
 public:
  explicit ModelWeights(const EngineConfig& config);

  // As in EngineBase.
  bool set_linear(const LinearPlace& place, const std::vector<WeightPart>& parts, const uint8_t* panels,
                  const float* bias);
  void set_norm(NormKind kind, int64_t layer, const float* weight);
  void set_vector(VectorKind kind, int64_t layer, const float* values);
  void set_embedding(const void* table) { embedding_ = static_cast<const T*>(table); }

  const LayerWeights& layer(int64_t index) const { return layers_[index]; }
  const std::vector<LayerWeights>& layers() const { return layers_; }
  const PackedLinear& head() const { return head_; }
  const float* final_norm() const { return final_norm_; }
  // Writes the embedding of a token, times `scale`: x[N].
  void embed(int64_t token, float scale, float* x) const;

 private:
  PackedLinear& linear(const LinearPlace& place);

  const EngineConfig& c_;
  std::vector<LayerWeights> layers_;
  PackedLinear head_;
  const float* final_norm_ = nullptr;
  const T* embedding_ = nullptr;
};

}  // namespace pdserve
