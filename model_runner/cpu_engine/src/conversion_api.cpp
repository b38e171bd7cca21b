// The C interface to what packing computes beside panels: converted weights, and tables of rotations.
#include "api.h"
#include "conversion.h"
#include "rotations.h"

using namespace pdserve;

PDS_API void pds_convert(void* team, int32_t from, const void* in, int32_t to, void* out, int64_t count) {
  convert(static_cast<FloatType>(from), in, static_cast<FloatType>(to), out, count, *static_cast<Team*>(team));
}

PDS_API void pds_dequantise(void* team, int32_t format, const uint8_t* blocks, int64_t count, int32_t to, void* out) {
  dequantise(static_cast<Format>(format), blocks, count, static_cast<FloatType>(to), out, *static_cast<Team*>(team));
}

PDS_API void pds_rotations(void* team, const float* frequencies, const float* scales, int64_t pairs, int64_t positions,
                           float* cosines, float* sines) {
  fill_rotations(frequencies, scales, pairs, positions, cosines, sines, *static_cast<Team*>(team));
}
