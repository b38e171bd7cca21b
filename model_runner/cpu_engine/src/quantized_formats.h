// How the block formats of GGUF lie in a file, and in a packed panel of kPanel columns.
//
//   in a file: the blocks of a row of weights one after another, each with its scales in float16
//   packed:    steps one after another; a step is what one block of each of the panel's columns holds:
//                header       float16 of each column: the block's scale, and in some formats its minimum
//                for each run of 32 along k:
//                  run header   a byte of each column: the run's scale and minimum, or the scales of its halves
//                  numbers      of columns 0 to 15, then of columns 16 to 31
//
// Numbers lie as products of bytes want them: 64 bytes are 16 columns, 4 consecutive k each, called a group; a run has
// eight. Of numbers of 8 bits, groups follow each other. Of fewer bits, four vectors of 64 bytes hold the low four bits
// of groups v and v + 4; then the fifth bits in one vector, bit g of a byte for group g; or the fifth and sixth in two,
// two bits of a byte for each of four groups. Nothing is lost, and nothing added but for the K-quants' 12 bytes of 6-bit
// scales and minima, which take 16: 2.8 % of Q4_K, 2.3 % of Q5_K.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace pdserve {

constexpr int kRun = 32;            // weights along k whose activations share a scale
constexpr int kHalf = 16;           // columns of half a panel
constexpr int kGroups = kRun / 4;   // of four k
constexpr int kGroupBytes = 64;

struct BlockShape {
  int file_bytes;    // of a block in a file
  int runs;          // of a block
  int bits;          // of a number as it is multiplied: not negative, `offset` more than the number of the weight
  int offset;
  int halves;        // float16 of a block: its scale; and its minimum
  int run_bytes;     // bytes of a run header, of each column
  bool looked_up;    // the numbers are places in a table of 16 bytes
};

constexpr BlockShape block_shape(Format format) {
  switch (format) {
    case Format::kQ4_0: return {18, 1, 4, 8, 1, 0, false};
    case Format::kQ4_1: return {20, 1, 4, 0, 2, 0, false};
    case Format::kQ5_0: return {22, 1, 5, 16, 1, 0, false};
    case Format::kQ5_1: return {24, 1, 5, 0, 2, 0, false};
    case Format::kIQ4_NL: return {18, 1, 8, 128, 1, 0, true};
    case Format::kQ4_K: return {144, 8, 4, 0, 2, 2, false};
    case Format::kQ5_K: return {176, 8, 5, 0, 2, 2, false};
    case Format::kQ6_K: return {210, 8, 6, 32, 1, 2, false};
    default: return {34, 1, 8, 128, 1, 0, false};
  }
}

// Bytes of a group's vectors in one half of a panel's run.
constexpr int half_numbers(const BlockShape& s) {
  const int low = s.bits == 8 && !s.looked_up ? kGroups : kGroups / 2;
  return (low + (s.bits == 8 ? 0 : s.bits - 4)) * kGroupBytes;
}

constexpr int header_bytes(const BlockShape& s) { return s.halves * kPanel * 2; }
constexpr int packed_run_bytes(const BlockShape& s) { return s.run_bytes * kPanel + 2 * half_numbers(s); }
constexpr int step_bytes(const BlockShape& s) { return header_bytes(s) + s.runs * packed_run_bytes(s); }

// The numbers of IQ4_NL, each 128 more than the weight's.
constexpr uint8_t kIQ4NumbersPlus128[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

}  // namespace pdserve
