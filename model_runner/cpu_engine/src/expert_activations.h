// Where a pass keeps what lies between the products of experts.
#pragma once

#include <algorithm>
#include <memory>

#include "arena.h"
#include "expert_choice.h"
#include "expert_groups.h"
#include "linear_quantized.h"
#include "sizes.h"

namespace pdserve {

// Up to this many tokens every thread computes what is cheaper than another barrier for all of them.
constexpr int64_t kRedundantTokens = 8;

// The largest of a model's layers; all 0 where none has experts.
struct ExpertSizes {
  explicit ExpertSizes(const EngineConfig& c) : hidden(c.hidden) {
    for (const LayerOps& layer : c.ops) {
      const ExpertsOp& op = layer.experts;
      if (op.count == 0) continue;
      count = std::max<int64_t>(count, op.count);
      chosen = std::max<int64_t>(chosen, op.chosen);
      router = std::max(router, round_up(op.rows(), kPanel));
      inner = std::max({inner, stride_of(layer.gate_up.inner), stride_of(op.shared_inner)});
      const int64_t all = op.chosen * stride_of(layer.gate_up.inner) + stride_of(op.shared_inner);
      inner_of_token = std::max(inner_of_token, all);
      choice = std::max(choice, choice_room(op));
    }
  }

  bool any() const { return count != 0; }
  int64_t runs() const { return hidden / kRun; }  // of a token

  // Elements from one row of an expert's activations to the next.
  static int64_t stride_of(int64_t inner) { return round_up(inner, kLanes); }

  int64_t hidden, count = 0, chosen = 0, router = 0, inner = 0, inner_of_token = 0, choice = 0;
};

// What is known of tokens before their experts compute. Those that all threads share, or a thread's own of few tokens.
template <class T>
struct ExpertInputs {
  T* normed = nullptr;           // [T, hidden]
  QuantizedRun* runs = nullptr;  // [T, hidden / kRun], where experts' weights are quantised
  int32_t* experts = nullptr;    // [T, chosen]: as ChosenExperts has them
  float* weights = nullptr;      // [T, chosen + 1]

  // Without `normed`, which lies elsewhere.
  void allocate(Arena& arena, const ExpertSizes& sizes, int64_t tokens) {
    runs = arena.allocate<QuantizedRun>(tokens * sizes.runs());
    experts = arena.allocate<int32_t>(tokens * sizes.chosen);
    weights = arena.allocate<float>(tokens * (sizes.chosen + 1));
  }

  ChosenExperts chosen() const { return {experts, weights}; }
};

// Of all tokens.
template <class T>
class ExpertActivations {
 public:
  explicit ExpertActivations(const ExpertSizes& sizes) : sizes_(sizes) {}

  // Makes room for `tokens` tokens; what was there is forgotten.
  void reserve(int64_t tokens) {
    if (!sizes_.any() || tokens <= room_) return;
    const int64_t room = std::max({tokens, 2 * room_, kFirstTokens});
    // As Activations does: no room, if memory runs out on the way.
    room_ = 0;
    arena_ = std::make_unique<Arena>();
    inputs.allocate(*arena_, sizes_, room);
    logits = arena_->template allocate<float>(room * sizes_.router);
    inner = arena_->template allocate<T>(room * sizes_.inner_of_token);
    inner_runs = arena_->template allocate<QuantizedRun>(room * sizes_.inner_of_token / kRun);
    room_ = room;
  }

  ExpertInputs<T> inputs;
  float* logits = nullptr;             // [T, router]
  T* inner = nullptr;                  // a row for each expert of a token, see ExpertGroups; where that is not quantised
  QuantizedRun* inner_runs = nullptr;  // the same, where it is

 private:
  static constexpr int64_t kFirstTokens = 512;

  const ExpertSizes sizes_;
  std::unique_ptr<Arena> arena_;
  int64_t room_ = 0;
};

// What one thread works in.
template <class T>
struct ThreadExperts {
  ExpertInputs<T> inputs;  // of up to kRedundantTokens
  T* gathered = nullptr;   // [kTileRows, hidden]
  float* choice = nullptr;
  ExpertGroups groups;

  void allocate(Arena& arena, const ExpertSizes& sizes) {
    if (!sizes.any()) return;
    inputs.allocate(arena, sizes, kRedundantTokens);
    gathered = arena.allocate<T>(kTileRows * sizes.hidden);
    choice = arena.allocate<float>(sizes.choice);
  }
};

}  // namespace pdserve
