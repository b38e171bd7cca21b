// One thread's way through the layers: which tokens and panels it takes, and where it meets the others (engine.h).
#pragma once

#include "attention.h"
#include "experts_pass.h"
#include "fused_ops.h"
#include "latent_ops.h"

namespace pdserve {

template <class T>
class LayerPass {
 public:
  LayerPass(EngineState<T>& state, const ForwardArgs& args, int tid)
      : state_(state), args_(args), tid_(tid), exchange_(state.exchanges), ops_(state, args, tid) {}

  // So many exchanges with other ranks there have been, this pass's included.
  uint32_t exchanges() const { return exchange_; }

  // What the first half of a layer leaves: keys and values in the pool, and att. By columns, x must be complete.
  void fill_attention(int64_t index, const PassRows<T>& pass) {
    const ProjectQKV& op = state_.c.ops[index].qkv;
    const LayerWeights& layer = state_.weights.layer(index);
    const float* norm = layer.norm(NormKind::kBeforeAttention);
    if (state_.c.is_latent()) {
      fill_latent(index, pass);
    } else if (pass.division.by_rows) {
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
    // Every thread has stored its part; but other ranks may not have.
    if (state_.ranks == nullptr) tell_stored(index);
    const Activations<T>& all = state_.activations;
    const Attend& attend = state_.c.ops[index].attend;
    const Scoring scoring{attend.scale, attend.softcap, layer.vector(VectorKind::kSinks)};
    attention_run(state_.plans.of_layer(index), attend.place, scoring,
                  {all.qkv, dtype_of<T>(), state_.strides.qkv}, {all.att, dtype_of<T>(), state_.strides.att}, tid_);
    state_.team.barrier();
  }

  // The second half: from att to the residual of the next layer. By columns, x is complete afterwards.
  void finish_layer(int64_t index, const PassRows<T>& pass) {
    const LayerOps& ops = state_.c.ops[index];
    const LayerWeights& layer = state_.weights.layer(index);
    if (state_.c.is_latent()) expand_latent(index, pass);
    if (ops.experts.count != 0) return finish_with_experts(index, pass);
    if (pass.division.by_rows) {
      if (state_.ranks == nullptr) {
        for_blocks(pass, [&](Range rows) { finish_block(ops, layer, pass, rows); });
      } else {
        finish_rows_with_ranks(index, pass);
      }
      return;
    }
    const Strides& strides = state_.strides;
    add_attention(index, pass);
    const T* normed = normalise_all(ops.gate_up.before, layer.norm(NormKind::kBeforeMlp), pass);
    Cell cell = cell_of(layer.gate_up, pass);
    T* inner = state_.activations.inner;
    ops_.gate_up(ops.gate_up, layer.gate_up, pass, normed + cell.rows.begin * strides.normed, cell, inner);
    state_.team.barrier();
    cell = cell_of(layer.down, pass);
    ops_.add_product(ops.down, layer.down, pass, inner + cell.rows.begin * strides.inner, strides.inner, cell,
                     sums(ops.down));
    complete(ops.down, layer.norm(NormKind::kAfterMlp), pass);
  }

  // By rows: the thread's own of the head's rows, and then its cell.
  void run_head(const PassRows<T>& pass) {
    const int64_t stride = state_.strides.normed;
    T* normed = state_.activations.normed;
    const Range own = own_rows(pass);
    ops_.normalise(state_.c.final_norm, state_.weights.final_norm(), pass, own, normed + own.begin * stride);
    if (args_.states != nullptr) copy_states(normed, own);
    if (args_.scored == 0) return;
    state_.team.barrier();
    const PassRows<T> scored{pass.division, args_.scored, pass.x, pass.att};
    if (state_.ranks != nullptr) return run_head_with_ranks(scored);
    const Cell cell = cell_of(state_.weights.head(), scored);
    ops_.project_head(scored, normed + cell.rows.begin * stride, cell, args_.logits);
  }

  // At the end of a pass that wants no logits: its keys and values are in the pool, those of the other ranks too.
  void end_without_logits() {
    if (state_.ranks == nullptr) return;
    meet(Exchange::kStored, exchange_, 0);
    tell_stored(state_.c.layers - 1);
  }

 private:
  void copy_states(const T* normed, Range rows) const {
    const int64_t hidden = state_.c.hidden;
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const T* row = normed + t * state_.strides.normed;
      std::transform(row, row + hidden, args_.states + t * hidden, [](T value) { return to_float(value); });
    }
  }

  // Another thread of the process, which is not of the team, may read the layer's keys and values now.
  void tell_stored(int64_t layer) const {
    if (tid_ == 0 && args_.layers_done) __atomic_store_n(args_.layers_done, layer + 1, __ATOMIC_RELEASE);
  }

  // All threads of all ranks.
  void meet(Exchange what, uint32_t exchange, int64_t count) {
    state_.team.barrier();
    if (tid_ == 0) state_.ranks->meet(state_.team.barrier_spin(), what, exchange, count);
    state_.team.barrier();
  }

