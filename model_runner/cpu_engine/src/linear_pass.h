// What one thread does of a linear layer: rows times panels, each result handed to a finish while it is in a register.
#pragma once

#include <algorithm>

#include "arena.h"
#include "linear_quantized.h"
#include "simd.h"
#include "sizes.h"
#include "work_grid.h"

namespace pdserve {

struct Columns {
  Vec left, right;
};

// What a thread works in, and what it has read: on cache lines of its own.
struct alignas(kLine) LinearThread {
  QuantizedRows quantized{};
  float* wide = nullptr;
  int64_t weight_bytes[kProducts] = {};  // of this pass, for each product of PackedLinear::product

  // Room for rows of `widest` numbers.
  void reserve(Arena& arena, int64_t widest) {
    quantized = {arena.allocate<QuantizedRun>(ceil_div(kTileRows * widest, kRun)), 0, 0, {}};
    wide = arena.allocate<float>(kTileRows * dense_scratch_stride(widest));
  }
};

// `product(panel, tile)` computes a panel of all rows.
template <class Finish, class Product>
void multiply_panels(const PackedLinear& weight, int64_t rows, Range panels, Finish&& finish, Product&& product) {
  alignas(kLine) float tile[kTileRows * kPanel];
  for (int64_t p = panels.begin; p < panels.end; ++p) {
    const float* bias = weight.bias == nullptr ? nullptr : weight.bias + p * kPanel;
    const Columns add = bias == nullptr ? Columns{zero(), zero()} : Columns{load(bias), load(bias + kLanes)};
    product(p, tile);
    const float* y = tile;
    for (int64_t i = 0; i < rows; ++i, y += kPanel) {
      finish(i, p, Columns{load(y) + add.left, load(y + kLanes) + add.right});
    }
  }
}

inline void multiply_quantized(const PackedLinear& weight, const QuantizedRows& a, int64_t rows, int64_t panel,
                               float* tile) {
  const Segment& segment = weight.of(panel);
  const int64_t blocks = ceil_div(rows, kMaxRows);
  for (int64_t b = 0; b < blocks; ++b) {
    const Range m = share(rows, b, blocks);
    multiply_quantized_panel(segment.format, a, m.begin, static_cast<int>(m.size()), segment.panel(panel),
                             stream_of(segment.panel_bytes, b, blocks), tile + m.begin * kPanel);
  }
}

// Rows of activations as products with dense weights read them, or else those with quantised ones.
struct PreparedRows {
  DenseRows dense;
  QuantizedRows quantized;
};

// For products with `weight`, in the thread's own memory, where a dense one can't read them as they are.
template <class T>
PreparedRows prepare_rows(const PackedLinear& weight, LinearThread& own, const T* a, int64_t stride, int64_t rows) {
  if (weight.dense()) return {prepare_dense(a, stride, rows, weight.k, own.wide), {}};
  own.quantized.k = weight.k;
  own.quantized.count = rows;
  own.quantized.dtype = weight.activations;
  quantize_rows(a, stride, own.quantized);
  return {{}, own.quantized};
}

// `panels` times up to kTileRows rows; `finish(m, panel, columns)` takes every result with its bias.
template <class T, class Finish>
void multiply_prepared(const PackedLinear& weight, LinearThread& own, const PreparedRows& a, int64_t rows, Range panels,
                       Finish&& finish) {
  own.weight_bytes[weight.product] += weight.bytes(panels.begin, panels.end);
  if (weight.dense()) {
    multiply_panels(weight, rows, panels, finish, [&](int64_t p, float* tile) {
      const T* panel = reinterpret_cast<const T*>(weight.segments[0].panel(p));
      multiply_dense_panel(a.dense, static_cast<int>(rows), panel, weight.k, tile);
    });
  } else {
    multiply_panels(weight, rows, panels, finish,
                    [&](int64_t p, float* tile) { multiply_quantized(weight, a.quantized, rows, p, tile); });
  }
}

// The same for any number of rows [0, rows) of `a`, kTileRows at a time. Every thread widens or rounds the rows that it
// needs for itself: that is cheaper than to meet once more.
template <class T, class Finish>
void multiply(const PackedLinear& weight, LinearThread& own, const T* a, int64_t stride, int64_t rows, Range panels,
              Finish&& finish) {
  if (panels.size() == 0) return;
  const int64_t chunks = ceil_div(rows, kTileRows);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Range m = share(rows, chunk, chunks);
    const PreparedRows prepared = prepare_rows(weight, own, a + m.begin * stride, stride, m.size());
    multiply_prepared<T>(weight, own, prepared, m.size(), panels,
                         [&](int64_t i, int64_t panel, Columns y) { finish(m.begin + i, panel, y); });
  }
}

// A product's first bytes travel while its thread waits for the others.
inline void fetch_first(const PackedLinear& weight, int64_t panel) {
  constexpr int64_t kFirstBytes = 12288;
  if (panel >= weight.panels) return;
  const Segment& segment = weight.of(panel);
  const uint8_t* first = segment.panel(panel);
  const int64_t size = std::min<int64_t>(kFirstBytes, segment.panel_bytes);
  for (int64_t at = 0; at < size; at += kLine) _mm_prefetch(first + at, _MM_HINT_T0);
}

}  // namespace pdserve
