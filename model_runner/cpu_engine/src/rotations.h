// Tables of rotations: cosines and sines of positions times frequencies.
#pragma once

#include <cstdint>

#include "team.h"

namespace pdserve {

// Of positions [0, positions): cosines and sines [positions, pairs], times the pairs' `scales`. An angle is the position
// times the pair's frequency in float32, as torch rounds it; its cosine and sine are computed in float64, and rounded.
// So they are the nearest float32, but for one in millions, on every processor.
void fill_rotations(const float* frequencies, const float* scales, int64_t pairs, int64_t positions, float* cosines,
                    float* sines, Team& team);

}  // namespace pdserve
