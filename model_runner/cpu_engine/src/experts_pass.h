// What one thread does of a layer's experts (ExpertsOp of layer_ops.h), between barriers:
//
//   score, choose, round | group, gate_up | down
//
// gate_up: the panels of all experts that some token has chosen lie side by side, as it were, and each thread takes as
// much of them as costs as much as the others' shares. So every expert's weights are read once for up to kTileRows of its
// tokens, and all threads read as much, whatever was chosen.
// down: a thread has some columns of the result, and for them adds up the outputs of all experts, in the order of the
// experts: nobody else has a part in these sums, so that nobody waits to join them, and a token's are added in the same
// order whatever else is in the batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "expert_activations.h"
#include "fused_ops.h"

namespace pdserve {

template <class T>
class ExpertsPass {
 public:
  ExpertsPass(EngineState<T>& state, int64_t layer, int tid)
      : state_(state),
        ops_(state.c.ops[layer]),
        weights_(state.weights.layer(layer)),
        own_(state.own[tid]),
        groups_(own_.experts.groups),
        tid_(tid) {}

  // Where few tokens, or all, have their inputs.
  ExpertInputs<T>& inputs(bool own) { return own ? own_.experts.inputs : state_.activations.experts.inputs; }

  // The router's logits of the cell; `normed`: of its first row.
  void score(const T* normed, const Cell& cell) {
    const int64_t chunks = ceil_div(cell.rows.size(), kTileRows), stride = state_.strides.experts.router;
    for (int64_t c = 0; c < chunks; ++c) {
      const Range m = share(cell.rows.size(), c, chunks);
      const DenseRows rows = widen(normed + m.begin * state_.strides.normed, m.size());
      float* out = state_.activations.experts.logits + (cell.rows.begin + m.begin) * stride;
      multiply_prepared<float>(weights_.router, own_.linear, {rows, {}}, m.size(), cell.panels,
                               [&](int64_t i, int64_t panel, Columns y) {
                                 store(out + i * stride + panel * kPanel, y.left);
                                 store(out + i * stride + panel * kPanel + kLanes, y.right);
                               });
    }
  }

  // Rounds `rows` once for all experts, where these are quantised.
  void round(const ExpertInputs<T>& inputs, Range rows) const {
    const auto quantised = [](const ExpertWeights& expert) { return !expert.gate_up.dense(); };
    if (std::none_of(weights_.experts.begin(), weights_.experts.end(), quantised)) return;
    const int64_t hidden = state_.c.hidden, runs = state_.strides.experts.runs();
    const ActivationDType dtype = state_.c.activations;
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const T* normed = inputs.normed + t * state_.strides.normed;
      quantize_rows(normed, state_.strides.normed, QuantizedRows{inputs.runs + t * runs, hidden, 1, dtype});
    }
  }

