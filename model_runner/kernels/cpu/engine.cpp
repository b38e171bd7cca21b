#include "engine.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "elementwise.h"
#include "kv_blocks.h"
#include "linear_quantized.h"

namespace pdserve {
namespace {

// Up to this many tokens a pass streams weights by columns; beyond, it walks blocks of this many tokens.
constexpr int64_t kColumnTokens = 48;
constexpr int64_t kBlockTokens = 96;
// Up to this many tokens every thread normalises all of them, which is cheaper than another barrier.
constexpr int64_t kRedundantTokens = 8;
// What a thread fetches of its next product's weights before it waits for the others.
constexpr int64_t kFirstBytes = 12288;
// Tokens that activations have room for from the start.
constexpr int64_t kFirstTokens = 512;

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

Range share(int64_t total, int tid, int size) { return {total * tid / size, total * (tid + 1) / size}; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Columns {
  Vec left, right;
};

template <class T>
class Engine final : public EngineBase {
 public:
  Engine(const EngineConfig& config, Team& team)
      : c_(config),
        team_(team),
        dtype_(sizeof(T) == 2 ? DType::kBFloat16 : DType::kFloat32),
        fused_(config.head_dim % kPanel == 0 && !config.qk_norm && config.pool.dtype == dtype_),
        layers_(config.layers) {
    for (size_t i = 0; i < layers_.size(); ++i) {
      Layer& layer = layers_[i];
      layer.qkv.next = &layer.o;
      layer.o.next = &layer.gate_up;
      layer.gate_up.next = &layer.down;
      layer.down.next = i + 1 < layers_.size() ? &layers_[i + 1].qkv : &head_;
    }
    x_stride_ = ceil_div(c_.hidden, kPanel) * kPanel;
    qkv_stride_ = ceil_div((c_.heads + 2 * c_.kv_heads) * c_.head_dim, kPanel) * kPanel;
    inner_stride_ = ceil_div(c_.inner, kLanes) * kLanes;
    att_stride_ = c_.heads * c_.head_dim;
    inner_ = arena_.allocate<T>(kColumnTokens * inner_stride_);
    for (int tid = 0; tid < team.size(); ++tid) {
      const int64_t widest = kBlockTokens * std::max({c_.hidden, att_stride_, c_.inner}), runs = ceil_div(widest, kRun);
      own_.push_back({arena_.allocate<T>(kBlockTokens * c_.hidden),
                      arena_.allocate<T>(kBlockTokens * inner_stride_),
                      {arena_.allocate<int8_t>(widest), arena_.allocate<float>(runs), arena_.allocate<int32_t>(runs), 0}});
    }
    reserve(kFirstTokens);
  }

  void set_linear(LinearKind kind, int64_t layer, Format format, const void* weight, const float* bias) override {
    PackedLinear& packed = linear(kind, layer);
    const std::vector<int32_t> rows = column_order(kind);
    packed.format = format;
    packed.k = input_size(kind);
    packed.panels = static_cast<int64_t>(rows.size()) / kPanel;
    const bool dense = format == Format::kDense;
    packed.panel_bytes = dense ? dense_panel_bytes<T>(packed.k) : quantized_panel_bytes(format, packed.k);
    uint8_t* data = arena_.allocate<uint8_t>(packed.panels * packed.panel_bytes);
    packed.data = data;
    team_.run([&](int tid, int size) {
      const Range own = share(packed.panels, tid, size);
      for (int64_t p = own.begin; p < own.end; ++p) {
        uint8_t* panel = data + p * packed.panel_bytes;
        if (dense) {
          pack_dense_panel(static_cast<const T*>(weight), packed.k, &rows[p * kPanel], reinterpret_cast<T*>(panel));
        } else {
          pack_quantized_panel(format, static_cast<const uint8_t*>(weight), packed.k, &rows[p * kPanel], panel);
        }
      }
    });
    if (bias == nullptr) return;
    float* packed_bias = arena_.allocate<float>(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) packed_bias[i] = rows[i] < 0 ? 0.0f : bias[rows[i]];
    packed.bias = packed_bias;
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

  void forward(const ForwardArgs& args) override {
    const int64_t room = std::max(args.tokens, args.wanted);
    if (room > max_tokens_) reserve(std::max(room, 2 * max_tokens_));
    const float scale = 1.0f / std::sqrt(static_cast<float>(c_.head_dim));
    plan_.prepare(c_.pool, c_.heads, scale, args.entry, args.entries, args.req_to_token, args.table_stride,
                  team_.size());
    team_.run([&](int tid, int size) { pass(args, tid, size); });
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
    T* normed;
    T* inner;
    QuantizedRows quantized;
  };

  // One thread's part in a pass, or in the rest of one that goes on with fewer tokens.
  struct Worker {
    const ForwardArgs& args;
    int tid, size;
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
    kv_places_ = activations_->allocate<SlotPlace>(tokens);
    wanted_x_ = activations_->allocate<float>(tokens * x_stride_);
    wanted_att_ = activations_->allocate<T>(tokens * att_stride_);
    max_tokens_ = tokens;
  }

  void pass(const ForwardArgs& args, int tid, int size) {
    const Worker w{args, tid, size, args.tokens, x_, att_};
    const int64_t last = c_.layers - 1;
    embed(w);
    if (args.tokens <= kColumnTokens) team_.barrier();
    for (int64_t layer = 0; layer < last; ++layer) {
      fill_attention(layer, w);
      finish_layer(layer, w);
    }
    fill_attention(last, w);
    // Of the last layer's results only those that become logits are ever read; of the others, their keys and values.
    if (args.wanted == 0) return;
    const Worker wanted = gather_wanted(w);
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
    if (w.tokens > kColumnTokens) {
      const Own& scratch = own_[w.tid];
      for_blocks(w, [&](Range rows) {
        normalise(layer.attention_norm, w, rows, scratch.normed);
        project_qkv(layer, index, w, scratch.normed, rows, {0, layer.qkv.panels});
        if (!fused_) rotate_and_store(layer, index, w, rows);
      });
    } else {
      const T* normed = normalise_all(layer.attention_norm, w);
      project_qkv(layer, index, w, normed, {0, w.tokens}, share(layer.qkv.panels, w.tid, w.size));
      if (!fused_) {
        team_.barrier();
        rotate_and_store(layer, index, w, share(w.tokens, w.tid, w.size));
      }
    }
    if (index + 1 == c_.layers && w.args.wanted == 0) return;
    team_.barrier();
    attention_run(plan_, index, {qkv_, dtype_, qkv_stride_}, {att_, dtype_, att_stride_}, w.tid);
    team_.barrier();
  }

  // The second half: from att to the residual of the next layer.
  void finish_layer(int64_t index, const Worker& w) {
    const Layer& layer = layers_[index];
    if (w.tokens > kColumnTokens) {
      const Own& scratch = own_[w.tid];
      for_blocks(w, [&](Range rows) {
        add_to_residual(layer.o, w, w.att + rows.begin * att_stride_, att_stride_, rows, {0, layer.o.panels});
        normalise(layer.mlp_norm, w, rows, scratch.normed);
        gate(layer.gate_up, w, scratch.normed, rows.size(), {0, layer.gate_up.panels}, scratch.inner);
        add_to_residual(layer.down, w, scratch.inner, inner_stride_, rows, {0, layer.down.panels});
      });
      return;
    }
    const Range all{0, w.tokens};
    add_to_residual(layer.o, w, w.att, att_stride_, all, share(layer.o.panels, w.tid, w.size));
    team_.barrier();
    const T* normed = normalise_all(layer.mlp_norm, w);
    gate(layer.gate_up, w, normed, all.size(), share(layer.gate_up.panels, w.tid, w.size), inner_);
    team_.barrier();
    add_to_residual(layer.down, w, inner_, inner_stride_, all, share(layer.down.panels, w.tid, w.size));
    team_.barrier();
  }

  // The thread's own tokens, in blocks of about kBlockTokens.
  template <class F>
  void for_blocks(const Worker& w, F&& f) {
    const Range own = share(w.tokens, w.tid, w.size);
    const int64_t blocks = ceil_div(own.size(), kBlockTokens);
    for (int64_t b = 0; b < blocks; ++b) {
      f(Range{own.begin + own.size() * b / blocks, own.begin + own.size() * (b + 1) / blocks});
    }
  }

  // The wanted tokens' residuals and attention, side by side in the order of the logits.
  Worker gather_wanted(const Worker& w) {
    const Range own = share(w.args.wanted, w.tid, w.size);
    for (int64_t i = own.begin; i < own.end; ++i) {
      const int64_t t = w.args.logit_indices[i];
      std::copy_n(w.x + t * x_stride_, x_stride_, wanted_x_ + i * x_stride_);
      std::copy_n(w.att + t * att_stride_, att_stride_, wanted_att_ + i * att_stride_);
    }
    team_.barrier();
    return {w.args, w.tid, w.size, w.args.wanted, wanted_x_, wanted_att_};
  }

  void run_head(const Worker& w) {
    const ForwardArgs& args = w.args;
    const Range own = share(args.wanted, w.tid, w.size);
    for (int64_t i = own.begin; i < own.end; ++i) {
      rms_norm(w.x + i * x_stride_, final_norm_, c_.eps, static_cast<int>(c_.hidden), normed_ + i * c_.hidden);
    }
    team_.barrier();
    multiply(head_, w, normed_, c_.hidden, args.wanted, share(head_.panels, w.tid, w.size),
             [&](int64_t m, int64_t panel, Columns y) {
               float* out = args.logits + m * c_.vocab + panel * kPanel;
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

  void add_to_residual(const PackedLinear& weight, const Worker& w, const T* a, int64_t stride, Range rows, Range panels) {
    multiply(weight, w, a, stride, rows.size(), panels, [&](int64_t m, int64_t panel, Columns y) {
      float* x = w.x + (rows.begin + m) * x_stride_ + panel * kPanel;
      store(x, load(x) + y.left);
      store(x + kLanes, load(x + kLanes) + y.right);
    });
  }

  void gate(const PackedLinear& weight, const Worker& w, const T* a, int64_t rows, Range panels, T* out) {
    multiply(weight, w, a, c_.hidden, rows, panels, [&](int64_t m, int64_t panel, Columns y) {
      store(out + m * inner_stride_ + panel * kLanes, silu(y.left) * y.right);
    });
  }

  // Panels times rows [0, rows) of `a`; `finish(m, panel, columns)` takes every result with its bias.
  template <class Finish>
  void multiply(const PackedLinear& weight, const Worker& w, const T* a, int64_t stride, int64_t rows, Range panels,
                Finish&& finish) {
    if (weight.format == Format::kDense) {
      multiply_panels(weight, w, rows, panels, finish, [&](Range m, int64_t p, Stream stream, float* tile) {
        const T* panel = reinterpret_cast<const T*>(weight.panel(p));
        multiply_dense_panel(a + m.begin * stride, stride, static_cast<int>(m.size()), panel, weight.k, stream, tile);
      });
      return;
    }
    // Every thread rounds the rows that it needs for itself: that is cheaper than to meet once more.
    QuantizedRows& q = own_[w.tid].quantized;
    q.k = weight.k;
    for (int64_t first = 0; first < rows; first += kBlockTokens) {
      const int64_t size = std::min(kBlockTokens, rows - first);
      quantize_rows(a + first * stride, stride, size, q);
      const auto from_first = [&](int64_t m, int64_t panel, Columns y) { finish(first + m, panel, y); };
      multiply_panels(weight, w, size, panels, from_first, [&](Range m, int64_t p, Stream stream, float* tile) {
        const int count = static_cast<int>(m.size());
        multiply_quantized_panel(weight.format, q, m.begin, count, weight.panel(p), stream, tile);
      });
    }
  }

  // `product(rows, panel, stream, tile)` computes a block of at most kMaxRows rows.
  template <class Finish, class Product>
  void multiply_panels(const PackedLinear& weight, const Worker& w, int64_t rows, Range panels, Finish&& finish,
                       Product&& product) {
    alignas(64) float tile[kMaxRows * kPanel];
    const int64_t blocks = ceil_div(rows, kMaxRows);
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      const float* bias = weight.bias == nullptr ? nullptr : weight.bias + p * kPanel;
      const Columns add = bias == nullptr ? Columns{zero(), zero()} : Columns{load(bias), load(bias + kLanes)};
      for (int64_t b = 0; b < blocks; ++b) {
        const Range m{rows * b / blocks, rows * (b + 1) / blocks};
        product(m, p, stream_of(weight.panel_bytes, b, blocks), tile);
        const float* y = tile;
        for (int64_t i = m.begin; i < m.end; ++i, y += kPanel) {
          finish(i, p, Columns{load(y) + add.left, load(y + kLanes) + add.right});
        }
      }
    }
    if (weight.next != nullptr && w.tokens <= kColumnTokens) {
      // The next product's first bytes travel while this thread waits for the others.
      const uint8_t* first = weight.next->panel(share(weight.next->panels, w.tid, w.size).begin);
      const int64_t size = std::min<int64_t>(kFirstBytes, weight.next->panel_bytes);
      for (int64_t at = 0; at < size; at += kLine) _mm_prefetch(first + at, _MM_HINT_T0);
    }
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

  int64_t input_size(LinearKind kind) const {
    switch (kind) {
      case LinearKind::kO: return att_stride_;
      case LinearKind::kDown: return c_.inner;
      default: return c_.hidden;
    }
  }

  // Which row of the weight each packed column takes; -1 for padding.
  std::vector<int32_t> column_order(LinearKind kind) const {
    std::vector<int32_t> order;
    const auto run = [&](int64_t first, int64_t count) {
      for (int64_t i = 0; i < count; ++i) order.push_back(static_cast<int32_t>(first + i));
    };
    switch (kind) {
      case LinearKind::kQKV: {
        // Both elements of a rotated pair lie in one panel, so that its finish can rotate them.
        const int64_t rotated = fused_ ? c_.heads + c_.kv_heads : 0, half = c_.head_dim / 2;
        for (int64_t h = 0; h < rotated; ++h) {
          for (int64_t i = 0; i < half; i += kLanes) {
            run(h * c_.head_dim + i, kLanes);
            run(h * c_.head_dim + half + i, kLanes);
          }
        }
        run(rotated * c_.head_dim, (c_.heads + 2 * c_.kv_heads - rotated) * c_.head_dim);
        break;
      }
      case LinearKind::kGateUp:
        // A gate and its product lie in one panel, so that its finish can multiply them.
        for (int64_t i = 0; i < inner_stride_; i += kLanes) {
          for (int64_t first : {int64_t{0}, c_.inner}) {
            run(first + i, std::min<int64_t>(kLanes, c_.inner - i));
            order.resize(ceil_div(static_cast<int64_t>(order.size()), kLanes) * kLanes, -1);
          }
        }
        break;
      case LinearKind::kHead: run(0, c_.vocab); break;
      default: run(0, c_.hidden); break;
    }
    order.resize(ceil_div(static_cast<int64_t>(order.size()), kPanel) * kPanel, -1);
    return order;
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
  T* inner_;             // [kColumnTokens, inner_stride]
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
