// Blocks of rows of 16-bit activations times a panel of quantised weights.
//
// For several rows each run of the panel is widened to words once, into memory that the nearest cache holds, and then
// multiplied with all rows of the block: the loop over a run is the same for all formats, and a few rows share each word
// that is loaded. One row alone is multiplied with the words as they come out of the registers: a decode of one stream is
// bound by memory, and to store and load the words again would make it slower (by 16 % on two Zen 3 cores).
//
// A column's result is one chain of float32 additions along k, a run at a time, on every processor and in both ways.
#pragma once

#include <algorithm>
#include <utility>

#include "quantized_block.h"
#include "sizes.h"

namespace pdserve {

constexpr int kPairs = kRun / 2;  // of a column's words in a run
constexpr int kParts = kPanel / kColumns;

// A run of all columns of a panel: scale * (w - offset) + minimum, as RunOfColumns.
struct alignas(64) WideRun {
  int16_t words[kPairs][kPanel * 2];  // in the order of QuantizedRun::words
  float scale[2][kPanel];
  float minimum[kPanel];
};

// Parts of a run that have a scale of their own.
constexpr int scales_of(const BlockShape& s) { return s.run_bytes != 0 && s.halves == 1 ? 2 : 1; }

// What the products of part `part` of a run begin with: minus the offset times the sum of its activations.
template <Format F>
inline Ints begin_of(const QuantizedRun& row, int part) {
  constexpr BlockShape s = block_shape(F);
  constexpr int kShift = s.offset == 8 ? 3 : s.offset == 16 ? 4 : s.offset == 32 ? 5 : 7;
  if constexpr (s.offset == 0) return spread(0);
  const int32_t minus_sum = scales_of(s) == 1 ? row.minus_sum
                            : part == 0       ? row.minus_half_sum
                                              : row.minus_sum - row.minus_half_sum;
  return shift_left<kShift>(spread(minus_sum));
}

template <Format F>
inline void widen(const uint8_t* header, const uint8_t* run, WideRun& wide) {
  constexpr BlockShape s = block_shape(F);
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const int column = part * kColumns;
    const Floats d = load_halves(header + column * 2);
    const Floats minimum = s.halves == 2 ? load_halves(header + (kPanel + column) * 2) : zero_floats();
    RunOfColumns columns;
    decode<F>(run, part, d, minimum, columns);
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      store(wide.words[2 * g] + column * 2, even_bytes(columns.w[g]));
      store(wide.words[2 * g + 1] + column * 2, odd_bytes(columns.w[g]));
    }
    store(wide.scale[0] + column, columns.scale[0]);
    if constexpr (scales_of(s) == 2) store(wide.scale[1] + column, columns.scale[1]);
    if constexpr (s.halves == 2) store(wide.minimum + column, columns.minimum);
  }
}

// tile[m] += the products of row m's run with P parts of the columns, the first of them `part`.
template <Format F, int P, int R>
inline void add_wide_parts(const WideRun& wide, const QuantizedRun* rows, int part, float* tile) {
  constexpr BlockShape s = block_shape(F);
  constexpr int kScales = scales_of(s), kSteps = kPairs / kScales;
#pragma GCC unroll 2
  for (int h = 0; h < kScales; ++h) {
    Ints products[R][P];
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) products[m][p] = begin_of<F>(rows[m], h);
    }
#pragma GCC unroll 2
    for (int i = h * kSteps; i < (h + 1) * kSteps; ++i) {
      Words w[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) w[p] = load_words(wide.words[i] + (part + p) * kColumns * 2);
#pragma GCC unroll 8
      for (int m = 0; m < R; ++m) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) products[m][p] = multiply_add(products[m][p], w[p], rows[m].words + 2 * i);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const int column = (part + p) * kColumns;
        float* sum = tile + m * kPanel + column;
        Floats y = fma(to_floats(products[m][p]), load_floats(wide.scale[h] + column) * spread(rows[m].scale),
                       load_floats(sum));
        if constexpr (s.halves == 2) y = fma(load_floats(wide.minimum + column), spread(rows[m].scaled_sum), y);
        store(sum, y);
      }
    }
  }
}

