// Matrix products with weights in the block formats of GGUF, as they are: quantized_formats.h says how they lie.
//
//   Q4_0, Q5_0, Q8_0: w = (q - offset) * d     Q4_1, Q5_1: w = q * d + m     IQ4_NL: w = table[q] * d      of 32 weights
//   Q4_K, Q5_K: w = q * (d * scale) - dmin * minimum, scale and minimum of 32 weights in 6 bits            of 256
//   Q6_K: w = (q - 32) * (d * scale), scale of 16 weights in 8 bits                                        of 256
//
// Activations are rounded to whole numbers, 32 at a time with one scale, so that products and their sums over such a run
// are exact: the only loss is that of the rounding, and every level gives the same bits.
//
//   int16   scale: the power of two that makes the largest number 15 bits long. A bfloat16 activation stays exact unless
//           it is below 1/128 of the largest in its run; smaller ones are off by at most 2^-16 of the largest.
//   int8    scale: the largest / 127. All are off by up to 1/254 of the largest. Half of the arithmetic.
//
// Each number of rows is computed in the same order: a row's result does not depend on other rows.
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
struct QuantizedRun {
  union {
    int16_t words[kRun];  // each four in the order 0, 2, 1, 3, see isa/bytes.h
    int8_t bytes[kRun];
  };
  float scale;
  float scaled_sum;        // of all a
  int32_t minus_sum;       // of all q, negative
  int32_t minus_half_sum;  // of the first 16
};

struct QuantizedRows {
  QuantizedRun* runs;  // [k / kRun, count]: a block of rows finds them side by side
  int64_t k;
  int64_t count;
  ActivationDType dtype;
};

// Rounds all rows of `rows`.
template <class T>
void quantize_rows(const T* a, int64_t stride, const QuantizedRows& rows);

// tile[m][kPanel] = rows [first, first + count) times one panel; count is 1 to kMaxRows.
void multiply_quantized_panel(Format format, const QuantizedRows& a, int64_t first, int count, const uint8_t* panel,
                              Stream stream, float* tile);

}  // namespace pdserve
