// Matrix products with weights in the block formats of GGUF, as they are: quantized_formats.h says how they lie.
//
//   Q4_0, Q5_0, Q8_0: w = (q - offset) * d     Q4_1, Q5_1: w = q * d + m     IQ4_NL: w = table[q] * d      of 32 weights
//   Q4_K, Q5_K: w = q * (d * scale) - dmin * minimum, scale and minimum of 32 weights in 6 bits            of 256
//   Q6_K: w = (q - 32) * (d * scale), scale of 16 weights in 8 bits                                        of 256
//
// Activations are rounded to 8 bits by runs of 32 as well, so that the products are whole numbers and exact; what is
// lost is in that rounding alone. (One scale for 256 activations, as others have it for super-blocks, would lose more.)
// Every number of rows takes the same road: a row's result does not depend on others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"
#include "quantized_formats.h"

namespace pdserve {

// Bytes of a packed panel; k is a multiple of a block's weights.
size_t quantized_panel_bytes(Format format, int64_t k);

// Packs one panel: column c is the row of blocks at columns[c], or zeros where that is null.
void pack_quantized_panel(Format format, int64_t k, const uint8_t* const* columns, uint8_t* panel);

// 32 activations: a = q * scale. One that is not finite makes all NaN.
// No larger than it must be: rows share the nearest cache with the weights that stream through it.
struct QuantizedRun {
  int8_t q[kRun];
  float scale;
  float scaled_sum;        // of all a
  int32_t minus_sum;       // of all q, negative
  int32_t minus_half_sum;  // of the first 16
};

struct QuantizedRows {
  QuantizedRun* runs;  // [k / kRun, count]: a block of rows finds them side by side
  int64_t k;
  int64_t count;
};

// Rounds all rows of `rows`.
template <class T>
void quantize_rows(const T* a, int64_t stride, const QuantizedRows& rows);

// tile[m][kPanel] = rows [first, first + count) times one panel; count is 1 to kMaxRows.
void multiply_quantized_panel(Format format, const QuantizedRows& a, int64_t first, int count, const uint8_t* panel,
                              Stream stream, float* tile);

}  // namespace pdserve