template <Format F, int R>
void add_wide(const WideRun& wide, const QuantizedRun* rows, float* tile) {
  constexpr int P = std::min(kParts, kWideSums / R >= 4 ? 4 : 2);
  for (int part = 0; part < kParts; part += P) add_wide_parts<F, P, R>(wide, rows, part, tile);
}

template <Format F, int... R>
void add_wide_rows(int count, const WideRun& wide, const QuantizedRun* rows, float* tile,
                   std::integer_sequence<int, R...>) {
  static constexpr void (*blocks[])(const WideRun&, const QuantizedRun*, float*) = {&add_wide<F, R + 1>...};
  blocks[count - 1](wide, rows, tile);
}

// sum + the products of a row's run with the columns.
template <Format F>
inline Floats add_row(Floats sum, const RunOfColumns& columns, const QuantizedRun& row) {
  constexpr BlockShape s = block_shape(F);
  constexpr int kScales = scales_of(s), kPart = kGroups / kScales;
#pragma GCC unroll 2
  for (int h = 0; h < kScales; ++h) {
    Ints products = begin_of<F>(row, h);
#pragma GCC unroll 8
    for (int g = h * kPart; g < (h + 1) * kPart; ++g) {
      products = multiply_add(products, even_bytes(columns.w[g]), row.words + g * 4);
      products = multiply_add(products, odd_bytes(columns.w[g]), row.words + g * 4 + 2);
    }
    sum = fma(to_floats(products), columns.scale[h] * spread(row.scale), sum);
  }
  if constexpr (s.halves == 2) sum = fma(columns.minimum, spread(row.scaled_sum), sum);
  return sum;
}

// tile[kPanel] = one row, whose runs are `stride` apart, times one panel.
template <Format F>
void multiply_one(const QuantizedRun* row, int64_t stride, int64_t k, const uint8_t* panel, FetchAhead ahead,
                  float* tile) {
  constexpr BlockShape s = block_shape(F);
  Floats sums[kParts];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) sums[part] = zero_floats();
  for (int64_t steps = k / kRun / s.runs; steps > 0; --steps) {
    Floats d[kParts], minimum[kParts];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      d[part] = load_halves(panel + part * kColumns * 2);
      if constexpr (s.halves == 2) minimum[part] = load_halves(panel + (kPanel + part * kColumns) * 2);
    }
    panel += header_bytes(s);
    for (int run = 0; run < s.runs; ++run, panel += packed_run_bytes(s), row += stride) {
      ahead.run();
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        RunOfColumns columns;
        decode<F>(panel, part, d[part], minimum[part], columns);
        sums[part] = add_row<F>(sums[part], columns, *row);
      }
    }
  }
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) store(tile + part * kColumns, sums[part]);
}

// tile[m][kPanel] = rows [first, first + count) times one panel.
template <Format F>
void multiply_wide(const QuantizedRows& a, int64_t first, int count, const uint8_t* panel, Stream stream, float* tile) {
  constexpr BlockShape s = block_shape(F);
  constexpr auto all = std::make_integer_sequence<int, kWideRows>();
  FetchAhead ahead(panel, stream, step_bytes(s) / s.runs, 0, 1);
  if (count == 1) return multiply_one<F>(a.runs + first, a.count, a.k, panel, ahead, tile);
  WideRun wide;
  const int blocks = (count + kWideRows - 1) / kWideRows;
  std::fill_n(tile, count * kPanel, 0.0f);
  const QuantizedRun* rows = a.runs + first;
  for (int64_t steps = a.k / kRun / s.runs; steps > 0; --steps) {
    const uint8_t* header = panel;
    panel += header_bytes(s);
    for (int run = 0; run < s.runs; ++run, panel += packed_run_bytes(s), rows += a.count) {
      ahead.run();
      widen<F>(header, panel, wide);
      for (int b = 0; b < blocks; ++b) {
        const int begin = count * b / blocks, end = count * (b + 1) / blocks;
        add_wide_rows<F>(end - begin, wide, rows + begin, tile + begin * kPanel, all);
      }
    }
  }
}

using WideBlock = void (*)(const QuantizedRows&, int64_t, int, const uint8_t*, Stream, float*);

// The formats of each file.
WideBlock choose_wide_simple(Format format);
WideBlock choose_wide_super_blocks(Format format);

}  // namespace pdserve
