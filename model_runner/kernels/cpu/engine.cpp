#include "engine.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "elementwise.h"
#include "kv_blocks.h"
#include "linear_pass.h"
#include "packing.h"
#include "work_grid.h"

namespace pdserve {
namespace {

// Up to this many tokens every thread normalises all of them, which is cheaper than another barrier.
constexpr int64_t kRedundantTokens = 8;
// Tokens that activations have room for from the start.
constexpr int64_t kFirstTokens = 512;

// How a pass of some tokens is divided among the threads.
struct Division {
  bool by_rows;
  Grid grid[kProducts];
};

template <class T>
class Engine final : public EngineBase {
 public:
  Engine(const EngineConfig& config, Team& team)
      : c_(config),
        team_(team),
        dtype_(sizeof(T) == 2 ? DType::kBFloat16 : DType::kFloat32),
        fused_(config.head_dim % kPanel == 0 && !config.qk_norm && config.pool.dtype == dtype_),
        layers_(config.layers),
        own_(team.size()) {
    for (size_t i = 0; i < layers_.size(); ++i) {
      Layer& layer = layers_[i];
      layer.qkv.next = &layer.o;
      layer.o.next = &layer.gate_up;
      layer.gate_up.next = &layer.down;
      layer.down.next = i + 1 < layers_.size() ? &layers_[i + 1].qkv : &head_;
    }
    x_stride_ = round_up(c_.hidden, kPanel);
    qkv_stride_ = round_up((c_.heads + 2 * c_.kv_heads) * c_.head_dim, kPanel);
    inner_stride_ = round_up(c_.inner, kLanes);
    att_stride_ = c_.heads * c_.head_dim;
    for (Own& own : own_) {
      own.normed = arena_.allocate<T>(kTileRows * c_.hidden);
      own.inner = arena_.allocate<T>(kTileRows * inner_stride_);
      own.linear.reserve(arena_, std::max({c_.hidden, att_stride_, c_.inner}));
    }
    reserve(kFirstTokens);
  }

  bool set_linear(LinearKind kind, int64_t layer, const std::vector<WeightPart>& parts, const float* bias) override {
    PackedLinear& packed = linear(kind, layer);
    packed.product = static_cast<int>(kind);
    return pack_linear<T>(linear_shape(c_, kind, fused_), parts, bias, arena_, team_, packed);
  }

  void set_norm(NormKind kind, int64_t layer, const float* weight) override {
    const bool of_head = kind == NormKind::kQ || kind == NormKind::kK;
    const int64_t size = of_head ? c_.head_dim : c_.hidden;
    float* copy = arena_.allocate<float>(size);
    std::copy_n(weight, size, copy);
    norm(kind, layer) = copy;
  }

  void set_embedding(const void* table) override { embedding_ = static_cast<const T*>(table); }

  const EngineConfig& config() const override { return c_; }

  void weight_bytes(int64_t* bytes) const override {
    std::fill_n(bytes, kProducts, 0);
    for (const Own& own : own_) {
      for (int i = 0; i < kProducts; ++i) bytes[i] += own.linear.weight_bytes[i];
    }
  }

  void forward(const ForwardArgs& args) override {
    const int64_t room = std::max(args.tokens, args.wanted);
    if (room > max_tokens_) reserve(std::max(room, 2 * max_tokens_));
    const float scale = 1.0f / std::sqrt(static_cast<float>(c_.head_dim));
    plan_.prepare(c_.pool, c_.heads, scale, args.entry, args.entries, args.req_to_token, args.table_stride,
                  team_.size());
    for (Own& own : own_) std::fill_n(own.linear.weight_bytes, kProducts, 0);
    const Division all = divide(args.tokens), wanted = divide(args.wanted);
    team_.run([&](int tid, int size) { pass(args, tid, size, all, wanted); });
  }

 private:
  struct Layer {
    PackedLinear qkv, o, gate_up, down;
    const float* attention_norm = nullptr;
    const float* mlp_norm = nullptr;
    const float* q_norm = nullptr;
    const float* k_norm = nullptr;
  };