  // Each rank computes its columns of a slice of rows, and all take the whole rows. A slice is written over when its ranks
  // have met for the one after it, so when all have taken it.
  void run_head_with_ranks(const PassRows<T>& pass) {
    const int64_t vocab = state_.c.vocab, slices = ceil_div(pass.tokens, kLogitRows);
    for (int64_t slice = 0; slice < slices; ++slice) {
      const Range rows = share(pass.tokens, slice, slices);
      const PassRows<T> part{pass.division, rows.size(), pass.x, pass.att};
      const Cell cell = cell_of(state_.weights.head(), part);
      const int64_t first = rows.begin + cell.rows.begin;
      float* logits = state_.ranks->logits(static_cast<uint32_t>(slice));
      ops_.project_head(part, state_.activations.normed + first * state_.strides.normed, cell, logits);
      meet(Exchange::kLogits, static_cast<uint32_t>(slice), rows.size());
      const Range own = own_rows(part);
      std::copy(logits + own.begin * vocab, logits + own.end * vocab, args_.logits + (rows.begin + own.begin) * vocab);
    }
  }

  // Where add_product leaves sums that are not added at once.
  float* sums(const AddProduct& op) const {
    if (state_.ranks != nullptr) return state_.ranks->part(exchange_, state_.ranks->rank());
    return op.after.used ? state_.activations.sums : nullptr;
  }

  // The first half of a layer with latent attention, up to what attention reads.
  void fill_latent(int64_t index, const PassRows<T>& pass) {
    const ProjectQKV& op = state_.c.ops[index].qkv;
    const LayerWeights& layer = state_.weights.layer(index);
    const float* norm = layer.norm(NormKind::kBeforeAttention);
    const bool has_q_latent = state_.c.latent.q_rank != 0;
    LatentOps<T> latent(state_, args_, index, tid_);
    const Range heads{0, latent.panels(layer.k_b)};
    if (pass.division.by_rows) {
      for_blocks(pass, [&](Range rows) {
        ops_.normalise(op.before, norm, pass, rows, own_.normed);
        latent.project(own_.normed, {rows, {0, layer.qkv.panels}});
        latent.finish_rows(rows);
        if (has_q_latent) latent.project_queries({rows, {0, layer.q_b.panels}});
        latent.absorb(rows, heads);
        latent.rotate_queries(rows);
      });
      return;
    }
    const T* normed = normalise_all(op.before, norm, pass);
    const Cell cell = cell_of(layer.qkv, pass);
    latent.project(normed + cell.rows.begin * state_.strides.normed, cell);
    ops_.fetch_next(layer.qkv, pass);
    state_.team.barrier();
    latent.finish_rows(own_rows(pass));
    if (has_q_latent) {
      state_.team.barrier();
      latent.project_queries(cell_of(layer.q_b, pass));
      state_.team.barrier();
    }
    latent.absorb({0, pass.tokens}, share(heads.end, tid_, state_.team.size()));
    latent.rotate_queries(own_rows(pass));
    ops_.fetch_next(layer.q_b, pass);
  }

  // From what attention leaves to the heads' outputs. By columns, these are complete afterwards.
  void expand_latent(int64_t index, const PassRows<T>& pass) {
    LatentOps<T> latent(state_, args_, index, tid_);
    const int64_t panels = latent.panels(state_.weights.layer(index).v_b);
    if (pass.division.by_rows) {
      for_blocks(pass, [&](Range rows) { latent.expand(pass.att, rows, {0, panels}); });
    } else {
      latent.expand(pass.att, {0, pass.tokens}, share(panels, tid_, state_.team.size()));
      state_.team.barrier();
    }
  }

  // The heads' outputs.
  const T* attended(const PassRows<T>& pass) const {
    return state_.c.is_latent() ? state_.activations.expanded : pass.att;
  }

  // What attention leaves joins the residual. By columns, or where there are ranks, x is complete afterwards.
  void add_attention(int64_t index, const PassRows<T>& pass) {
    const AddProduct& op = state_.c.ops[index].o;
    const LayerWeights& layer = state_.weights.layer(index);
    const float* norm = layer.norm(NormKind::kAfterAttention);
    const int64_t stride = state_.strides.o;
    const auto add = [&](const Cell& cell) {
      ops_.add_product(op, layer.o, pass, attended(pass) + cell.rows.begin * stride, stride, cell, sums(op));
    };
    if (!pass.division.by_rows) {
      add(cell_of(layer.o, pass));
    } else {
      for_blocks(pass, [&](Range rows) { add({rows, {0, layer.o.panels}}); });
      if (state_.ranks == nullptr) {
        if (op.after.used) ops_.add_normed(op, norm, pass, own_rows(pass));
        return;
      }
    }
    complete(op, norm, pass);
    if (state_.ranks != nullptr) tell_stored(index);
  }

