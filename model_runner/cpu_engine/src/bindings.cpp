// The C interface that Python loads with ctypes. Pointers are kept alive, and shapes checked, by the caller.
// Functions that allocate answer null or -1 when memory runs out, or when a size is larger than any memory: no exception
// may cross into Python. The engine stays usable: a later pass that has memory computes what it would have computed.
#include <exception>
#include <new>

#include "api.h"
#include "engine.h"

using namespace pdserve;

PDS_API void* pds_team_new(int32_t size, const int32_t* cpus, int32_t spin_us) {
  try {
    return new Team(size, cpus, spin_us);
  } catch (const std::exception&) {  // no memory, or no more threads
    return nullptr;
  }
}

PDS_API void pds_team_free(void* team) { delete static_cast<Team*>(team); }

PDS_API void pds_team_set_size(void* team, int32_t size) { static_cast<Team*>(team)->set_size(size); }

// Of a member that is not the caller: 1 to the team's size - 1.
PDS_API int32_t pds_team_system_id(const void* team, int32_t tid) { return static_cast<const Team*>(team)->system_id(tid); }

PDS_API int64_t pds_ranks_bytes(int32_t size, int64_t part_floats, int64_t vocab) {
  return static_cast<int64_t>(RankGroup::bytes(size, {part_floats, vocab}));
}

// `memory`: zeroed, shared by the `local` ranks of a host; `carry` and what follows it: see rank_group.h.
PDS_API void* pds_ranks_new(void* memory, int32_t rank, int32_t size, int64_t part_floats, int64_t vocab, int32_t local,
                            Carry carry, Gone gone, Late late, int32_t patience) {
  return new (std::nothrow) RankGroup(memory, rank, size, {part_floats, vocab}, {local, carry, gone, late, patience});
}

PDS_API void* pds_ranks_part(void* ranks, uint32_t exchange, int32_t rank) {
  return static_cast<RankGroup*>(ranks)->part(exchange, rank);
}

PDS_API void* pds_ranks_logits(void* ranks, uint32_t slice) { return static_cast<RankGroup*>(ranks)->logits(slice); }

PDS_API void pds_ranks_free(void* ranks) { delete static_cast<RankGroup*>(ranks); }

// `layers`: model->layers of them. `window_pool`: null where all layers are of group 0.
PDS_API void* pds_engine_new(const ModelOps* model, const LayerOps* layers, const KVPoolView* pool,
                             const KVPoolView* window_pool, int32_t dtype, void* team, void* ranks) {
  try {
    const EngineConfig config{*model, {layers, layers + model->layers}, *pool,
                              window_pool == nullptr ? KVPoolView{} : *window_pool};
    return make_engine(config, static_cast<DType>(dtype), *static_cast<Team*>(team), static_cast<RankGroup*>(ranks))
        .release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

PDS_API void pds_engine_meet(void* engine) { static_cast<EngineBase*>(engine)->meet(); }

PDS_API void pds_engine_free(void* engine) { delete static_cast<EngineBase*>(engine); }

// 1 where the parts can't be put together. `panels` and `bias` are kept by reference, and so are all other weights.
PDS_API int32_t pds_engine_set_linear(void* engine, int32_t kind, int64_t layer, int64_t expert, int64_t count,
                                      const WeightPart* parts, const void* panels, const float* bias) {
  try {
    const std::vector<WeightPart> all(parts, parts + count);
    const LinearPlace place{static_cast<LinearKind>(kind), layer, expert};
    const auto* bytes = static_cast<const uint8_t*>(panels);
    return static_cast<EngineBase*>(engine)->set_linear(place, all, bytes, bias) ? 0 : 1;
  } catch (const std::exception&) {
    return -1;
  }
}

PDS_API void pds_engine_set_norm(void* engine, int32_t kind, int64_t layer, const float* weight) {
  static_cast<EngineBase*>(engine)->set_norm(static_cast<NormKind>(kind), layer, weight);
}

PDS_API void pds_engine_set_vector(void* engine, int32_t kind, int64_t layer, const float* values) {
  static_cast<EngineBase*>(engine)->set_vector(static_cast<VectorKind>(kind), layer, values);
}

PDS_API void pds_engine_set_embedding(void* engine, const void* table) {
  static_cast<EngineBase*>(engine)->set_embedding(table);
}

PDS_API int32_t pds_engine_forward(void* engine, const ForwardArgs* args) {
  try {
    static_cast<EngineBase*>(engine)->forward(*args);
  } catch (const std::exception&) {
    return -1;
  }
  return 0;
}

PDS_API void pds_engine_weight_bytes(const void* engine, int64_t* bytes) {
  static_cast<const EngineBase*>(engine)->weight_bytes(bytes);
}
