// A pass from tokens to logits; its layers are in layer_pass.h.
#include "engine.h"

#include <algorithm>

#include "layer_pass.h"

namespace pdserve {
namespace {

template <class T>
class Engine final : public EngineBase {
 public:
  Engine(const EngineConfig& config, Team& team, RankGroup* ranks) : state_(config, team, ranks) {}

  bool set_linear(const LinearPlace& place, const std::vector<WeightPart>& parts, const uint8_t* panels,
                  const float* bias) override {
    return state_.weights.set_linear(place, parts, panels, bias);
  }

  void set_norm(NormKind kind, int64_t layer, const float* weight) override {
    state_.weights.set_norm(kind, layer, weight);
  }

  void set_vector(VectorKind kind, int64_t layer, const float* values) override {
    state_.weights.set_vector(kind, layer, values);
  }

  void set_embedding(const void* table) override { state_.weights.set_embedding(table); }

  const EngineConfig& config() const override { return state_.c; }

  void weight_bytes(int64_t* bytes) const override {
    std::fill_n(bytes, kProducts, 0);
    for (const auto& own : state_.own) {
      for (int i = 0; i < kProducts; ++i) bytes[i] += own.linear.weight_bytes[i];
    }
  }

  void forward(const ForwardArgs& args) override {
    const int64_t most = std::max(args.tokens, args.wanted);
    state_.activations.reserve(most);
    state_.plans.prepare(state_.c, args.entry, args.entries, {args.req_to_token, args.table_stride, args.window_pages},
                         state_.team.size());
    const ExpertSizes& experts = state_.strides.experts;
    for (auto& own : state_.own) {
      std::fill_n(own.linear.weight_bytes, kProducts, 0);
      if (experts.any()) own.experts.groups.reserve(experts.count, experts.chosen, most);
    }
    const Division all = divide(args.tokens), wanted = divide(args.wanted);
    uint32_t exchanges = state_.exchanges;
    state_.team.run([&](int tid, int size) {
      const uint32_t reached = pass(args, tid, size, all, wanted);
      if (tid == 0) exchanges = reached;
    });
    state_.exchanges = exchanges;
  }

  void meet() override {
    if (state_.ranks) state_.ranks->meet(state_.team.barrier_spin(), Exchange::kStored, state_.exchanges, 0);
  }

 private:
  Division divide(int64_t tokens) const {
    return pdserve::divide(state_.weights.layers(), state_.weights.head(), tokens, state_.team.size());
  }

  // Returns the number of exchanges with other ranks, this pass's included.
  uint32_t pass(const ForwardArgs& args, int tid, int size, const Division& all, const Division& few) {
    Activations<T>& a = state_.activations;
    const PassRows<T> rows{all, args.tokens, a.x, a.att};
    const int64_t last = state_.c.layers - 1;
    LayerPass<T> layers(state_, args, tid);
    embed(args, share(args.tokens, tid, size));
    if (!all.by_rows) state_.team.barrier();
    for (int64_t layer = 0; layer < last; ++layer) {
      layers.fill_attention(layer, rows);
      layers.finish_layer(layer, rows);
    }
    layers.fill_attention(last, rows);
    // Of the last layer's results only the wanted tokens' are ever read; of the others, their keys and values.
    if (args.wanted == 0) {
      layers.end_without_logits();
      return layers.exchanges();
    }
    gather_wanted(args, share(args.wanted, tid, size));
    state_.team.barrier();
    const PassRows<T> wanted{few, args.wanted, a.wanted_x, a.wanted_att};
    layers.finish_layer(last, wanted);
    state_.team.barrier();
    layers.run_head(wanted);
    return layers.exchanges();
  }

  void embed(const ForwardArgs& args, Range tokens) {
    Activations<T>& a = state_.activations;
    const float scale = state_.c.embedding_scale;
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      state_.weights.embed(args.input_ids[t], scale, a.x + t * state_.strides.x);
      const int64_t slot = args.out_cache_loc[t];
      a.places[0][t] = find_slot(state_.c.pool, slot);
      if (args.window_pages != nullptr) {
        const int64_t size = state_.c.pool.page_size;
        a.places[1][t] = find_slot(state_.c.window_pool, args.window_pages[slot / size] * size + slot % size);
      }
    }
  }

  // The wanted tokens' residuals and attention, side by side in the order of the results.
  void gather_wanted(const ForwardArgs& args, Range wanted) {
    Activations<T>& a = state_.activations;
    const Strides& strides = state_.strides;
    for (int64_t i = wanted.begin; i < wanted.end; ++i) {
      const int64_t t = args.wanted_tokens[i];
      std::copy_n(a.x + t * strides.x, strides.x, a.wanted_x + i * strides.x);
      std::copy_n(a.att + t * strides.att, strides.att, a.wanted_att + i * strides.att);
    }
  }

  EngineState<T> state_;
};

}  // namespace

std::unique_ptr<EngineBase> make_engine(const EngineConfig& config, DType dtype, Team& team, RankGroup* ranks) {
  if (dtype == DType::kBFloat16) return std::make_unique<Engine<bf16>>(config, team, ranks);
  return std::make_unique<Engine<float>>(config, team, ranks);
}

}  // namespace pdserve