  // What one thread works in while it walks blocks of tokens.
  struct Own {
    T* normed = nullptr;  // [kTileRows, N]
    T* inner = nullptr;   // [kTileRows, inner_stride]
    LinearThread linear;
  };

  // One thread's part in a pass, or in the rest of one that goes on with fewer tokens.
  struct Worker {
    const ForwardArgs& args;
    int tid, size;
    const Division& division;
    int64_t tokens;
    float* x;   // [tokens, x_stride]: the residual
    T* att;     // [tokens, H * D]
  };

  // Makes room for the activations of `tokens` tokens.
  void reserve(int64_t tokens) {
    activations_ = std::make_unique<Arena>();
    x_ = activations_->allocate<float>(tokens * x_stride_);
    qkv_ = activations_->allocate<T>(tokens * qkv_stride_);
    att_ = activations_->allocate<T>(tokens * att_stride_);
    normed_ = activations_->allocate<T>(tokens * c_.hidden);
    inner_ = activations_->allocate<T>(tokens * inner_stride_);
    kv_places_ = activations_->allocate<SlotPlace>(tokens);
    wanted_x_ = activations_->allocate<float>(tokens * x_stride_);
    wanted_att_ = activations_->allocate<T>(tokens * att_stride_);
    max_tokens_ = tokens;
  }

  Division divide(int64_t tokens) const {
    const Layer& layer = layers_.front();
    const auto product = [&](const PackedLinear& weight) {
      // Segments differ little: the mean is near enough to divide work by.
      const int64_t panel_bytes = weight.bytes(0, weight.panels) / std::max<int64_t>(1, weight.panels);
      return Product{tokens, weight.panels, weight.k, panel_bytes, weight.effort};
    };
    const Product products[] = {product(layer.qkv), product(layer.o), product(layer.gate_up), product(layer.down)};
    Division result{choose_by_rows(products, team_.size()), {}};
    for (int i = 0; i < kLayerProducts; ++i) result.grid[i] = choose_grid(products[i], team_.size());
    result.grid[head_.product] = choose_grid(product(head_), team_.size());
    return result;
  }

  void pass(const ForwardArgs& args, int tid, int size, const Division& all, const Division& few) {
    const Worker w{args, tid, size, all, args.tokens, x_, att_};
    const int64_t last = c_.layers - 1;
    embed(w);
    if (!all.by_rows) team_.barrier();
    for (int64_t layer = 0; layer < last; ++layer) {
      fill_attention(layer, w);
      finish_layer(layer, w);
    }
    fill_attention(last, w);
    // Of the last layer's results only those that become logits are ever read; of the others, their keys and values.
    if (args.wanted == 0) return;
    const Worker wanted = gather_wanted(w, few);
    finish_layer(last, wanted);
    team_.barrier();
    run_head(wanted);
  }

  void embed(const Worker& w) {
    const Range own = share(w.args.tokens, w.tid, w.size);
    for (int64_t t = own.begin; t < own.end; ++t) {
      const T* row = embedding_ + w.args.input_ids[t] * c_.hidden;
      for (int64_t i = 0; i < c_.hidden; ++i) x_[t * x_stride_ + i] = to_float(row[i]);
      kv_places_[t] = find_slot(c_.pool, 0, w.args.out_cache_loc[t]);
    }
  }

