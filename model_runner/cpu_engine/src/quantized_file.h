// Reads blocks as they lie in a GGUF file, a run at a time.
#pragma once

#include <cstring>

#include "quantized_formats.h"

namespace pdserve {

// One run of a block in a file.
struct FileRun {
  uint8_t number[kRun];  // of as many bits as the format has
  uint8_t header[2];     // the run header's bytes
};

// A bit field of 32 bits: bit i belongs to number i.
inline int bit(const uint8_t* bits, int i) { return bits[i / 8] >> (i % 8) & 1; }

// Scale and minimum j of eight, which share 12 bytes: the first four have six bits in bytes j and j + 4; of the others
// the low four bits lie in byte j + 4 and the high two where the first ones' are free.
inline void read_six_bits(const uint8_t* s, int j, uint8_t* scale, uint8_t* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    *minimum = static_cast<uint8_t>((s[j + 4] >> 4) | (s[j] >> 6) << 4);
  }
}

// 32 nibbles in 16 bytes: the low ones come first.
inline void read_nibbles(const uint8_t* bytes, FileRun& run) {
  for (int i = 0; i < kRun / 2; ++i) {
    run.number[i] = bytes[i] & 15;
    run.number[i + kRun / 2] = bytes[i] >> 4;
  }
}

inline void read_five_bits(const uint8_t* high, FileRun& run) {
  read_nibbles(high + 4, run);
  for (int i = 0; i < kRun; ++i) run.number[i] |= static_cast<uint8_t>(bit(high, i) << 4);
}

// Runs 2 i and 2 i + 1 share 32 bytes, the low nibbles and the high ones. The fifth bits of run j are bits j of 32 bytes.
inline void read_four_or_five_k(const uint8_t* block, int run, bool five, FileRun& out) {
  read_six_bits(block + 4, run, &out.header[0], &out.header[1]);
  const uint8_t *high = block + 16, *low = block + (five ? 48 : 16) + run / 2 * kRun;
  for (int i = 0; i < kRun; ++i) {
    out.number[i] = low[i] >> (run % 2 * 4) & 15;
    if (five) out.number[i] |= static_cast<uint8_t>((high[i] >> run & 1) << 4);
  }
}

// Halves of 128 numbers: runs 0 and 1 of a half have the low nibbles of its 64 bytes, runs 2 and 3 the high ones; the
// high bits of run j are bits 2 j and 2 j + 1 of 32 bytes. The scales come last but for the block's own.
inline void read_six_k(const uint8_t* block, int run, FileRun& out) {
  const int part = run / 4, j = run % 4;
  const uint8_t *low = block + part * 64 + j % 2 * kRun, *high = block + 128 + part * kRun;
  for (int i = 0; i < kRun; ++i) {
    out.number[i] = static_cast<uint8_t>((low[i] >> (j / 2 * 4) & 15) | (high[i] >> (j * 2) & 3) << 4);
  }
  std::memcpy(out.header, block + 192 + run * 2, 2);
}

inline FileRun read_run(Format format, const uint8_t* block, int run) {
  FileRun out;
  switch (format) {
    case Format::kQ4_0:
    case Format::kIQ4_NL: read_nibbles(block + 2, out); break;
    case Format::kQ4_1: read_nibbles(block + 4, out); break;
    case Format::kQ5_0: read_five_bits(block + 2, out); break;
    case Format::kQ5_1: read_five_bits(block + 4, out); break;
    case Format::kQ4_K: read_four_or_five_k(block, run, false, out); break;
    case Format::kQ5_K: read_four_or_five_k(block, run, true, out); break;
    case Format::kQ6_K: read_six_k(block, run, out); break;
    default:
      for (int i = 0; i < kRun; ++i) out.number[i] = static_cast<uint8_t>(block[2 + i] ^ 0x80);
  }
  return out;
}

// Where the block's own scale and minimum lie.
inline const uint8_t* halves_of(Format format, const uint8_t* block) { return block + (format == Format::kQ6_K ? 208 : 0); }

}  // namespace pdserve
