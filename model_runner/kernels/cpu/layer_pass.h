// One thread's way through the layers: which tokens and panels it takes, and where it meets the others (engine.h).
#pragma once

#include "attention.h"
#include "fused_ops.h"

namespace pdserve {

// Up to this many tokens every thread normalises all of them, which is cheaper than another barrier.
constexpr int64_t kRedundantTokens = 8;

template <class T>
class LayerPass {
 public:
  LayerPass(EngineState<T>& state, const ForwardArgs& args, int tid)
      : state_(state), args_(args), tid_(tid), ops_(state, args, tid) {}

  // What the first half of a layer leaves: keys and values in the pool, and att. By columns, x must be complete.
  void fill_attention(int64_t index, const PassRows<T>& pass) {
    const ProjectQKV& op = state_.c.ops[index].qkv;
    const LayerWeights& layer = state_.weights.layer(index);
    const float* norm = layer.norm(NormKind::kBeforeAttention);
    if (pass.division.by_rows) {
      for_blocks(pass, [&](Range rows) {
        ops_.normalise(op.before, norm, pass, rows, own_.normed);
        ops_.project_qkv(index, pass, own_.normed, {rows, {0, layer.qkv.panels}});
        if (!layer.fused) ops_.rotate_and_store(index, rows);
      });
    } else {
      const T* normed = normalise_all(op.before, norm, pass);
      const Cell cell = cell_of(layer.qkv, pass);
      ops_.project_qkv(index, pass, normed + cell.rows.begin * state_.strides.normed, cell);
      if (!layer.fused) {
        state_.team.barrier();
        ops_.rotate_and_store(index, own_rows(pass));
      }
    }
    if (index + 1 == state_.c.layers && args_.wanted == 0) return;
    state_.team.barrier();
    // Every thread has stored its part; another thread of the process, which is not of the team, may read it all now.
    if (tid_ == 0 && args_.layers_done) __atomic_store_n(args_.layers_done, index + 1, __ATOMIC_RELEASE);
    const Activations<T>& all = state_.activations;
    const Attend& attend = state_.c.ops[index].attend;
    attention_run(state_.plans.of_layer(index), index, {attend.scale, attend.softcap},
                  {all.qkv, dtype_of<T>(), state_.strides.qkv}, {all.att, dtype_of<T>(), state_.strides.att}, tid_);
    state_.team.barrier();
  }

  // The second half: from att to the residual of the next layer. By columns, x is complete afterwards.
  void finish_layer(int64_t index, const PassRows<T>& pass) {
    const LayerOps& ops = state_.c.ops[index];
    const LayerWeights& layer = state_.weights.layer(index);
    if (pass.division.by_rows) {
      for_blocks(pass, [&](Range rows) { finish_block(ops, layer, pass, rows); });
      return;
    }
    const Strides& strides = state_.strides;
    Cell cell = cell_of(layer.o, pass);
    ops_.add_product(ops.o, layer.o, pass, pass.att + cell.rows.begin * strides.att, strides.att, cell);
    complete(ops.o, layer.norm(NormKind::kAfterAttention), pass);
    const T* normed = normalise_all(ops.gate_up.before, layer.norm(NormKind::kBeforeMlp), pass);
    cell = cell_of(layer.gate_up, pass);
    T* inner = state_.activations.inner;
    ops_.gate_up(ops.gate_up, layer.gate_up, pass, normed + cell.rows.begin * strides.normed, cell, inner);
    state_.team.barrier();
    cell = cell_of(layer.down, pass);
    ops_.add_product(ops.down, layer.down, pass, inner + cell.rows.begin * strides.inner, strides.inner, cell);
    complete(ops.down, layer.norm(NormKind::kAfterMlp), pass);
  }

  // By rows: the thread's own of the head's rows, and then its cell.
  void run_head(const PassRows<T>& pass) {
    const int64_t stride = state_.strides.normed;
    T* normed = state_.activations.normed;
    const Range own = own_rows(pass);
    ops_.normalise(state_.c.final_norm, state_.weights.final_norm(), pass, own, normed + own.begin * stride);
    state_.team.barrier();
    const Cell cell = cell_of(state_.weights.head(), pass);
    ops_.project_head(pass, normed + cell.rows.begin * stride, cell);
  }

 private:
  void finish_block(const LayerOps& ops, const LayerWeights& layer, const PassRows<T>& pass, Range rows) {
    const Strides& strides = state_.strides;
    const Cell o{rows, {0, layer.o.panels}}, down{rows, {0, layer.down.panels}};
    ops_.add_product(ops.o, layer.o, pass, pass.att + rows.begin * strides.att, strides.att, o);
    if (ops.o.after.used) ops_.add_normed(ops.o, layer.norm(NormKind::kAfterAttention), pass, rows);
    ops_.normalise(ops.gate_up.before, layer.norm(NormKind::kBeforeMlp), pass, rows, own_.normed);
    const Cell gate_up{{0, rows.size()}, {0, layer.gate_up.panels}};
    ops_.gate_up(ops.gate_up, layer.gate_up, pass, own_.normed, gate_up, own_.inner);
    ops_.add_product(ops.down, layer.down, pass, own_.inner, strides.inner, down);
    if (ops.down.after.used) ops_.add_normed(ops.down, layer.norm(NormKind::kAfterMlp), pass, rows);
  }

  // By columns: what the threads added, or left to be normalised, is in x afterwards.
  void complete(const AddProduct& op, const float* norm, const PassRows<T>& pass) {
    state_.team.barrier();
    if (!op.after.used) return;
    ops_.add_normed(op, norm, pass, own_rows(pass));
    state_.team.barrier();
  }

  Cell cell_of(const PackedLinear& weight, const PassRows<T>& pass) const {
    return pass.division.cell_of(weight, pass.tokens, tid_);
  }

  Range own_rows(const PassRows<T>& pass) const { return share(pass.tokens, tid_, state_.team.size()); }

  // The thread's own tokens, in blocks of up to kTileRows.
  template <class F>
  void for_blocks(const PassRows<T>& pass, F&& f) {
    const Range own = own_rows(pass);
    const int64_t blocks = ceil_div(own.size(), kTileRows);
    for (int64_t b = 0; b < blocks; ++b) {
      const Range part = share(own.size(), b, blocks);
      f(Range{own.begin + part.begin, own.begin + part.end});
    }
  }

  // All tokens of a pass by columns, normalised.
  const T* normalise_all(const NormOp& op, const float* weight, const PassRows<T>& pass) {
    if (pass.tokens <= kRedundantTokens) {
      ops_.normalise(op, weight, pass, {0, pass.tokens}, own_.normed);
      return own_.normed;
    }
    const Range own = own_rows(pass);
    T* normed = state_.activations.normed;
    ops_.normalise(op, weight, pass, own, normed + own.begin * state_.strides.normed);
    state_.team.barrier();
    return normed;
  }

  EngineState<T>& state_;
  const ForwardArgs& args_;
  const int tid_;
  ThreadActivations<T>& own_ = state_.own[tid_];
  FusedOps<T> ops_;
};

}  // namespace pdserve
