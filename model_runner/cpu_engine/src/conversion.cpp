#include "conversion.h"

#include <algorithm>
#include <cstring>

#include "isa/bytes.h"
#include "quantized_file.h"
#include "sizes.h"
#include "types.h"

namespace pdserve {
namespace {

float half_to_float(const uint8_t* bytes) {
  uint8_t halves[kColumns * 2] = {};
  float floats[kColumns];
  std::memcpy(halves, bytes, 2);
  store(floats, load_halves(halves));
  return floats[0];
}

// Numbers that are widened at once.
constexpr int64_t kPiece = 256;

void widen(FloatType type, const uint8_t* in, int64_t count, float* out) {
  int64_t i = 0;
  if (type == FloatType::kFloat16) {
    for (; i + kColumns <= count; i += kColumns) store(out + i, load_halves(in + i * 2));
    for (; i < count; ++i) out[i] = half_to_float(in + i * 2);
    return;
  }
  for (; i < count; ++i) {
    bf16 value;
    std::memcpy(&value, in + i * 2, 2);
    out[i] = to_float(value);
  }
}

// As to_bf16, but without a branch, so that the compiler takes many at once.
void round(const float* values, int64_t count, bf16* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    const uint32_t nan = bits >> 16 | 0x40, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    out[i].bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
  }
}

// Numbers [first, first + count) of `out`.
void write(const float* values, FloatType to, void* out, int64_t first, int64_t count) {
  if (to == FloatType::kBFloat16) {
    round(values, count, static_cast<bf16*>(out) + first);
  } else {
    std::memcpy(static_cast<float*>(out) + first, values, count * sizeof(float));
  }
}

// Run `run` of a block, kRun numbers. See linear_quantized.h for what they are.
template <Format F>
void dequantise_run(const uint8_t* block, int run, float d, float m, float* out) {
  constexpr BlockShape s = block_shape(F);
  const FileRun from = read_run(F, block, run);
  float scale[2] = {d, d};
  if constexpr (s.run_bytes != 0 && s.halves == 2) {
    scale[0] = scale[1] = d * from.header[0];
    m = -(m * from.header[1]);
  } else if constexpr (s.run_bytes != 0) {
    for (int h = 0; h < 2; ++h) scale[h] = d * static_cast<int8_t>(from.header[h]);
  }
  for (int h = 0; h < 2; ++h) {
    for (int i = h * kRun / 2; i < (h + 1) * kRun / 2; ++i) {
      const int number = s.looked_up ? kIQ4NumbersPlus128[from.number[i]] : from.number[i];
      out[i] = static_cast<float>(number - s.offset) * scale[h];
      if constexpr (s.halves == 2) out[i] += m;
    }
  }
}

// Blocks `own` of those at `blocks`.
template <Format F>
void dequantise(const uint8_t* blocks, Range own, FloatType to, void* out) {
  constexpr BlockShape s = block_shape(F);
  float values[kRun];
  for (int64_t b = own.begin; b < own.end; ++b) {
    const uint8_t *block = blocks + b * s.file_bytes, *halves = halves_of(F, block);
    const float d = half_to_float(halves), m = s.halves == 2 ? half_to_float(halves + 2) : 0.0f;
    for (int run = 0; run < s.runs; ++run) {
      dequantise_run<F>(block, run, d, m, values);
      write(values, to, out, (b * s.runs + run) * kRun, kRun);
    }
  }
}

using Dequantise = void (*)(const uint8_t*, Range, FloatType, void*);

Dequantise choose(Format format) {
  switch (format) {
    case Format::kQ4_0: return dequantise<Format::kQ4_0>;
    case Format::kQ4_1: return dequantise<Format::kQ4_1>;
    case Format::kQ5_0: return dequantise<Format::kQ5_0>;
    case Format::kQ5_1: return dequantise<Format::kQ5_1>;
    case Format::kIQ4_NL: return dequantise<Format::kIQ4_NL>;
    case Format::kQ4_K: return dequantise<Format::kQ4_K>;
    case Format::kQ5_K: return dequantise<Format::kQ5_K>;
    case Format::kQ6_K: return dequantise<Format::kQ6_K>;
    default: return dequantise<Format::kQ8_0>;
  }
}

}  // namespace

void convert(FloatType from, const void* in, FloatType to, void* out, int64_t count, Team& team) {
  team.run([&](int tid, int threads) {
    const Range own = share(count, tid, threads);
    if (from == FloatType::kFloat32) {
      write(static_cast<const float*>(in) + own.begin, to, out, own.begin, own.size());
      return;
    }
    float values[kPiece];
    for (int64_t i = own.begin; i < own.end; i += kPiece) {
      const int64_t size = std::min(kPiece, own.end - i);
      widen(from, static_cast<const uint8_t*>(in) + i * 2, size, values);
      write(values, to, out, i, size);
    }
  });
}

void dequantise(Format format, const uint8_t* blocks, int64_t count, FloatType to, void* out, Team& team) {
  const Dequantise dequantise_blocks = choose(format);
  team.run([&](int tid, int threads) { dequantise_blocks(blocks, share(count, tid, threads), to, out); });
}

}  // namespace pdserve
