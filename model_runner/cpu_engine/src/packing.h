// How the weights of an engine's linear layers lie: in panels, and within them in an order that suits what follows.
#pragma once

#include <vector>

#include "arena.h"
#include "engine.h"
#include "linear.h"
#include "team.h"

namespace pdserve {

struct LinearShape {
  int64_t k;
  std::vector<int32_t> rows;  // which row of the weight each packed column takes; -1 for padding
};

// `fused`: the finish of qkv rotates, so that both elements of a rotated pair must lie in one panel.
LinearShape linear_shape(const EngineConfig& config, const LinearPlace& place, bool fused);

// Fills in all of `packed` but its product, its type of activations and what a pass goes on with; memory is of `arena`. A dense weight is of type T and one part.
// False where the parts can't lie side by side, see PanelPacker.
template <class T>
bool pack_linear(const LinearShape& shape, const std::vector<WeightPart>& parts, const float* bias, Arena& arena,
                 Team& team, PackedLinear& packed);

}  // namespace pdserve
