// Blocks of rows of 8-bit activations times a panel of quantised weights: one template for all formats, unfolded for each by
// quantized_*.cpp; and what turns a panel's bytes into numbers, which products with 16 bits (wide_block.h) share.
//
// A column's result is one chain of float32 additions along k, a run at a time, on every processor and in every block.
#pragma once

#include <utility>

#include "fetch.h"
#include "isa/bytes.h"
#include "linear_quantized.h"
#include "quantized_formats.h"

namespace pdserve {

// Fetches ahead, as stream_of says, a piece a run: pass `pass` of `passes` over a panel fetches its own part of each.
class FetchAhead {
 public:
  FetchAhead(const uint8_t* panel, Stream stream, int64_t bytes_of_run, int pass, int passes) {
    const int64_t bytes = stream.part == Stream::kAll ? bytes_of_run : stream.part == Stream::kHalf ? bytes_of_run / 2 : 0;
    next_ = reinterpret_cast<const char*>(panel) + stream.offset + bytes * pass / passes;
    step_ = bytes;
    piece_ = bytes * (pass + 1) / passes - bytes * pass / passes;
    non_temporal_ = fetch_hint() == FetchHint::kNonTemporal;
  }

  void run() {
    if (non_temporal_) {
      for (int64_t at = 0; at < piece_; at += kLine) fetch<FetchHint::kNonTemporal>(next_ + at);
    } else {
      for (int64_t at = 0; at < piece_; at += kLine) fetch<FetchHint::kAllCaches>(next_ + at);
    }
    next_ += step_;
  }

 private:
  const char* next_;
  int64_t step_, piece_;
  bool non_temporal_;
};

// The weights of kColumns columns in one run: scale[0] * (w - offset) + minimum, or where a run's halves have scales of
// their own, scale[1] for the second.
struct RunOfColumns {
  Bytes w[kGroups];
  Floats scale[2], minimum;
};

template <int Group, int Bits>
inline Bytes insert_high(Bytes low, const Bytes* high) {
  if constexpr (Bits == 5) return insert<4 - Group>(low, high[0], 0x10);
  if constexpr (Bits == 6) return insert<4 - Group % 4 * 2>(low, high[Group / 4], 0x30);
  return low;
}

template <int Bits, int... Group>
inline void insert_high(Bytes* w, const Bytes* high, std::integer_sequence<int, Group...>) {
  ((w[Group] = insert_high<Group, Bits>(w[Group], high)), ...);
}

// `numbers`: those of the half panel that the columns are in, from their own on.
template <Format F>
inline void unpack(const uint8_t* numbers, Bytes* w) {
  constexpr BlockShape s = block_shape(F);
  if constexpr (s.bits == 8 && !s.looked_up) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) w[g] = load_bytes(numbers + g * kGroupBytes);
    return;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kGroups / 2; ++v) {
    const Bytes both = load_bytes(numbers + v * kGroupBytes);
    w[v] = low_nibbles(both);
    w[v + kGroups / 2] = high_nibbles(both);
  }
  if constexpr (s.looked_up) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) w[g] = look_up(kIQ4NumbersPlus128, w[g]);
  } else if constexpr (s.bits > 4) {
    Bytes high[2];
    high[0] = load_bytes(numbers + 4 * kGroupBytes);
    if constexpr (s.bits == 6) high[1] = load_bytes(numbers + 5 * kGroupBytes);
    insert_high<s.bits>(w, high, std::make_integer_sequence<int, kGroups>());
  }
}

// Columns [part * kColumns, ...) of the run at `run`; d and m are the block's scale and minimum.
template <Format F>
inline void decode(const uint8_t* run, int part, Floats d, Floats m, RunOfColumns& columns) {
  constexpr BlockShape s = block_shape(F);
  const int column = part * kColumns, half = column / kHalf;
  unpack<F>(run + s.run_bytes * kPanel + half * half_numbers(s) + column % kHalf * 4, columns.w);
  if constexpr (s.run_bytes == 0) {
    columns.scale[0] = d;
    columns.minimum = m;
  } else if constexpr (s.halves == 2) {
    columns.scale[0] = d * load_unsigned(run + column);
    columns.minimum = negative(m * load_unsigned(run + kPanel + column));
  } else {
    columns.scale[0] = d * load_signed(run + column);
    columns.scale[1] = d * load_signed(run + kPanel + column);
  }
}

// Rows whose products take turns: fewer where many sums leave fewer registers.
constexpr int turns(int sums) { return sums > kAccumulators ? 4 : 8; }

