// The fused operations of a pass as one thread computes them, on some rows (tokens) and some panels of weights: a
// product, and in its finish all that needs no other element of the row. Who does which is layer_pass.h's to say.
#pragma once

#include <algorithm>
#include <vector>

#include "activations.h"
#include "attention_plans.h"
#include "elementwise.h"
#include "kv_writer.h"
#include "linear_pass.h"
#include "model_weights.h"
#include "pass_division.h"
#include "rank_group.h"

namespace pdserve {

// What the threads of a pass share.
template <class T>
struct EngineState {
  EngineState(const EngineConfig& config, Team& team, RankGroup* ranks)
      : c(config),
        strides(config),
        team(team),
        ranks(ranks),
        weights(c),
        activations(strides),
        own(team.capacity()),
        plans(c) {
    for (auto& thread : own) thread.allocate(arena, strides);
  }

  const EngineConfig c;
  const Strides strides;
  Team& team;
  RankGroup* const ranks;  // null: this is the only one
  uint32_t exchanges = 0;  // with the other ranks, up to the last pass
  ModelWeights<T> weights;
  Activations<T> activations;
  Arena arena;
  std::vector<ThreadActivations<T>> own;
  AttentionPlans plans;
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
  void normalise(const NormOp& op, const float* weight, const PassRows<T>& pass, Range rows, T* out) const {
    const int size = static_cast<int>(c_.hidden);
    for (int64_t t = rows.begin; t < rows.end; ++t, out += state_.strides.normed) {
      const float* x = pass.x + t * state_.strides.x;
      if (op.used) {
        rms_norm(x, weight, op.eps, size, out);
      } else {
        copy_row(x, size, out);
      }
    }
  }

  // `a`: of the cell's first row. Fused, keys and values go to the pool; else they wait for rotate_and_store.
  void project_qkv(int64_t layer, const PassRows<T>& pass, const T* a, const Cell& cell) {
    const PackedLinear& weight = state_.weights.layer(layer).qkv;
    if (state_.weights.layer(layer).fused) return project_rotate_and_store(layer, pass, a, cell);
    multiply(weight, pass, a, c_.hidden, cell, [&](int64_t t, int64_t panel, Columns y) {
      T* out = activations_.qkv + t * state_.strides.qkv + panel * kPanel;
      store(out, y.left);
      store(out + kLanes, y.right);
    });
  }

  void rotate_and_store(int64_t index, Range rows) {
    const ProjectQKV& op = c_.ops[index].qkv;
    const LayerWeights& layer = state_.weights.layer(index);
    const RopeTable table = table_of(op);
    const int dim = static_cast<int>(c_.head_dim);
    const int64_t stride = state_.strides.qkv, keys = c_.heads * dim, values = keys + c_.kv_heads * dim;
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      T* q = activations_.qkv + t * stride;
      normalise_heads(op, layer.norm(NormKind::kQ), c_.heads, q);
      normalise_heads(op, layer.norm(NormKind::kK), c_.kv_heads, q + keys);
      if (table.cos == nullptr) continue;
      const int64_t angle = args_.positions[t] * (dim / 2);
      for (T* head = q; head < q + values; head += dim) rope(head, table.cos + angle, table.sin + angle, dim);
    }
    constexpr DType type = dtype_of<T>();
    T* first = activations_.qkv;
    const Attend& attend = c_.ops[index].attend;
    store_kv(c_.pool_of(attend), attend.place, activations_.places[attend.group], {first + keys, type, stride},
             {first + values, type, stride}, rows.begin, rows.end);
  }

  // x += scale · product; but where a norm comes between, or other ranks have parts of the sums, these wait in `sums`,
  // [T, x], for add_normed or add_parts. `a`: of the cell's first row.
  void add_product(const AddProduct& op, const PackedLinear& weight, const PassRows<T>& pass, const T* a,
                   int64_t stride, const Cell& cell, float* sums) {
    if (sums != nullptr) {
      multiply(weight, pass, a, stride, cell, [&](int64_t t, int64_t panel, Columns y) {
        float* out = sums + t * state_.strides.x + panel * kPanel;
        store(out, y.left);
        store(out + kLanes, y.right);
      });
      return;
    }
    const Vec scale = broadcast(op.scale);
    multiply(weight, pass, a, stride, cell, [&](int64_t t, int64_t panel, Columns y) {
      float* x = pass.x + t * state_.strides.x + panel * kPanel;
      store(x, fma(y.left, scale, load(x)));
      store(x + kLanes, fma(y.right, scale, load(x + kLanes)));
    });
  }

  // The sums of all ranks' parts, in the ranks' order: x += scale · sum, or to where add_normed looks for them.
  void add_parts(const AddProduct& op, const PassRows<T>& pass, uint32_t exchange, Range rows) const {
    const RankGroup& ranks = *state_.ranks;
    const Vec scale = broadcast(op.scale);
    for (int64_t i = rows.begin * state_.strides.x; i < rows.end * state_.strides.x; i += kLanes) {
      Vec sum = load(ranks.part(exchange, 0) + i);
      for (int rank = 1; rank < ranks.size(); ++rank) sum = sum + load(ranks.part(exchange, rank) + i);
      if (op.after.used) {
        store(activations_.sums + i, sum);
      } else {
        store(pass.x + i, fma(sum, scale, load(pass.x + i)));
      }
    }
  }