  // What the first half of a layer leaves: keys and values in the pool, and att.
  void fill_attention(int64_t index, const Worker& w) {
    const Layer& layer = layers_[index];
    if (w.division.by_rows) {
      for_blocks(w, [&](Range rows) {
        normalise(layer.attention_norm, w, rows, own_[w.tid].normed);
        project_qkv(layer, index, w, own_[w.tid].normed, rows, {0, layer.qkv.panels});
        if (!fused_) rotate_and_store(layer, index, w, rows);
      });
    } else {
      const T* normed = normalise_all(layer.attention_norm, w);
      const Cell cell = cell_of(layer.qkv, w);
      project_qkv(layer, index, w, normed + cell.rows.begin * c_.hidden, cell.rows, cell.panels);
      if (!fused_) {
        team_.barrier();
        rotate_and_store(layer, index, w, share(w.tokens, w.tid, w.size));
      }
    }
    if (index + 1 == c_.layers && w.args.wanted == 0) return;
    team_.barrier();
    // Every thread has stored its part; another thread of the process, which is not of the team, may read it all now.
    if (w.tid == 0 && w.args.layers_done) __atomic_store_n(w.args.layers_done, index + 1, __ATOMIC_RELEASE);
    attention_run(plan_, index, {qkv_, dtype_, qkv_stride_}, {att_, dtype_, att_stride_}, w.tid);
    team_.barrier();
  }

  // The second half: from att to the residual of the next layer.
  void finish_layer(int64_t index, const Worker& w) {
    const Layer& layer = layers_[index];
    if (w.division.by_rows) {
      const Own& own = own_[w.tid];
      for_blocks(w, [&](Range rows) {
        add_to_residual(layer.o, w, w.att + rows.begin * att_stride_, att_stride_, {rows, {0, layer.o.panels}});
        normalise(layer.mlp_norm, w, rows, own.normed);
        gate(layer.gate_up, w, own.normed, {{0, rows.size()}, {0, layer.gate_up.panels}}, own.inner);
        add_to_residual(layer.down, w, own.inner, inner_stride_, {rows, {0, layer.down.panels}});
      });
      return;
    }
    Cell cell = cell_of(layer.o, w);
    add_to_residual(layer.o, w, w.att + cell.rows.begin * att_stride_, att_stride_, cell);
    team_.barrier();
    const T* normed = normalise_all(layer.mlp_norm, w);
    gate(layer.gate_up, w, normed, cell_of(layer.gate_up, w), inner_);
    team_.barrier();
    cell = cell_of(layer.down, w);
    add_to_residual(layer.down, w, inner_ + cell.rows.begin * inner_stride_, inner_stride_, cell);
    team_.barrier();
  }

  Cell cell_of(const PackedLinear& weight, const Worker& w) const {
    // Cells do not depend on what a product costs.
    const Product product{w.tokens, weight.panels, weight.k, 0, 0};
    return pdserve::cell_of(product, w.division.grid[weight.product], w.tid);
  }

  // The thread's own tokens, in blocks of up to kTileRows.
  template <class F>
  void for_blocks(const Worker& w, F&& f) {
    const Range own = share(w.tokens, w.tid, w.size);
    const int64_t blocks = ceil_div(own.size(), kTileRows);
    for (int64_t b = 0; b < blocks; ++b) {
      const Range part = share(own.size(), b, blocks);
      f(Range{own.begin + part.begin, own.begin + part.end});
    }
  }

  // The wanted tokens' residuals and attention, side by side in the order of the logits.
  Worker gather_wanted(const Worker& w, const Division& division) {
    const Range own = share(w.args.wanted, w.tid, w.size);
    for (int64_t i = own.begin; i < own.end; ++i) {
      const int64_t t = w.args.logit_indices[i];
      std::copy_n(w.x + t * x_stride_, x_stride_, wanted_x_ + i * x_stride_);
      std::copy_n(w.att + t * att_stride_, att_stride_, wanted_att_ + i * att_stride_);
    }
    team_.barrier();
    return {w.args, w.tid, w.size, division, w.args.wanted, wanted_x_, wanted_att_};
  }

