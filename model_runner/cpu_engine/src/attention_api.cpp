// Attention by itself, for tests and measurements; the engine calls attention.h directly.
#include <exception>
#include <new>
#include <vector>

#include "api.h"
#include "attention.h"
#include "kv_writer.h"
#include "team.h"

using namespace pdserve;

PDS_API void* pds_attention_plan_new() { return new (std::nothrow) AttentionPlan; }

PDS_API void pds_attention_plan_free(void* plan) { delete static_cast<AttentionPlan*>(plan); }

PDS_API int32_t pds_attention_prepare(void* plan, const KVPoolView* pool, int64_t num_heads, int64_t window,
                                      const AttentionEntry* entries, int64_t num_entries, const int32_t* req_to_token,
                                      int64_t table_stride, const int32_t* window_pages, int32_t nthreads) {
  try {
    static_cast<AttentionPlan*>(plan)->prepare(*pool, num_heads, window, entries, num_entries,
                                               {req_to_token, table_stride, window_pages}, nthreads);
  } catch (const std::exception&) {
    return -1;
  }
  return 0;
}

// Layers [begin, end) one after another, as a pass would; each overwrites `out`.
PDS_API void pds_attention_run(void* plan, void* team, int64_t begin, int64_t end, const Scoring* scoring,
                               const TokenRows* q, const TokenRows* out) {
  auto& threads = *static_cast<Team*>(team);
  threads.run([&](int tid, int) {
    for (int64_t layer = begin; layer < end; ++layer) {
      attention_run(*static_cast<AttentionPlan*>(plan), layer, *scoring, *q, *out, tid);
      threads.barrier();
    }
  });
}

PDS_API int32_t pds_store_kv(const KVPoolView* pool, int64_t layer, const int64_t* slots, const TokenRows* k,
                             const TokenRows* v, int64_t num_tokens) {
  try {
    std::vector<SlotPlace> places(num_tokens);
    for (int64_t t = 0; t < num_tokens; ++t) places[t] = find_slot(*pool, slots[t]);
    store_kv(*pool, layer, places.data(), *k, *v, 0, num_tokens);
  } catch (const std::exception&) {
    return -1;
  }
  return 0;
}
