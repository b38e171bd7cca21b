// Matrix products with weights in the block formats of GGUF: runs of 32 weights of one output share a float16 scale.
//
//   Q4_0: w = (q - 8) * d        Q4_1: w = q * d + m        Q8_0: w = q * d
//
// A packed panel is, for each run of 32 along k: the scales of its 32 columns, for Q4_1 their minima, then the columns'
// numbers in the order in which vpdpbusd wants them (16 columns, 4 consecutive k each). Not a bit is lost.
//
// Activations are rounded to 8 bits by runs of 32 as well, so that the products are whole numbers and exact; what is
// lost is in that rounding alone. Every number of rows takes the same road: a row's result does not depend on others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace pdserve {

constexpr int kRun = 32;  // weights that share a scale

// Bytes of a run of one output in a GGUF file.
size_t run_bytes(Format format);

// Bytes of a packed panel; k is a multiple of kRun.
size_t quantized_panel_bytes(Format format, int64_t k);

// Packs one panel: column c is row rows[c] of `blocks` ([N, k / kRun] runs), or zeros where rows[c] is -1.
void pack_quantized_panel(Format format, const uint8_t* blocks, int64_t k, const int32_t* rows, uint8_t* panel);

// Rows of activations in 8 bits: a = q * scale.
struct QuantizedRows {
  int8_t* q;          // [M, k]
  float* scale;       // [M, k / kRun]
  int32_t* sum;       // [M, k / kRun]: of the q of a run
  int64_t k;
};

// Rounds `count` rows.
template <class T>
void quantize_rows(const T* a, int64_t stride, int64_t count, const QuantizedRows& rows);

// tile[m][kPanel] = rows [first, first + count) times one panel; count is 1 to kMaxRows.
void multiply_quantized_panel(Format format, const QuantizedRows& a, int64_t first, int count, const uint8_t* panel,
                              Stream stream, float* tile);

}  // namespace pdserve