// sums[m] += the products of row m's run with the columns.
template <Format F, int Rows>
inline void add_runs(Floats* sums, const RunOfColumns& columns, const QuantizedRun* rows) {
  constexpr BlockShape s = block_shape(F);
  constexpr int kShift = s.offset == 8 ? 3 : s.offset == 16 ? 4 : s.offset == 32 ? 5 : 7;
  // Parts of a run with a scale of their own.
  constexpr int kScales = s.run_bytes != 0 && s.halves == 1 ? 2 : 1, kPart = kGroups / kScales;
#pragma GCC unroll 2
  for (int h = 0; h < kScales; ++h) {
    Ints products[Rows];
#pragma GCC unroll 16
    for (int m = 0; m < Rows; ++m) {
      const int32_t minus_sum = kScales == 1 ? rows[m].minus_sum
                                : h == 0     ? rows[m].minus_half_sum
                                             : rows[m].minus_sum - rows[m].minus_half_sum;
      products[m] = s.offset == 0 ? spread(0) : shift_left<kShift>(spread(minus_sum));
    }
    dot<s.bits, kPart, Rows>(products, columns.w + h * kPart, rows->bytes + h * kPart * 4, sizeof(QuantizedRun));
#pragma GCC unroll 16
    for (int m = 0; m < Rows; ++m) {
      sums[m] = fma(to_floats(products[m]), columns.scale[h] * spread(rows[m].scale), sums[m]);
      if constexpr (s.halves == 2) sums[m] = fma(columns.minimum, spread(rows[m].scaled_sum), sums[m]);
    }
  }
}

// The same for any number of rows, in turns of about as many.
template <Format F, int Turns, int Rows>
inline void add_all_runs(Floats* sums, const RunOfColumns& columns, const QuantizedRun* rows) {
  constexpr int kRounds = (Rows + Turns - 1) / Turns, kFirst = (Rows + kRounds - 1) / kRounds;
  add_runs<F, kFirst>(sums, columns, rows);
  if constexpr (kFirst < Rows) add_all_runs<F, Turns, Rows - kFirst>(sums + kFirst, columns, rows + kFirst);
}

// R rows times P parts of kColumns columns, the first of them `part`.
template <Format F, int P, int R>
void multiply_parts(const QuantizedRows& a, int64_t first, const uint8_t* panel, int part, Stream stream, float* tile) {
  constexpr BlockShape s = block_shape(F);
  constexpr int kParts = kPanel / kColumns;
  FetchAhead ahead(panel, stream, step_bytes(s) / s.runs, part / P, kParts / P);
  const QuantizedRun* rows = a.runs + first;
  Floats sum[P][R];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) sum[p][m] = zero_floats();
  }
  for (int64_t steps = a.k / kRun / s.runs; steps > 0; --steps) {
    Floats d[P], minimum[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      d[p] = load_halves(panel + (part + p) * kColumns * 2);
      if constexpr (s.halves == 2) minimum[p] = load_halves(panel + (kPanel + (part + p) * kColumns) * 2);
    }
    panel += header_bytes(s);
    for (int run = 0; run < s.runs; ++run, panel += packed_run_bytes(s), rows += a.count) {
      ahead.run();
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        RunOfColumns columns;
        decode<F>(panel, part + p, d[p], minimum[p], columns);
        add_all_runs<F, turns(P * R), R>(sum[p], columns, rows);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) store(tile + m * kPanel + (part + p) * kColumns, sum[p][m]);
  }
}

// Sums that just fit into registers beside a run's numbers, with few rows at a time.
constexpr int kMostSums = kAccumulators * 4 / 3;

// Few rows take the whole panel at once, and memory is read from front to back; with more, a block's sums would not fit
// into registers, and a part of the columns follows the other.
template <Format F, int R>
void multiply_all_parts(const QuantizedRows& a, int64_t first, const uint8_t* panel, Stream stream, float* tile) {
  constexpr int kParts = kPanel / kColumns, kFit = kMostSums / R;
  constexpr int P = kFit >= kParts ? kParts : kFit >= 2 ? 2 : 1;
  for (int part = 0; part < kParts; part += P) multiply_parts<F, P, R>(a, first, panel, part, stream, tile);
}

using QuantizedBlock = void (*)(const QuantizedRows&, int64_t, const uint8_t*, Stream, float*);

// Most rows of a block.
constexpr int kBlockRows = kAccumulators < kMaxRows ? kAccumulators : kMaxRows;

template <Format F, int... R>
QuantizedBlock choose_block(int rows, std::integer_sequence<int, R...>) {
  static constexpr QuantizedBlock blocks[] = {&multiply_all_parts<F, R + 1>...};
  return blocks[rows - 1];
}

template <Format F>
QuantizedBlock choose_block(int rows) {
  return choose_block<F>(rows, std::make_integer_sequence<int, kBlockRows>());
}

// The formats of each file.
QuantizedBlock choose_four_bits(Format format, int rows);
QuantizedBlock choose_more_bits(Format format, int rows);
QuantizedBlock choose_super_blocks(Format format, int rows);

}  // namespace pdserve
