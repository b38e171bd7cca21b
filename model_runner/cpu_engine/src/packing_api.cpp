// The C interface to WeightPacker: packs weights that an engine, in this process or in another one, then maps.
#include <new>

#include "api.h"
#include "packing.h"

using namespace pdserve;

// `layers`: model->layers of them. `kv_dtype`: of the pool that engines compute over.
PDS_API void* pds_packer_new(const ModelOps* model, const LayerOps* layers, int32_t dtype, int32_t kv_dtype,
                             void* team) {
  try {
    EngineConfig config{*model, {layers, layers + model->layers}, {}, {}};
    config.pool.dtype = static_cast<DType>(kv_dtype);
    return new WeightPacker(config, static_cast<DType>(dtype), *static_cast<Team*>(team));
  } catch (const std::exception&) {
    return nullptr;
  }
}

PDS_API void pds_packer_free(void* packer) { delete static_cast<WeightPacker*>(packer); }

// sizes: bytes of the panels, and floats of a bias. 1 where the parts can't be put together.
PDS_API int32_t pds_packer_size(const void* packer, int32_t kind, int64_t layer, int64_t expert, int64_t count,
                                const WeightPart* parts, int64_t* sizes) {
  try {
    const std::vector<WeightPart> all(parts, parts + count);
    WeightPacker::Size size;
    if (!static_cast<const WeightPacker*>(packer)->size({static_cast<LinearKind>(kind), layer, expert}, all, size)) {
      return 1;
    }
    sizes[0] = size.panel_bytes;
    sizes[1] = size.bias;
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

PDS_API int32_t pds_packer_pack(const void* packer, int32_t kind, int64_t layer, int64_t expert, int64_t count,
                                const WeightPart* parts, const float* bias, void* panels, float* packed_bias) {
  try {
    const std::vector<WeightPart> all(parts, parts + count);
    static_cast<const WeightPacker*>(packer)->pack({static_cast<LinearKind>(kind), layer, expert}, all, bias,
                                                   static_cast<uint8_t*>(panels), packed_bias);
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}
