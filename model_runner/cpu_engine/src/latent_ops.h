// Latent attention (LatentOp of layer_ops.h) as one thread computes it, on some rows (tokens) and some panels of weights;
// who does which is layer_pass.h's to say. The products by head lie side by side, as it were: panel p of the layer's is
// that of head p / panels of a head.
#pragma once

#include <algorithm>

#include "fused_ops.h"

namespace pdserve {

template <class T>
class LatentOps {
 public:
  LatentOps(EngineState<T>& state, const ForwardArgs& args, int64_t layer, int tid)
      : state_(state), args_(args), layer_(layer), weights_(state.weights.layer(layer)), own_(state.own[tid]) {}

  // Queries, or the latent that they are projected from, and the row; `a`: of the cell's first row.
  void project(const T* a, const Cell& cell) {
    const int64_t stride = strides_.projected;
    T* out = activations_.projected + cell.rows.begin * stride;
    multiply<T>(weights_.qkv, own_.linear, a, c_.hidden, cell.rows.size(), cell.panels,
                [&](int64_t t, int64_t panel, Columns y) { store_columns(y, out + t * stride + panel * kPanel); });
  }

  // Normalises and rotates what was projected, and stores the rows.
  void finish_rows(Range rows) {
    const LatentOp& op = c_.latent;
    const int rank = static_cast<int>(op.kv_rank);
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      T* q = activations_.projected + t * strides_.projected;
      T* row = q + strides_.projected_row;
      if (op.q_rank != 0) rms_norm(q, weights_.norm(NormKind::kQ), op.eps, static_cast<int>(op.q_rank), q);
      rms_norm(row, weights_.norm(NormKind::kK), op.eps, rank, row);
      rotate(t, row + rank);
    }
    const TokenRows stored{activations_.projected + strides_.projected_row, dtype_of<T>(), strides_.projected};
    store_kv(c_.pool, layer_, activations_.places[0], stored, stored, rows.begin, rows.end);
  }

  // From the latent to the heads' queries.
  void project_queries(const Cell& cell) {
    const int64_t from = strides_.projected, to = strides_.queries;
    const T* a = activations_.projected + cell.rows.begin * from;
    T* out = activations_.queries + cell.rows.begin * to;
    multiply<T>(weights_.q_b, own_.linear, a, from, cell.rows.size(), cell.panels,
                [&](int64_t t, int64_t panel, Columns y) { store_columns(y, out + t * to + panel * kPanel); });
  }

  // What rows are multiplied with: k_bᵀ q of each head, of some panels.
  void absorb(Range rows, Range panels) {
    const bool direct = c_.latent.q_rank == 0;
    const T* q = direct ? activations_.projected : activations_.queries;
    const int64_t stride = direct ? strides_.projected : strides_.queries;
    by_head(weights_.k_b, rows, panels, q, stride, c_.latent.qk_dim(), activations_.qkv, strides_.qkv, c_.head_dim,
            c_.latent.kv_rank);
  }

  // The part of the queries that is rotated, behind what `absorb` makes.
  void rotate_queries(Range rows) {
    const LatentOp& op = c_.latent;
    const bool direct = op.q_rank == 0;
    const int64_t stride = direct ? strides_.projected : strides_.queries;
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const T* q = (direct ? activations_.projected : activations_.queries) + t * stride + op.nope_dim;
      T* out = activations_.qkv + t * strides_.qkv + op.kv_rank;
      for (int64_t head = 0; head < c_.heads; ++head, q += op.qk_dim(), out += c_.head_dim) {
        std::copy_n(q, op.rope_dim, out);
        rotate(t, out);
      }
    }
  }

  // v_b times what attention leaves of each head, of some panels.
  void expand(const T* att, Range rows, Range panels) {
    by_head(weights_.v_b, rows, panels, att, strides_.att, c_.latent.kv_rank, activations_.expanded, strides_.o,
            c_.latent.value_dim, c_.latent.value_dim);
  }

  int64_t panels(const std::vector<PackedLinear>& heads) const { return c_.heads * heads[0].panels; }

 private:
  static void store_columns(Columns y, T* out) {
    store(out, y.left);
    store(out + kLanes, y.right);
  }

  // out[t][head] = W_head · a[t][head] for the panels of `all`: a head's input begins `step` elements behind the one's
  // before, its `size` outputs `out_step` elements.
  void by_head(const std::vector<PackedLinear>& all, Range rows, Range panels, const T* a, int64_t stride, int64_t step,
               T* out, int64_t out_stride, int64_t out_step, int64_t size) {
    const int64_t count = all[0].panels;
    for (int64_t head = panels.begin / count; head * count < panels.end; ++head) {
      const int64_t first = head * count;
      const Range own{std::max(panels.begin, first) - first, std::min(panels.end, first + count) - first};
      T* to = out + rows.begin * out_stride + head * out_step;
      multiply<T>(all[head], own_.linear, a + rows.begin * stride + head * step, stride, rows.size(), own,
                  [&](int64_t t, int64_t panel, Columns y) {
                    store_some(y, to + t * out_stride + panel * kPanel, size - panel * kPanel);
                  });
    }
  }

  // The first `count` columns: behind them lies the next head.
  static void store_some(Columns y, T* out, int64_t count) {
    if (count >= kPanel) return store_columns(y, out);
    T both[kPanel];
    store_columns(y, both);
    std::copy_n(both, count, out);
  }

  void rotate(int64_t token, T* part) const {
    const RopeTable& table = args_.ropes[c_.ops[layer_].qkv.rope];
    const int dim = static_cast<int>(c_.latent.rope_dim);
    const int64_t angle = args_.positions[token] * (dim / 2);
    rope(part, table.cos + angle, table.sin + angle, dim);
  }

  EngineState<T>& state_;
  const EngineConfig& c_ = state_.c;
  const Strides& strides_ = state_.strides;
  Activations<T>& activations_ = state_.activations;
  const ForwardArgs& args_;
  const int64_t layer_;
  const LayerWeights& weights_;
  ThreadActivations<T>& own_;
};

}  // namespace pdserve
