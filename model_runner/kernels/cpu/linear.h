// Matrix products with weights that are packed once: out[m][n] = sum over k of a[m][k] * w[n][k].
//
// Packed weights are panels of kPanel output columns. A dense panel is [K / G][kPanel][G] with G = 2 for bfloat16 (the
// pairs that vdpbf16ps multiplies) and 1 for float32, so that the innermost loop reads it from front to back: a decode
// step streams each weight from memory once, and in a prefill a panel stays in the core's caches while block after
// block of rows passes over it. Quantised panels are described in quantized.h.
//
// An element of the result is one chain of additions in the order of k, whatever the number of rows and wherever the
// element lies in its block: a row's result does not depend on the rows beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace pdserve {

constexpr int kPanel = 32;     // columns of a panel
constexpr int kMaxRows = 12;   // rows of a block: with two registers of columns each, 24 of 32 registers accumulate

// How the weights of a linear layer are stored; part of the interface to Python.
enum class Format : int32_t { kDense = 0, kQ4_0 = 1, kQ4_1 = 2, kQ8_0 = 3 };

struct PackedLinear {
  Format format = Format::kDense;
  int64_t k = 0;
  int64_t panels = 0;
  size_t panel_bytes = 0;
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [panels * kPanel], or null

  const uint8_t* panel(int64_t index) const { return data + index * panel_bytes; }
};

// Bytes of a packed dense panel; k is even.
template <class T>
size_t dense_panel_bytes(int64_t k) {
  return static_cast<size_t>(k) * kPanel * sizeof(T);
}

// Packs one panel: column c of it is row rows[c] of `source` ([N, k]), or zeros where rows[c] is -1.
template <class T>
void pack_dense_panel(const T* source, int64_t k, const int32_t* rows, T* panel);

// tile[m][kPanel] = rows [0, count) of `a` times one panel; count is 1 to kMaxRows.
template <class T>
void multiply_dense_panel(const T* a, int64_t a_stride, int count, const T* panel, int64_t k, float* tile);

}  // namespace pdserve
