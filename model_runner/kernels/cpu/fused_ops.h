// The fused operations of a pass as one thread computes them, on some rows (tokens) and some panels of weights: a
// product, and in its finish all that needs no other element of the row. Who does which is layer_pass.h's to say.
#pragma once

#include <algorithm>
#include <vector>

#include "activations.h"
#include "elementwise.h"
#include "kv_writer.h"
#include "linear_pass.h"
#include "model_weights.h"
#include "pass_division.h"

namespace pdserve {

// What the threads of a pass share.
template <class T>
struct EngineState {
  EngineState(const EngineConfig& config, Team& team)
      : c(config),
        strides(config),
        fused(config.head_dim % kPanel == 0 && !config.qk_norm && config.pool.dtype == kDType),
        team(team),
        weights(config, fused),
        activations(strides),
        own(team.size()) {
    for (auto& thread : own) thread.allocate(arena, strides);
  }

  static constexpr DType kDType = sizeof(T) == 2 ? DType::kBFloat16 : DType::kFloat32;

  const EngineConfig c;
  const Strides strides;
  const bool fused;  // rotation and the store to the pool happen as qkv is computed
  Team& team;
  ModelWeights<T> weights;
  Activations<T> activations;
  Arena arena;
  std::vector<ThreadActivations<T>> own;
  AttentionPlan plan;
};

// The tokens that a pass goes on with: all of them, or in the end those whose logits are wanted.
template <class T>
struct PassRows {
  const Division& division;
  int64_t tokens;
  float* x;  // [tokens, x]: the residual
  T* att;    // [tokens, att]
};

template <class T>
class FusedOps {
 public:
  FusedOps(EngineState<T>& state, const ForwardArgs& args, int tid)
      : state_(state), args_(args), own_(state.own[tid]), tid_(tid) {}

  // Rows of `out` count from the first of `rows`.
  void normalise(const float* weight, const PassRows<T>& pass, Range rows, T* out) const {
    for (int64_t t = rows.begin; t < rows.end; ++t, out += state_.strides.normed) {
      rms_norm(pass.x + t * state_.strides.x, weight, c_.eps, static_cast<int>(c_.hidden), out);
    }
  }

  // `a`: of the cell's first row. Fused, keys and values go to the pool; else they wait for rotate_and_store.
  void project_qkv(int64_t layer, const PassRows<T>& pass, const T* a, const Cell& cell) {
    const PackedLinear& weight = state_.weights.layer(layer).qkv;
    if (state_.fused) return project_rotate_and_store(layer, pass, a, cell);
    multiply(weight, pass, a, c_.hidden, cell, [&](int64_t t, int64_t panel, Columns y) {
      T* out = activations_.qkv + t * state_.strides.qkv + panel * kPanel;
      store(out, y.left);
      store(out + kLanes, y.right);
    });
  }

  void rotate_and_store(int64_t index, Range rows) {
    const LayerWeights& layer = state_.weights.layer(index);
    const int dim = static_cast<int>(c_.head_dim);
    const int64_t stride = state_.strides.qkv;
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const int64_t angle = args_.positions[t] * (dim / 2);
      for (int64_t h = 0; h < c_.heads + c_.kv_heads; ++h) {
        T* head = activations_.qkv + t * stride + h * dim;
        if (c_.qk_norm) rms_norm(head, h < c_.heads ? layer.q_norm : layer.k_norm, c_.eps, dim, head);
        rope(head, args_.cos + angle, args_.sin + angle, dim);
      }
    }
    T* k = activations_.qkv + c_.heads * dim;
    T* v = k + c_.kv_heads * dim;
    store_kv(c_.pool, index, activations_.places, {k, state_.kDType, stride}, {v, state_.kDType, stride}, rows.begin,
             rows.end);
  }

  // x += product. `a`: of the cell's first row.
  void add_product(const PackedLinear& weight, const PassRows<T>& pass, const T* a, int64_t stride, const Cell& cell) {
    multiply(weight, pass, a, stride, cell, [&](int64_t t, int64_t panel, Columns y) {
      float* x = pass.x + t * state_.strides.x + panel * kPanel;
      store(x, load(x) + y.left);
      store(x + kLanes, load(x + kLanes) + y.right);
    });
  }

  // `a`: of the cell's first row; `out`: of row 0.
  void gate(const PackedLinear& weight, const PassRows<T>& pass, const T* a, const Cell& cell, T* out) {
    multiply(weight, pass, a, c_.hidden, cell, [&](int64_t t, int64_t panel, Columns y) {
      store(out + t * state_.strides.inner + panel * kLanes, silu(y.left) * y.right);
    });
  }

  // Logits; `a`: of the cell's first row.
  void project_head(const PassRows<T>& pass, const T* a, const Cell& cell) {
    multiply(state_.weights.head(), pass, a, c_.hidden, cell, [&](int64_t t, int64_t panel, Columns y) {
      float* out = args_.logits + t * c_.vocab + panel * kPanel;
      if ((panel + 1) * kPanel <= c_.vocab) {
        store(out, y.left);
        store(out + kLanes, y.right);
      } else {
        float both[kPanel];
        store(both, y.left);
        store(both + kLanes, y.right);
        std::copy_n(both, c_.vocab - panel * kPanel, out);
      }
    });
  }

 private:
  void project_rotate_and_store(int64_t layer, const PassRows<T>& pass, const T* a, const Cell& cell) {
    const int64_t dim = c_.head_dim, half = dim / 2, per_head = dim / kPanel;
    const KVWriter<T> pool(c_.pool, layer);
    multiply(state_.weights.layer(layer).qkv, pass, a, c_.hidden, cell, [&](int64_t t, int64_t panel, Columns y) {
      const int64_t head = panel / per_head, part = panel % per_head, d = part * kLanes;
      if (head >= c_.heads + c_.kv_heads) {
        const int64_t of = head - c_.heads - c_.kv_heads;
        pool.value(activations_.places[t], of, 2 * d, y.left);
        pool.value(activations_.places[t], of, 2 * d + kLanes, y.right);
        return;
      }
      const int64_t angle = args_.positions[t] * half + d;
      const Vec cos = load(args_.cos + angle), sin = load(args_.sin + angle);
      const Columns rotated{y.left * cos - y.right * sin, y.right * cos + y.left * sin};
      if (head >= c_.heads) {
        pool.key(activations_.places[t], head - c_.heads, d, rotated.left);
        pool.key(activations_.places[t], head - c_.heads, d + half, rotated.right);
        return;
      }
      T* out = activations_.qkv + t * state_.strides.qkv + head * dim + d;
      store(out, rotated.left);
      store(out + half, rotated.right);
    });
  }

  // `finish(t, panel, columns)` takes the results of the cell; then the thread asks for the first bytes of the product
  // that the pass goes on with.
  template <class Finish>
  void multiply(const PackedLinear& weight, const PassRows<T>& pass, const T* a, int64_t stride, const Cell& cell,
                Finish&& finish) {
    pdserve::multiply(weight, own_.linear, a, stride, cell.rows.size(), cell.panels,
                      [&](int64_t m, int64_t panel, Columns y) { finish(cell.rows.begin + m, panel, y); });
    if (weight.next == nullptr) return;
    const Division& division = pass.division;
    fetch_first(*weight.next,
                division.by_rows ? 0 : division.cell_of(*weight.next, pass.tokens, tid_).panels.begin);
  }

  EngineState<T>& state_;
  const EngineConfig& c_ = state_.c;
  Activations<T>& activations_ = state_.activations;
  const ForwardArgs& args_;
  ThreadActivations<T>& own_;
  const int tid_;
};

}  // namespace pdserve
