// Whole steps, as Python calls them.
#include <exception>

#include "api.h"
#include "step.h"

using namespace pdserve;

PDS_API void* pds_stepper_new(void* engine, void* team, const StepTables* tables) {
  try {
    return new Stepper(*static_cast<EngineBase*>(engine), *static_cast<Team*>(team), *tables);
  } catch (const std::exception&) {
    return nullptr;
  }
}

PDS_API void pds_stepper_free(void* stepper) { delete static_cast<Stepper*>(stepper); }

// The number of sampled entries; -1: not a step for here, and nothing was changed; -2: no memory.
PDS_API int64_t pds_stepper_run(void* stepper, int64_t entries, int64_t tokens, const int32_t* rows,
                                const int32_t* starts, const int32_t* q_lens, const int32_t* use_last,
                                const int32_t* sample, const int32_t* input_ids, const int32_t* out_cache_loc,
                                const RopeTable* ropes, int64_t rotations, int32_t* next_tokens,
                                uint8_t* finite, int64_t* layers_done) {
  try {
    return static_cast<Stepper*>(stepper)->run({entries, tokens, rows, starts, q_lens, use_last, sample, input_ids,
                                                out_cache_loc, ropes, rotations, next_tokens, finite, layers_done});
  } catch (const std::exception&) {
    return -2;
  }
}