  void add_normed(const AddProduct& op, const float* weight, const PassRows<T>& pass, Range rows) const {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const int64_t at = t * state_.strides.x;
      add_rms_norm(activations_.sums + at, weight, op.after.eps, op.scale, static_cast<int>(c_.hidden), pass.x + at);
    }
  }

  // `a`: of the cell's first row; `out`: of row 0.
  void gate_up(const GateUp& op, const PackedLinear& weight, const PassRows<T>& pass, const T* a, const Cell& cell,
               T* out) {
    const auto gate = [&](auto&& activation) {
      multiply(weight, pass, a, c_.hidden, cell, [&](int64_t t, int64_t panel, Columns y) {
        store(out + t * state_.strides.inner + panel * kLanes, activation(y.left) * y.right);
      });
    };
    switch (op.activation) {
      case Activation::kSilu: return gate([](Vec x) { return silu(x); });
      case Activation::kGelu: return gate([](Vec x) { return gelu(x); });
      case Activation::kGeluTanh: return gate([](Vec x) { return gelu_tanh(x); });
    }
  }

  // The first bytes of what the pass goes on with.
  void fetch_next(const PackedLinear& weight, const PassRows<T>& pass) const {
    if (weight.next == nullptr) return;
    const Division& division = pass.division;
    fetch_first(*weight.next,
                division.by_rows ? 0 : division.cell_of(*weight.next, pass.tokens, tid_).panels.begin);
  }

  // Logits of this rank's rows of the head, into `logits` [L, V]; `a`: of the cell's first row.
  void project_head(const PassRows<T>& pass, const T* a, const Cell& cell, float* logits) {
    const Vec scale = broadcast(c_.logit_scale);
    const float softcap = c_.logit_softcap;
    multiply(state_.weights.head(), pass, a, c_.hidden, cell, [&](int64_t t, int64_t panel, Columns y) {
      y = {y.left * scale, y.right * scale};
      if (softcap != 0.0f) y = {cap(y.left, softcap), cap(y.right, softcap)};
      float* out = logits + t * c_.vocab + c_.head_begin + panel * kPanel;
      if ((panel + 1) * kPanel <= c_.head_rows) {
        store(out, y.left);
        store(out + kLanes, y.right);
      } else {
        float both[kPanel];
        store(both, y.left);
        store(both + kLanes, y.right);
        std::copy_n(both, c_.head_rows - panel * kPanel, out);
      }
    });
  }

 private:
  static Vec cap(Vec logits, float softcap) {
    return broadcast(softcap) * tanh(logits / broadcast(softcap));
  }

  RopeTable table_of(const ProjectQKV& op) const { return op.rope < 0 ? RopeTable{} : args_.ropes[op.rope]; }

  void normalise_heads(const ProjectQKV& op, const float* weight, int64_t heads, T* first) const {
    if (op.qk_norm == QKNorm::kNone) return;
    const int64_t together = op.qk_norm == QKNorm::kAll ? heads : 1, size = together * c_.head_dim;
    for (T* x = first; x < first + heads * c_.head_dim; x += size) {
      rms_norm(x, weight, op.qk_eps, static_cast<int>(size), x);
    }
  }

  void project_rotate_and_store(int64_t layer, const PassRows<T>& pass, const T* a, const Cell& cell) {
    const int64_t dim = c_.head_dim, half = dim / 2, per_head = dim / kPanel;
    const Attend& attend = c_.ops[layer].attend;
    const KVWriter<T> pool(c_.pool_of(attend), attend.place);
    const SlotPlace* places = activations_.places[attend.group];
    const RopeTable table = table_of(c_.ops[layer].qkv);
    multiply(state_.weights.layer(layer).qkv, pass, a, c_.hidden, cell, [&](int64_t t, int64_t panel, Columns y) {
      const int64_t head = panel / per_head, part = panel % per_head, d = part * kLanes;
      if (head >= c_.heads + c_.kv_heads) {
        const int64_t of = head - c_.heads - c_.kv_heads;
        pool.value(places[t], of, 2 * d, y.left);
        pool.value(places[t], of, 2 * d + kLanes, y.right);
        return;
      }
      Columns rotated = y;
      if (table.cos != nullptr) {
        const int64_t angle = args_.positions[t] * half + d;
        const Vec cos = load(table.cos + angle), sin = load(table.sin + angle);
        rotated = {y.left * cos - y.right * sin, y.right * cos + y.left * sin};
      }
      if (head >= c_.heads) {
        pool.key(places[t], head - c_.heads, d, rotated.left);
        pool.key(places[t], head - c_.heads, d + half, rotated.right);
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
    fetch_next(weight, pass);
  }

  EngineState<T>& state_;
  const EngineConfig& c_ = state_.c;
  Activations<T>& activations_ = state_.activations;
  const ForwardArgs& args_;
  ThreadActivations<T>& own_;
  const int tid_;
};

}  // namespace pdserve
