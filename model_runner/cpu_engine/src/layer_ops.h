// What a pass computes: for each layer the five fused operations that it is made of, in their order, with what families
// differ in. cpu_engine/lowering.py writes them down from a ModelSpec; structs.py mirrors the structs.
//
//   ProjectQKV   normed = before(x);  q, k, v = normed · W;  q, k normalised and rotated;  k, v to the pool
//   Attend       att = softmax(cap(scale · q kᵀ)) v
//   AddProduct   x += scale · after(att · W)
//   GateUp       normed = before(x);  inner = activation(normed · W_gate) * (normed · W_up)
//   AddProduct   x += scale · after(inner · W)
//
// A norm that is not used stands for no change. Where a layer has experts, the last two are of each of them, and what is
// added is the sum of those that a token has chosen, each times its weight; and of the shared one, which every token has:
//
//   ExpertsOp    logits = normed · W_router;  chosen experts and their weights (expert_choice.h)
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace pdserve {

// x / rms(x) * weight.
struct NormOp {
  int32_t used;
  float eps;
};

// What of q and k is normalised before it is rotated: nothing, each head by itself, or all heads together.
enum class QKNorm : int32_t { kNone = 0, kHead = 1, kAll = 2 };

struct ProjectQKV {
  NormOp before;
  QKNorm qk_norm;
  float qk_eps;
  int32_t rope;  // index into ForwardArgs::ropes; negative: the layer does not know positions
};

struct Attend {
  float scale;
  float softcap;   // cap(s) = softcap · tanh(s / softcap); 0: s
  int32_t window;  // a token sees itself and the window - 1 before it; 0: all
  int32_t group;   // of pages: 0, those that rows name; 1, those that ForwardArgs::window_pages leads to
  int32_t place;   // of the layer among those of its group
};

// Latent attention, in the place of what ProjectQKV and Attend say, but for `before`, `rope` and `scale`: MLASpec of
// model_files/spec.py in its absorbed form. With normed = before(x),
//   latent, row = normed · W;  q, q' = norm(latent) · q_b, by head;  c, k = row
//   the pool keeps [norm(c), rope(k)];  att = softmax(scale · [k_bᵀ q, rope(q')] [c, k]ᵀ) c;  the heads' outputs are v_b att
struct LatentOp {
  int32_t kv_rank;  // 0: there is none
  int32_t q_rank;   // 0: queries are projected from the hidden state
  int32_t nope_dim, rope_dim, value_dim;
  float eps;

  int64_t qk_dim() const { return nope_dim + rope_dim; }
};

struct AddProduct {
  NormOp after;
  float scale;
};

// The values are part of the interface to Python.
enum class Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

struct GateUp {
  NormOp before;
  Activation activation;
  int32_t inner;  // columns of each of its two products
};

enum class ExpertScoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

// By what groups of experts are compared: by the largest score in them, or the sum of the two largest.
enum class GroupScore : int32_t { kLargest = 0, kTwoLargest = 1 };

// ExpertsSpec of model_files/spec.py. Each expert is what GateUp says, but for its activation where there is a limit.
struct ExpertsOp {
  int32_t count;  // 0: the layer has an ordinary network
  int32_t chosen;
  ExpertScoring scoring;
  int32_t normalised;
  float weight_scale;
  float limit;  // (up' + 1) gate' sigmoid(1.702 gate'), gate' = min(gate, limit), |up'| <= limit; 0: GateUp's activation
  int32_t groups, groups_chosen;
  GroupScore group_score;
  int32_t shared_inner;  // 0: there is no shared expert
  Activation shared_activation;
  int32_t shared_gate;  // its weight is the sigmoid of the router's row behind those of the experts; else 1

  // Of the router.
  int64_t rows() const { return count + shared_gate; }
};

struct LayerOps {
  ProjectQKV qkv;
  Attend attend;
  AddProduct o;
  GateUp gate_up;
  AddProduct down;
  ExpertsOp experts;
};

// What all layers share, and what is done before and after them:
// x = embedding_scale · embedding(token), logits = cap(logit_scale · head(final_norm(x))).
// Heads and inner columns are those of this rank, and so are `head_rows` rows of the head, from `head_begin` on.
struct ModelOps {
  int64_t layers, hidden, heads, kv_heads, head_dim, vocab, head_begin, head_rows;
  NormOp final_norm;
  float embedding_scale, logit_scale;
  float logit_softcap;  // 0: none
  LatentOp latent;      // of every layer: then head_dim is that of a row
  ActivationDType activations;  // what they are rounded to where weights are quantised
};

struct EngineConfig : ModelOps {
  std::vector<LayerOps> ops;  // by layer
  KVPoolView pool;
  KVPoolView window_pool;  // of the layers of group 1, if there are any

  const KVPoolView& pool_of(const Attend& attend) const { return attend.group == 0 ? pool : window_pool; }

  bool is_latent() const { return latent.kv_rank != 0; }
  // Of the heads' outputs, all together.
  int64_t attended() const { return heads * (is_latent() ? latent.value_dim : head_dim); }

  // Of ordinary networks.
  int64_t widest_inner() const {
    int64_t widest = 0;
    for (const LayerOps& layer : ops) {
      if (layer.experts.count == 0) widest = std::max<int64_t>(widest, layer.gate_up.inner);
    }
    return widest;
  }
};

}  // namespace pdserve
