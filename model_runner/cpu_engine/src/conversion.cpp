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

// A piece of numbers of any type as float32.
constexpr int64_t kPiece = 256;

void read(FloatType type, const uint8_t* in, int64_t count, float* out) {
  switch (type) {
    case FloatType::kFloat32: std::memcpy(out, in, count * sizeof(float)); return;
    case FloatType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) {
        bf16 value;
        std::memcpy(&value, in + i * 2, 2);
        out[i] = to_float(value);
      }
      return;
    case FloatType::kFloat16:
      int64_t i = 0;
      for (; i + kColumns <= count; i += kColumns) store(out + i, load_halves(in + i * 2));
      for (; i < count; ++i) out[i] = half_to_float(in + i * 2);
  }
}

template <class T>
void write(const float* values, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(values[i]);
}

template <class T>
void convert_piece(FloatType from, const uint8_t* in, T* out, int64_t count) {
  const int64_t size = from == FloatType::kFloat32 ? 4 : 2;
  float values[kPiece];
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t own = std::min(kPiece, count - i);
    read(from, in + i * size, own, values);
    write(values, own, out + i);
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

template <Format F, class T>
void dequantise_piece(const uint8_t* blocks, int64_t count, T* out) {
  constexpr BlockShape s = block_shape(F);
  float values[kRun];
  for (int64_t b = 0; b < count; ++b, blocks += s.file_bytes) {
    const uint8_t* halves = halves_of(F, blocks);
    const float d = half_to_float(halves), m = s.halves == 2 ? half_to_float(halves + 2) : 0.0f;
    for (int run = 0; run < s.runs; ++run, out += kRun) {
      dequantise_run<F>(blocks, run, d, m, values);
      write(values, kRun, out);
    }
  }
}

template <class T>
void dequantise_piece(Format format, const uint8_t* blocks, int64_t count, T* out) {
  switch (format) {
    case Format::kQ4_0: return dequantise_piece<Format::kQ4_0>(blocks, count, out);
    case Format::kQ4_1: return dequantise_piece<Format::kQ4_1>(blocks, count, out);
    case Format::kQ5_0: return dequantise_piece<Format::kQ5_0>(blocks, count, out);
    case Format::kQ5_1: return dequantise_piece<Format::kQ5_1>(blocks, count, out);
    case Format::kIQ4_NL: return dequantise_piece<Format::kIQ4_NL>(blocks, count, out);
    case Format::kQ4_K: return dequantise_piece<Format::kQ4_K>(blocks, count, out);
    case Format::kQ5_K: return dequantise_piece<Format::kQ5_K>(blocks, count, out);
    case Format::kQ6_K: return dequantise_piece<Format::kQ6_K>(blocks, count, out);
    default: return dequantise_piece<Format::kQ8_0>(blocks, count, out);
  }
}

}  // namespace

void convert(FloatType from, const void* in, FloatType to, void* out, int64_t count, Team& team) {
  const auto* bytes = static_cast<const uint8_t*>(in);
  const int64_t size = from == FloatType::kFloat32 ? 4 : 2;
  team.run([&](int tid, int threads) {
    const Range own = share(count, tid, threads);
    const uint8_t* first = bytes + own.begin * size;
    if (to == FloatType::kBFloat16) {
      convert_piece(from, first, static_cast<bf16*>(out) + own.begin, own.size());
    } else {
      convert_piece(from, first, static_cast<float*>(out) + own.begin, own.size());
    }
  });
}

void dequantise(Format format, const uint8_t* blocks, int64_t count, FloatType to, void* out, Team& team) {
  const BlockShape s = block_shape(format);
  const int64_t weights = s.runs * kRun;
  team.run([&](int tid, int threads) {
    const Range own = share(count, tid, threads);
    const uint8_t* first = blocks + own.begin * s.file_bytes;
    if (to == FloatType::kBFloat16) {
      dequantise_piece(format, first, own.size(), static_cast<bf16*>(out) + own.begin * weights);
    } else {
      dequantise_piece(format, first, own.size(), static_cast<float*>(out) + own.begin * weights);
    }
  });
}

}  // namespace pdserve
