// The C interface that Python loads with ctypes. Pointers are kept alive, and shapes checked, by the caller.
// Functions that allocate answer null or -1 when memory runs out: no exception may cross into Python.
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

PDS_API void* pds_engine_new(const EngineConfig* config, int32_t dtype, void* team) {
  try {
    return make_engine(*config, static_cast<DType>(dtype), *static_cast<Team*>(team)).release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

PDS_API void pds_engine_free(void* engine) { delete static_cast<EngineBase*>(engine); }

PDS_API int32_t pds_engine_set_linear(void* engine, int32_t kind, int64_t layer, int32_t format, const void* weight,
                                      const float* bias) {
  try {
    static_cast<EngineBase*>(engine)->set_linear(static_cast<LinearKind>(kind), layer, static_cast<Format>(format),
                                                 weight, bias);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

PDS_API int32_t pds_engine_set_norm(void* engine, int32_t kind, int64_t layer, const float* weight) {
  try {
    static_cast<EngineBase*>(engine)->set_norm(static_cast<NormKind>(kind), layer, weight);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

PDS_API void pds_engine_set_embedding(void* engine, const void* table) {
  static_cast<EngineBase*>(engine)->set_embedding(table);
}

PDS_API int32_t pds_engine_forward(void* engine, const ForwardArgs* args) {
  try {
    static_cast<EngineBase*>(engine)->forward(*args);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}
