// What a pass computes: for each layer the five fused operations that it is made of, in their order, with what families
// differ in. kernels/lowering.py writes them down from a ModelSpec; structs.py mirrors the structs.
//
//   ProjectQKV   normed = before(x);  q, k, v = normed · W;  q, k normalised and rotated;  k, v to the pool
//   Attend       att = softmax(cap(scale · q kᵀ)) v
//   AddProduct   x += scale · after(att · W)
//   GateUp       normed = before(x);  inner = activation(normed · W_gate) * (normed · W_up)
//   AddProduct   x += scale · after(inner · W)
//
// A norm that is not used stands for no change.
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

struct LayerOps {
  ProjectQKV qkv;
  Attend attend;
  AddProduct o;
  GateUp gate_up;
  AddProduct down;
};

// What all layers share, and what is done before and after them:
// x = embedding_scale · embedding(token), logits = cap(logit_scale · head(final_norm(x))).
// Heads and inner columns are those of this rank, and so are `head_rows` rows of the head, from `head_begin` on.
struct ModelOps {
  int64_t layers, hidden, heads, kv_heads, head_dim, vocab, head_begin, head_rows;
  NormOp final_norm;
  float embedding_scale, logit_scale;
  float logit_softcap;  // 0: none
};

struct EngineConfig : ModelOps {
  std::vector<LayerOps> ops;  // by layer
  KVPoolView pool;
  KVPoolView window_pool;  // of the layers of group 1, if there are any

  const KVPoolView& pool_of(const Attend& attend) const { return attend.group == 0 ? pool : window_pool; }

  int64_t widest_inner() const {
    int64_t widest = 0;
    for (const LayerOps& layer : ops) widest = std::max<int64_t>(widest, layer.gate_up.inner);
    return widest;
  }
};

}  // namespace pdserve
