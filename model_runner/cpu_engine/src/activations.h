// Where a pass keeps what lies between its products.
#pragma once

#include <algorithm>
#include <memory>

#include "arena.h"
#include "engine.h"
#include "expert_activations.h"
#include "kv_blocks.h"
#include "linear_pass.h"
#include "sizes.h"

namespace pdserve {

// Elements from one token to the next.
struct Strides {
  explicit Strides(const EngineConfig& c)
      : x(round_up(c.hidden, kPanel)),
        qkv(round_up((c.heads + 2 * c.kv_heads) * c.head_dim, kPanel)),
        inner(round_up(c.widest_inner(), kLanes)),
        att(c.heads * (c.is_latent() ? c.latent.kv_rank : c.head_dim)),
        normed(c.hidden),
        o(c.attended()),
        queries(c.is_latent() ? round_up(c.heads * c.latent.qk_dim(), kPanel) : 0),
        projected_row(c.latent.q_rank == 0 ? queries : round_up(c.latent.q_rank, kPanel)),
        projected(c.is_latent() ? projected_row + round_up(c.head_dim, kPanel) : 0),
        experts(c) {}

  const int64_t x, qkv, inner, att, normed;
  const int64_t o;  // what the product that leads back to the residual reads
  // Of latent attention; `projected_row`: where the row begins.
  const int64_t queries, projected_row, projected;
  const ExpertSizes experts;
};

// Of all tokens; every thread reads them, and writes its part.
template <class T>
class Activations {
 public:
  explicit Activations(const Strides& strides) : experts(strides.experts), strides_(strides) {
    allocate(kFirstTokens);
  }

  // Makes room for `tokens` tokens; what was there is forgotten.
  void reserve(int64_t tokens) {
    if (tokens > room_) allocate(std::max(tokens, 2 * room_));
    experts.reserve(tokens);
    experts.inputs.normed = normed;
  }

  float* x = nullptr;           // [T, x]: the residual
  float* sums = nullptr;        // [T, x]: products that are normalised before they join it
  T* qkv = nullptr;             // [T, qkv]: queries; and keys and values unless they go to the pool at once
  T* att = nullptr;             // [T, att]
  T* normed = nullptr;          // [T, normed]
  T* inner = nullptr;           // [T, inner]
  SlotPlace* places[2] = {};    // [T] by group of pages: where the token's keys lie in its pool
  float* wanted_x = nullptr;    // [T, x]
  T* wanted_att = nullptr;      // [T, att]
  T* projected = nullptr;       // [T, projected]: of latent attention, the queries or what leads to them, and the row
  T* queries = nullptr;         // [T, queries]
  T* expanded = nullptr;        // [T, o]: what becomes of att
  ExpertActivations<T> experts;

 private:
  static constexpr int64_t kFirstTokens = 512;

  // What was there goes first: both at once would be the peak of a pass's memory. If memory runs out on the way, there is
  // room for nothing, and the next pass allocates anew.
  void allocate(int64_t tokens) {
    room_ = 0;
    arena_ = std::make_unique<Arena>();
    x = arena_->template allocate<float>(tokens * strides_.x);
    sums = arena_->template allocate<float>(tokens * strides_.x);
    qkv = arena_->template allocate<T>(tokens * strides_.qkv);
    att = arena_->template allocate<T>(tokens * strides_.att);
    normed = arena_->template allocate<T>(tokens * strides_.normed);
    inner = arena_->template allocate<T>(tokens * strides_.inner);
    for (SlotPlace*& of_group : places) of_group = arena_->template allocate<SlotPlace>(tokens);
    wanted_x = arena_->template allocate<float>(tokens * strides_.x);
    wanted_att = arena_->template allocate<T>(tokens * strides_.att);
    if (strides_.projected != 0) {
      projected = arena_->template allocate<T>(tokens * strides_.projected);
      queries = arena_->template allocate<T>(tokens * strides_.queries);
      expanded = arena_->template allocate<T>(tokens * strides_.o);
    }
    room_ = tokens;
  }

  const Strides strides_;
  std::unique_ptr<Arena> arena_;
  int64_t room_ = 0;
};

// What one thread works in while it walks blocks of tokens.
template <class T>
struct ThreadActivations {
  T* normed = nullptr;  // [kTileRows, normed]
  T* inner = nullptr;   // [kTileRows, inner]
  LinearThread linear;
  ThreadExperts<T> experts;

  void allocate(Arena& arena, const Strides& strides) {
    normed = arena.allocate<T>(kTileRows * strides.normed);
    inner = arena.allocate<T>(kTileRows * strides.inner);
    linear.reserve(arena, std::max({strides.normed, strides.att, strides.o, strides.projected, strides.inner, strides.experts.inner}));
    experts.allocate(arena, strides.experts);
    experts.inputs.normed = normed;
  }
};

}  // namespace pdserve
