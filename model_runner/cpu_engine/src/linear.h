// Matrix products with weights that are packed once: out[m][n] = sum over k of a[m][k] * w[n][k].
//
// Packed weights are panels of kPanel output columns. A dense panel is [K / G][kPanel][G] with G = 2 for bfloat16 (the
// pairs that vdpbf16ps multiplies) and 1 for float32, so that the innermost loop reads it from front to back: a decode
// step streams each weight from memory once, and in a prefill a panel stays in the core's caches while block after
// block of rows passes over it. Quantised panels are described in quantized_formats.h.
//
// An element of the result is one chain of additions in the order of k, whatever the number of rows and wherever the
// element lies in its block: a row's result does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fetch.h"
#include "sizes.h"
#include "types.h"

namespace pdserve {

constexpr int kPanel = 32;     // columns of a panel
constexpr int kMaxRows = 12;   // rows of a block of a quantised product
constexpr int kProducts = 9;   // kinds of products in a pass
constexpr int kTileRows = 96;  // rows that a thread takes past a panel before it goes on to the next

// How the weights of a linear layer are stored; part of the interface to Python.
enum class Format : int32_t {
  kDense = 0,
  kQ4_0 = 1,
  kQ4_1 = 2,
  kQ8_0 = 3,
  kQ5_0 = 4,
  kQ5_1 = 5,
  kIQ4_NL = 6,
  kQ4_K = 7,
  kQ5_K = 8,
  kQ6_K = 9,
};

// Panels of one format, one after another.
struct Segment {
  Format format = Format::kDense;
  int64_t begin = 0;  // the first panel's place
  size_t panel_bytes = 0;
  const uint8_t* data = nullptr;

  const uint8_t* panel(int64_t index) const { return data + (index - begin) * panel_bytes; }
};

// Its segments are all dense or all quantised: queries, keys and values of a GGUF may be of different kinds.
struct PackedLinear {
  static constexpr int kSegments = 3;

  int product = 0;    // which of a pass's products this is, below kProducts
  double effort = 1;  // see work_grid.h
  ActivationDType activations = ActivationDType::kInt16;  // where it is quantised
  int64_t k = 0;
  int64_t panels = 0;
  Segment segments[kSegments];
  int used = 0;                 // of the segments
  const float* bias = nullptr;  // [panels * kPanel], or null
  const PackedLinear* next = nullptr;  // what a pass multiplies with after this

  bool dense() const { return segments[0].format == Format::kDense; }

  const Segment& of(int64_t panel) const {
    int i = used - 1;
    while (segments[i].begin > panel) --i;
    return segments[i];
  }

  // Of panels [begin, end).
  int64_t bytes(int64_t begin, int64_t end) const {
    int64_t sum = 0;
    for (int i = 0; i < used; ++i) {
      const int64_t last = i + 1 < used ? segments[i + 1].begin : panels;
      const int64_t count = std::min(last, end) - std::max(segments[i].begin, begin);
      if (count > 0) sum += count * static_cast<int64_t>(segments[i].panel_bytes);
    }
    return sum;
  }
};

// What a product takes (work_grid.h).
template <class T>
double dense_effort();
constexpr double quantized_effort(ActivationDType dtype) { return dtype == ActivationDType::kInt16 ? 1.0 : 0.5; }

// Bytes of a packed dense panel; k is even.
template <class T>
size_t dense_panel_bytes(int64_t k) {
  return static_cast<size_t>(k) * kPanel * sizeof(T);
}

// Packs one panel: column c of it is row rows[c] of `source` ([N, k]), or zeros where rows[c] is -1.
template <class T>
void pack_dense_panel(const T* source, int64_t k, const int32_t* rows, T* panel);

// Reads column `column` of a packed dense panel, which is a row of the weight: out[k], each element times `scale`.
template <class T>
void unpack_dense_column(const T* panel, int column, int64_t k, float scale, float* out);

// Rows of activations as dense products read them.
struct DenseRows {
  const char* first;
  int64_t stride;  // in bytes

  DenseRows from(int64_t row) const { return {first + row * stride, stride}; }
};

// Floats from one widened row to the next: a line more than it takes, so that rows of a power of two don't share a set
// of the nearest cache.
inline int64_t dense_scratch_stride(int64_t k) { return round_up(k, 16) + 16; }

// Prepares `count` rows for any number of products. Where bfloat16 can't be multiplied it is widened here, once, into
// `scratch` (count * dense_scratch_stride(k)); other rows stay where they are.
template <class T>
DenseRows prepare_dense(const T* a, int64_t stride, int64_t count, int64_t k, float* scratch);

// tile[m][kPanel] = rows [0, count) times one panel; count is 1 to kTileRows. Asks for the panel behind this one.
template <class T>
void multiply_dense_panel(const DenseRows& rows, int count, const T* panel, int64_t k, float* tile);

// Which bytes a block of a quantised product fetches from memory while it computes: it starts `offset` bytes after the
// panel that it multiplies with, and takes `part` of as many bytes as it reads. Panels lie one after another.
struct Stream {
  int64_t offset;
  enum Part { kNone, kHalf, kAll } part;
};

// One block alone needs its own panel's bytes at the rate of its arithmetic: it fetches them a little ahead, but more
// than a memory latency's worth, as they are used in bursts. The first of several blocks would wait for memory and the
// others leave it idle: there, the first two fetch half of the next panel each.
inline Stream stream_of(size_t panel_bytes, int64_t block, int64_t blocks) {
  const int64_t size = static_cast<int64_t>(panel_bytes);
  if (blocks == 1) return {bytes_ahead(), Stream::kAll};
  if (block < 2) return {size + block * (size / 2), Stream::kHalf};
  return {0, Stream::kNone};
}

}  // namespace pdserve
