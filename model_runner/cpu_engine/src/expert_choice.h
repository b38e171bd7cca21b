// Which experts a token goes through, and what their outputs are multiplied with.
//
//   scores = softmax(logits) or sigmoid(logits)
//   chosen: the largest of scores + choice bias, among the best groups; of equal ones, the first
//   weights = the chosen ones' scores, over their sum where normalised, times weight_scale
//
// A function of the token's logits alone. Where one of these is no number it chooses some experts all the same, and their
// weights are no numbers, which is seen.
#pragma once

#include <cstdint>

#include "layer_ops.h"
#include "simd.h"
#include "sizes.h"

namespace pdserve {

// Floats that choose_experts works in.
inline int64_t choice_room(const ExpertsOp& op) { return 2 * (round_up(op.count, kLanes) + op.groups); }

// Into chosen [op.chosen], the best first, and weights [op.chosen]. `logits`: [op.count], to be read in whole vectors;
// `bias`: [op.count], added to scores for the choice alone, or null.
void choose_experts(const ExpertsOp& op, const float* logits, const float* bias, float* room, int32_t* chosen,
                    float* weights);

}  // namespace pdserve
