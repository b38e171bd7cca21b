// A whole step of the worker in one call: checks, request table, batch, pass, samples.
//
// Between two passes the worker's code finds its caches swept by the weights, so what counts there is how little of it
// runs: the same bookkeeping in Python takes 0.1 ms hot and 0.9 ms in a server. Steps that want more than tokens
// (logprobs, penalties, bans), and steps that make no sense, are left to the general way, before anything is changed.
//
// Shapes: B entries, T tokens, S sampled entries, R rows and C columns of the request table.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "engine.h"
#include "sampling.h"
#include "team.h"

namespace pdserve {

// What outlives a step; owned by Python. Mirrored in structs.py.
struct StepTables {
  int32_t* req_to_token;    // [R, C]: row and position -> slot
  int64_t rows, columns;
  int64_t* last_tokens;     // [R]
  const RowParams* params;  // [R]
  int64_t slots;            // of the pool
  const int32_t* window_pages;  // [slots / page_size], see ForwardArgs
  int32_t clear_begun;      // zero the pages that a pass begins and does not fill
  int32_t shared_heads;     // other ranks write the same heads of them
};

// The arrays of a ForwardStep, and where the answer goes. Mirrored by the signature in library.py.
struct StepArgs {
  int64_t entries, tokens;
  const int32_t *rows, *starts, *q_lens, *use_last, *sample;  // [B]
  const int32_t *input_ids, *out_cache_loc;                   // [T]
  const RopeTable* ropes;                                     // see ForwardArgs
  int64_t rotations;                                          // positions that they reach
  int32_t* next_tokens;  // [S] of at most B
  uint8_t* finite;       // [S] of at most B
  int64_t* layers_done;  // see ForwardArgs
};

class Stepper {
 public:
  Stepper(EngineBase& engine, Team& team, const StepTables& tables)
      : engine_(engine), tables_(tables), sampler_(&team) {}

  // The number of sampled entries, or -1 with nothing changed: a step for the general way.
  int64_t run(const StepArgs& args);

 private:
  bool plan(const StepArgs& args);
  bool plan_entry(const StepArgs& args, int64_t entry, int64_t first_token);
  bool clear_begun_pages(const StepArgs& args);
  void clear_page(const KVPoolView& pool, int64_t page);
  void choose(const StepArgs& args);

  EngineBase& engine_;
  const StepTables tables_;
  RowSampler sampler_;
  std::vector<int64_t> input_ids_, positions_, slots_, wanted_;
  std::vector<AttentionEntry> batch_;
  std::vector<int32_t> sampled_rows_;       // [S]
  std::vector<int64_t> sampled_positions_;  // [S], of the tokens to be sampled
  std::vector<int64_t> chosen_;             // [S]
  AlignedFloats logits_;                    // [S, V]
};

}  // namespace pdserve