  // From the logits of `rows`.
  void choose(const ExpertInputs<T>& inputs, Range rows) {
    const ExpertsOp& op = ops_.experts;
    const float* bias = weights_.vector(VectorKind::kChoiceBias);
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const float* logits = state_.activations.experts.logits + t * state_.strides.experts.router;
      float* weights = inputs.weights + t * (op.chosen + 1);
      choose_experts(op, logits, bias, own_.experts.choice, inputs.experts + t * op.chosen, weights);
      weights[op.chosen] = op.shared_gate ? 1.0f / (1.0f + std::exp(-logits[op.count])) : 1.0f;
    }
  }

  void group(const ExpertInputs<T>& inputs, int64_t tokens) {
    tokens_ = tokens;
    groups_.sort(ops_.experts, inputs.chosen(), tokens);
    groups_.share_out(weights_.experts, tid_, state_.team.size());
    fetch_gate_up(0);
  }

  // Activations of the thread's share.
  void gate_up(const ExpertInputs<T>& inputs) {
    for (size_t i = 0; i < groups_.share().size(); ++i) {
      const GroupPanels& part = groups_.share()[i];
      const ExpertGroup& group = groups_.groups()[part.group];
      const PackedLinear& weight = weights_.experts[group.expert].gate_up;
      const int64_t chunks = ceil_div(group.count, kTileRows);
      for (int64_t c = 0; c < chunks; ++c) {
        const Range m = share(group.count, c, chunks);
        const PreparedRows rows = gather(weight, inputs, groups_.tokens() + group.begin + m.begin, m.size());
        if (c == 0) fetch_gate_up(i + 1);
        activate(group, weight, rows, m, part.panels);
      }
    }
    if (!groups_.groups().empty()) fetch_first(down_of(groups_.groups()[0]), own_columns().begin);
  }

  // sums [T, x] = the sum over a token's experts of weight · (inner · W), of the thread's columns.
  void down(float* sums) {
    const Range columns = own_columns();
    const int64_t stride = state_.strides.x, size = columns.size() * kPanel;
    for (int64_t t = 0; t < tokens_; ++t) std::fill_n(sums + t * stride + columns.begin * kPanel, size, 0.0f);
    const size_t count = groups_.groups().size();
    for (size_t g = 0; g < count; ++g) {
      const ExpertGroup& group = groups_.groups()[g];
      const PackedLinear& weight = down_of(group);
      const int64_t chunks = ceil_div(group.count, kTileRows);
      for (int64_t c = 0; c < chunks; ++c) {
        const Range m = share(group.count, c, chunks);
        const PreparedRows rows = activated(group, weight, m);
        if (c == 0 && g + 1 < count) fetch_first(down_of(groups_.groups()[g + 1]), columns.begin);
        const int32_t* tokens = groups_.tokens() + group.begin + m.begin;
        const float* weights = groups_.weights() + group.begin + m.begin;
        multiply_prepared<T>(weight, own_.linear, rows, m.size(), columns, [&](int64_t i, int64_t panel, Columns y) {
          float* sum = sums + tokens[i] * stride + panel * kPanel;
          const Vec factor = broadcast(weights[i]);
          store(sum, fma(y.left, factor, load(sum)));
          store(sum + kLanes, fma(y.right, factor, load(sum + kLanes)));
        });
      }
    }
  }

  // x += scale · sums, of the thread's columns.
  void add(const float* sums, float* x) const {
    const Range columns = own_columns();
    const Vec scale = broadcast(ops_.down.scale);
    for (int64_t t = 0; t < tokens_; ++t) {
      const int64_t row = t * state_.strides.x;
      for (int64_t i = row + columns.begin * kPanel; i < row + columns.end * kPanel; i += kLanes) {
        store(x + i, fma(load(sums + i), scale, load(x + i)));
      }
    }
  }

 private:
  const PackedLinear& down_of(const ExpertGroup& group) const { return weights_.experts[group.expert].down; }

  // Panels of down: those of one expert are those of all.
  Range own_columns() const {
    return share(weights_.experts[0].down.panels, tid_, state_.team.size());
  }

  // The first bytes of the thread's part `index`, if it has so many.
  void fetch_gate_up(size_t index) const {
    if (index >= groups_.share().size()) return;
    const GroupPanels& part = groups_.share()[index];
    const ExpertGroup& group = groups_.groups()[part.group];
    fetch_first(weights_.experts[group.expert].gate_up, part.panels.begin);
  }

  // Rows as products with float32 read them; they may lie in the thread's own memory.
  DenseRows widen(const T* a, int64_t rows) {
    const int64_t hidden = state_.c.hidden, stride = dense_scratch_stride(hidden);
    if constexpr (std::is_same_v<T, float>) {
      return prepare_dense(a, state_.strides.normed, rows, hidden, own_.linear.wide);
    } else {
      for (int64_t m = 0; m < rows; ++m) {
        copy_row(a + m * state_.strides.normed, static_cast<int>(hidden), own_.linear.wide + m * stride);
      }
      return {reinterpret_cast<const char*>(own_.linear.wide), stride * static_cast<int64_t>(sizeof(float))};
    }
  }

  // The inputs of `tokens`, one below the other.
  PreparedRows gather(const PackedLinear& weight, const ExpertInputs<T>& inputs, const int32_t* tokens, int64_t rows) {
    const int64_t stride = state_.strides.normed, runs = state_.strides.experts.runs();
    if (weight.dense()) {
      if (rows == 1) return prepare_rows(weight, own_.linear, inputs.normed + tokens[0] * stride, stride, 1);
      T* to = own_.experts.gathered;
      for (int64_t i = 0; i < rows; ++i) std::copy_n(inputs.normed + tokens[i] * stride, stride, to + i * stride);
      return prepare_rows(weight, own_.linear, to, stride, rows);
    }
    if (rows == 1) return {{}, {inputs.runs + tokens[0] * runs, weight.k, 1, weight.activations}};
    QuantizedRun* to = own_.linear.quantized.runs;
    for (int64_t i = 0; i < rows; ++i) {
      const QuantizedRun* from = inputs.runs + tokens[i] * runs;
      for (int64_t run = 0; run < runs; ++run) to[run * rows + i] = from[run];
    }
    return {{}, {to, weight.k, rows, weight.activations}};
  }

  // The first element of the activations of rows `m` of a group: its tile's rows lie by themselves.
  int64_t first_inner(const ExpertGroup& group, int64_t row) const {
    const ExpertsOp& op = ops_.experts;
    const int64_t stride = ExpertSizes::stride_of(ops_.gate_up.inner);
    if (group.expert != op.count) return (group.begin + row) * stride;
    return group.begin * stride + row * ExpertSizes::stride_of(op.shared_inner);
  }

  // As gate_up has left them.
  PreparedRows activated(const ExpertGroup& group, const PackedLinear& weight, Range m) {
    const int64_t first = first_inner(group, m.begin), stride = ExpertSizes::stride_of(weight.k);
    ExpertActivations<T>& all = state_.activations.experts;
    if (weight.dense()) return prepare_rows(weight, own_.linear, all.inner + first, stride, m.size());
    return {{}, {all.inner_runs + first / kRun, weight.k, m.size(), weight.activations}};
  }

  void activate(const ExpertGroup& group, const PackedLinear& weight, const PreparedRows& rows, Range m, Range panels) {
    const bool shared = group.expert == ops_.experts.count;
    const float limit = shared ? 0.0f : ops_.experts.limit;
    if (limit != 0.0f) {
      const Vec most = broadcast(limit), least = broadcast(-limit), one = broadcast(1.0f);
      // The order of the operands lets a NaN through.
      return finish_gate_up(group, weight, rows, m, panels, [=](Columns y) {
        return (max(least, min(most, y.right)) + one) * swish(min(most, y.left), 1.702f);
      });
    }
    switch (shared ? ops_.experts.shared_activation : ops_.gate_up.activation) {
      case Activation::kSilu:
        return finish_gate_up(group, weight, rows, m, panels, [](Columns y) { return silu(y.left) * y.right; });
      case Activation::kGelu:
        return finish_gate_up(group, weight, rows, m, panels, [](Columns y) { return gelu(y.left) * y.right; });
      case Activation::kGeluTanh:
        return finish_gate_up(group, weight, rows, m, panels, [](Columns y) { return gelu_tanh(y.left) * y.right; });
    }
  }

  // Leaves activation(y) as the second product reads it: rounded, where that is quantised, as soon as a run is complete.
  template <class Activate>
  void finish_gate_up(const ExpertGroup& group, const PackedLinear& weight, const PreparedRows& rows, Range m,
                      Range panels, Activate&& activation) {
    const PackedLinear& next = down_of(group);
    const int64_t first = first_inner(group, m.begin), stride = ExpertSizes::stride_of(next.k), count = m.size();
    if (next.dense()) {
      T* out = state_.activations.experts.inner + first;
      multiply_prepared<T>(weight, own_.linear, rows, count, panels, [&](int64_t i, int64_t panel, Columns y) {
        store(out + i * stride + panel * kLanes, activation(y));
      });
      return;
    }
    QuantizedRun* out = state_.activations.experts.inner_runs + first / kRun;
    alignas(kLine) T run[kTileRows][kRun];
    multiply_prepared<T>(weight, own_.linear, rows, count, panels, [&](int64_t i, int64_t panel, Columns y) {
      store(run[i] + panel % 2 * kLanes, activation(y));
      if (panel % 2 == 1) quantize_rows(run[i], kRun, QuantizedRows{out + panel / 2 * count + i, kRun, 1, next.activations});
    });
  }

  EngineState<T>& state_;
  const LayerOps& ops_;
  const LayerWeights& weights_;
  ThreadActivations<T>& own_;
  ExpertGroups& groups_;
  const int tid_;
  int64_t tokens_ = 0;
};

}  // namespace pdserve
