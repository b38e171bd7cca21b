// How the weights of an engine's linear layers lie: in panels, and within them in an order that suits what follows.
#pragma once

#include <vector>

#include "engine.h"
#include "linear.h"
#include "team.h"

namespace pdserve {

struct LinearShape {
  int64_t k;
  std::vector<int32_t> rows;  // which row of the weight each packed column takes; -1 for padding
};

// Tells whether the finish of a layer's qkv rotates heads and stores them to the pool. Then both elements of a rotated
// pair lie in one panel. `dtype`: type of the activations.
bool is_fused(const EngineConfig& config, DType dtype, int64_t layer);

LinearShape linear_shape(const EngineConfig& config, DType dtype, const LinearPlace& place);

// Fills in size, effort and segments of `packed`, whose panels lie at `panels`. A dense weight is of type T and one part;
// of parts, only rows and formats are read. False where the parts can't lie side by side, see PanelPacker.
template <class T>
bool arrange_linear(const LinearShape& shape, const std::vector<WeightPart>& parts, const uint8_t* panels,
                    PackedLinear& packed);

// Packs weights into memory of the caller, for engines of the same configuration, of whose pool only the type counts.
class WeightPacker {
 public:
  WeightPacker(const EngineConfig& config, DType dtype, Team& team) : config_(config), dtype_(dtype), team_(team) {}

  struct Size {
    int64_t panel_bytes;
    int64_t bias;  // elements, with the padding of panels
  };

  // False where the parts can't lie side by side.
  bool size(const LinearPlace& place, const std::vector<WeightPart>& parts, Size& size) const;

  // `parts` and `bias` (or null) as `size` was told; `panels` has panel_bytes, `packed_bias` as many floats as it says.
  void pack(const LinearPlace& place, const std::vector<WeightPart>& parts, const float* bias, uint8_t* panels,
            float* packed_bias) const;

 private:
  bool is_bf16(const LinearPlace& place) const;

  const EngineConfig config_;
  const DType dtype_;
  Team& team_;
};

}  // namespace pdserve
