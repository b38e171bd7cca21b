// The sizes of the structs that Python mirrors (structs.py), so that it can see whether both mean the same.
#include <cstring>

#include "api.h"
#include "sampling.h"
#include "step.h"
#include "work_grid.h"

using namespace pdserve;

// 0: there is none of that name.
PDS_API int64_t pds_struct_size(const char* name) {
  struct Size {
    const char* name;
    size_t bytes;
  };
#define PDS_SIZE(S) \
  { #S, sizeof(S) }
  static constexpr Size sizes[] = {
      PDS_SIZE(KVPoolView),  PDS_SIZE(AttentionEntry), PDS_SIZE(TokenRows), PDS_SIZE(Scoring), PDS_SIZE(NormOp),    PDS_SIZE(ProjectQKV),
      PDS_SIZE(LatentOp), PDS_SIZE(Attend),      PDS_SIZE(AddProduct),     PDS_SIZE(GateUp),    PDS_SIZE(ExpertsOp), PDS_SIZE(LayerOps),  PDS_SIZE(ModelOps),
      PDS_SIZE(RopeTable),   PDS_SIZE(ForwardArgs),    PDS_SIZE(WeightPart), PDS_SIZE(Product),  PDS_SIZE(StepTables),
      PDS_SIZE(RowParams),
  };
#undef PDS_SIZE
  for (const Size& size : sizes) {
    if (std::strcmp(size.name, name) == 0) return static_cast<int64_t>(size.bytes);
  }
  return 0;
}