  // Of either kind of pass: x is complete afterwards.
  void finish_with_experts(int64_t index, const PassRows<T>& pass) {
    const LayerOps& ops = state_.c.ops[index];
    const LayerWeights& layer = state_.weights.layer(index);
    add_attention(index, pass);
    ExpertsPass<T> experts(state_, index, tid_);
    const ExpertInputs<T>& inputs =
        pass.division.by_rows ? choose_by_rows(index, pass, experts) : choose_by_columns(index, pass, experts);
    experts.group(inputs, pass.tokens);
    experts.gate_up(inputs);
    state_.team.barrier();
    float* parts = sums(ops.down);
    const bool plain = parts == nullptr;
    if (plain) parts = state_.activations.sums;
    experts.down(parts);
    if (plain) experts.add(parts, pass.x);
    ops_.fetch_next(layer.down, pass);
    complete(ops.down, layer.norm(NormKind::kAfterMlp), pass);
  }

  // Each thread chooses for its own tokens.
  const ExpertInputs<T>& choose_by_rows(int64_t index, const PassRows<T>& pass, ExpertsPass<T>& experts) {
    const LayerWeights& layer = state_.weights.layer(index);
    const ExpertInputs<T>& inputs = experts.inputs(false);
    for_blocks(pass, [&](Range rows) {
      T* normed = inputs.normed + rows.begin * state_.strides.normed;
      ops_.normalise(state_.c.ops[index].gate_up.before, layer.norm(NormKind::kBeforeMlp), pass, rows, normed);
      experts.score(normed, {rows, {0, layer.router.panels}});
      experts.round(inputs, rows);
      experts.choose(inputs, rows);
    });
    state_.team.barrier();
    return inputs;
  }

  // The threads share out the router's columns; for few tokens each does the rest for all of them.
  const ExpertInputs<T>& choose_by_columns(int64_t index, const PassRows<T>& pass, ExpertsPass<T>& experts) {
    const LayerWeights& layer = state_.weights.layer(index);
    const bool few = pass.tokens <= kRedundantTokens;
    const ExpertInputs<T>& inputs = experts.inputs(few);
    const Range rows = few ? Range{0, pass.tokens} : own_rows(pass);
    const T* normed = normalise_all(state_.c.ops[index].gate_up.before, layer.norm(NormKind::kBeforeMlp), pass);
    const Cell cell = cell_of(layer.router, pass);
    experts.score(normed + cell.rows.begin * state_.strides.normed, cell);
    experts.round(inputs, rows);
    state_.team.barrier();
    experts.choose(inputs, rows);
    if (!few) state_.team.barrier();
    return inputs;
  }

  // As finish_block for all of the thread's blocks, but that the ranks meet twice: each has a part of the sums.
  void finish_rows_with_ranks(int64_t index, const PassRows<T>& pass) {
    const LayerOps& ops = state_.c.ops[index];
    const LayerWeights& layer = state_.weights.layer(index);
    const Strides& strides = state_.strides;
    add_attention(index, pass);
    for_blocks(pass, [&](Range rows) {
      ops_.normalise(ops.gate_up.before, layer.norm(NormKind::kBeforeMlp), pass, rows, own_.normed);
      const Cell gate_up{{0, rows.size()}, {0, layer.gate_up.panels}}, down{rows, {0, layer.down.panels}};
      ops_.gate_up(ops.gate_up, layer.gate_up, pass, own_.normed, gate_up, own_.inner);
      ops_.add_product(ops.down, layer.down, pass, own_.inner, strides.inner, down, sums(ops.down));
    });
    complete(ops.down, layer.norm(NormKind::kAfterMlp), pass);
  }

  void finish_block(const LayerOps& ops, const LayerWeights& layer, const PassRows<T>& pass, Range rows) {
    const Strides& strides = state_.strides;
    const Cell o{rows, {0, layer.o.panels}}, down{rows, {0, layer.down.panels}};
    ops_.add_product(ops.o, layer.o, pass, attended(pass) + rows.begin * strides.o, strides.o, o, sums(ops.o));
    if (ops.o.after.used) ops_.add_normed(ops.o, layer.norm(NormKind::kAfterAttention), pass, rows);
    ops_.normalise(ops.gate_up.before, layer.norm(NormKind::kBeforeMlp), pass, rows, own_.normed);
    const Cell gate_up{{0, rows.size()}, {0, layer.gate_up.panels}};
    ops_.gate_up(ops.gate_up, layer.gate_up, pass, own_.normed, gate_up, own_.inner);
    ops_.add_product(ops.down, layer.down, pass, own_.inner, strides.inner, down, sums(ops.down));
    if (ops.down.after.used) ops_.add_normed(ops.down, layer.norm(NormKind::kAfterMlp), pass, rows);
  }

  // What the threads, and ranks, added or left to be added is in x afterwards.
  void complete(const AddProduct& op, const float* norm, const PassRows<T>& pass) {
    if (state_.ranks == nullptr) {
      state_.team.barrier();
      if (!op.after.used) return;
    } else {
      meet(Exchange::kParts, exchange_, pass.tokens * state_.strides.x);
      ops_.add_parts(op, pass, exchange_++, own_rows(pass));
      if (!op.after.used) return state_.team.barrier();
    }
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
  uint32_t exchange_;
  ThreadActivations<T>& own_ = state_.own[tid_];
  FusedOps<T> ops_;
};

}  // namespace pdserve