  void run_head(const Worker& w) {
    const ForwardArgs& args = w.args;
    const Range own = share(args.wanted, w.tid, w.size);
    for (int64_t i = own.begin; i < own.end; ++i) {
      rms_norm(w.x + i * x_stride_, final_norm_, c_.eps, static_cast<int>(c_.hidden), normed_ + i * c_.hidden);
    }
    team_.barrier();
    const Cell cell = cell_of(head_, w);
    multiply(head_, w, normed_ + cell.rows.begin * c_.hidden, c_.hidden, cell.rows.size(), cell.panels,
             [&](int64_t m, int64_t panel, Columns y) {
               float* out = args.logits + (cell.rows.begin + m) * c_.vocab + panel * kPanel;
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

  void normalise(const float* weight, const Worker& w, Range rows, T* out) {
    for (int64_t t = rows.begin; t < rows.end; ++t, out += c_.hidden) {
      rms_norm(w.x + t * x_stride_, weight, c_.eps, static_cast<int>(c_.hidden), out);
    }
  }

  // All tokens of a small pass, normalised; the same on every thread.
  const T* normalise_all(const float* weight, const Worker& w) {
    if (w.tokens <= kRedundantTokens) {
      normalise(weight, w, {0, w.tokens}, own_[w.tid].normed);
      return own_[w.tid].normed;
    }
    const Range own = share(w.tokens, w.tid, w.size);
    normalise(weight, w, own, normed_ + own.begin * c_.hidden);
    team_.barrier();
    return normed_;
  }

  void project_qkv(const Layer& layer, int64_t index, const Worker& w, const T* a, Range rows, Range panels) {
    if (!fused_) {
      multiply(layer.qkv, w, a, c_.hidden, rows.size(), panels, [&](int64_t m, int64_t panel, Columns y) {
        T* out = qkv_ + (rows.begin + m) * qkv_stride_ + panel * kPanel;
        store(out, y.left);
        store(out + kLanes, y.right);
      });
      return;
    }
    const int64_t dim = c_.head_dim, half = dim / 2, per_head = dim / kPanel;
    T* keys = static_cast<T*>(c_.pool.data) + index * 2 * values_offset(c_.pool);
    T* values = keys + values_offset(c_.pool);
    multiply(layer.qkv, w, a, c_.hidden, rows.size(), panels, [&](int64_t m, int64_t panel, Columns y) {
      const int64_t t = rows.begin + m, head = panel / per_head, part = panel % per_head;
      if (head >= c_.heads + c_.kv_heads) {
        store_value(values, t, head - c_.heads - c_.kv_heads, part * kPanel, y);
        return;
      }
      const int64_t angle = w.args.positions[t] * half + part * kLanes;
      const Vec cos = load(w.args.cos + angle), sin = load(w.args.sin + angle);
      const Columns rotated{y.left * cos - y.right * sin, y.right * cos + y.left * sin};
      if (head >= c_.heads) {
        store_key(keys, t, head - c_.heads, part * kLanes, rotated);
        return;
      }
      T* out = qkv_ + t * qkv_stride_ + head * dim + part * kLanes;
      store(out, rotated.left);
      store(out + half, rotated.right);
    });
  }

  // Dimensions [d, d + 16) of a token's key, and those half a head further on. `keys`: the layer's, in page 0.
  void store_key(T* keys, int64_t t, int64_t head, int64_t d, Columns x) {
    const SlotPlace& place = kv_places_[t];
    T* block = keys + place.block + head * head_stride(c_.pool);
    store_key_block(block, place, d, x.left);
    store_key_block(block, place, d + c_.head_dim / 2, x.right);
  }

  // Dimensions [d, d + 32) of a token's value.
  void store_value(T* values, int64_t t, int64_t head, int64_t d, Columns x) {
    const SlotPlace& place = kv_places_[t];
    T* block = values + place.block + head * head_stride(c_.pool);
    store_value_block(block, place, c_.head_dim, d, x.left);
    store_value_block(block, place, c_.head_dim, d + kLanes, x.right);
  }

  void rotate_and_store(const Layer& layer, int64_t index, const Worker& w, Range rows) {
    const int dim = static_cast<int>(c_.head_dim);
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const int64_t angle = w.args.positions[t] * (dim / 2);
      for (int64_t h = 0; h < c_.heads + c_.kv_heads; ++h) {
        T* head = qkv_ + t * qkv_stride_ + h * dim;
        if (c_.qk_norm) rms_norm(head, h < c_.heads ? layer.q_norm : layer.k_norm, c_.eps, dim, head);
        rope(head, w.args.cos + angle, w.args.sin + angle, dim);
      }
    }
    T* k = qkv_ + c_.heads * c_.head_dim;
    T* v = k + c_.kv_heads * c_.head_dim;
    store_kv(c_.pool, index, w.args.out_cache_loc, {k, dtype_, qkv_stride_}, {v, dtype_, qkv_stride_}, rows.begin,
             rows.end);
  }

  // `a`: of the cell's first row; rows count from the first token.
  void add_to_residual(const PackedLinear& weight, const Worker& w, const T* a, int64_t stride, const Cell& cell) {
    multiply(weight, w, a, stride, cell.rows.size(), cell.panels, [&](int64_t m, int64_t panel, Columns y) {
      float* x = w.x + (cell.rows.begin + m) * x_stride_ + panel * kPanel;
      store(x, load(x) + y.left);
      store(x + kLanes, load(x + kLanes) + y.right);
    });
  }

  // `a` and `out`: of row 0.
  void gate(const PackedLinear& weight, const Worker& w, const T* a, const Cell& cell, T* out) {
    const int64_t first = cell.rows.begin;
    multiply(weight, w, a + first * c_.hidden, c_.hidden, cell.rows.size(), cell.panels,
             [&](int64_t m, int64_t panel, Columns y) {
               store(out + (first + m) * inner_stride_ + panel * kLanes, silu(y.left) * y.right);
             });
  }

  template <class Finish>
  void multiply(const PackedLinear& weight, const Worker& w, const T* a, int64_t stride, int64_t rows, Range panels,
                Finish&& finish) {
    pdserve::multiply(weight, own_[w.tid].linear, a, stride, rows, panels, finish);
    if (weight.next == nullptr) return;
    fetch_first(*weight.next, w.division.by_rows ? 0 : cell_of(*weight.next, w).panels.begin);
  }

  PackedLinear& linear(LinearKind kind, int64_t layer) {
    switch (kind) {
      case LinearKind::kQKV: return layers_[layer].qkv;
      case LinearKind::kO: return layers_[layer].o;
      case LinearKind::kGateUp: return layers_[layer].gate_up;
      case LinearKind::kDown: return layers_[layer].down;
      case LinearKind::kHead: break;
    }
    return head_;
  }

  const float*& norm(NormKind kind, int64_t layer) {
    switch (kind) {
      case NormKind::kAttention: return layers_[layer].attention_norm;
      case NormKind::kMlp: return layers_[layer].mlp_norm;
      case NormKind::kQ: return layers_[layer].q_norm;
      case NormKind::kK: return layers_[layer].k_norm;
      case NormKind::kFinal: break;
    }
    return final_norm_;
  }

  const EngineConfig c_;
  Team& team_;
  const DType dtype_;
  const bool fused_;  // rotation and the store to the pool happen as qkv is computed
  Arena arena_;  // weights
  std::unique_ptr<Arena> activations_;
  int64_t max_tokens_ = 0;
  AttentionPlan plan_;
  std::vector<Layer> layers_;
  PackedLinear head_;
  const float* final_norm_ = nullptr;
  const T* embedding_ = nullptr;
  int64_t x_stride_, qkv_stride_, inner_stride_, att_stride_;
  float* x_;             // [T, x_stride]: the residual
  T* qkv_;               // [T, qkv_stride]: queries; and keys and values unless fused
  T* att_;               // [T, H * D]
  T* normed_;            // [T, N]
  T* inner_;             // [T, inner_stride]
  float* wanted_x_;      // [T, x_stride]
  T* wanted_att_;        // [T, H * D]
  SlotPlace* kv_places_;  // [T]: where the token's keys lie in layer 0 of the pool
  std::vector<Own> own_;
};

}  // namespace

std::unique_ptr<EngineBase> make_engine(const EngineConfig& config, DType dtype, Team& team) {
  if (dtype == DType::kBFloat16) return std::make_unique<Engine<bf16>>(config, team);
  return std::make_unique<Engine<float>>(config, team);
}

}  // namespace pdserve
