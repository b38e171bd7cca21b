#include "linear_quantized.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quantized_block.h"
#include "simd.h"
#include "wide_block.h"

namespace pdserve {
namespace {

// Zeros times NaN make every result NaN.
void make_nan(QuantizedRun& to) {
  to = {};
  to.scale = to.scaled_sum = std::nanf("");
}

// `first`, `total`: the sums of the first 16 numbers and of all; exact, as they are below 2^24.
void set_sums(float scale, float first, float total, QuantizedRun& to) {
  to.scale = scale;
  to.scaled_sum = scale * total;
  to.minus_sum = -static_cast<int32_t>(total);
  to.minus_half_sum = -static_cast<int32_t>(first);
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t exponent_of(float positive) {
  uint32_t bits;
  std::memcpy(&bits, &positive, sizeof bits);
  return bits >> 23;
}

void round_to_int16(Vec left, Vec right, float amax, QuantizedRun& to) {
  // Both the scale and its inverse are normal numbers: activations below 2^-126 become zeros.
  constexpr uint32_t kBits = 14, kBias = 127;
  const uint32_t exponent = std::max(exponent_of(amax), kBits + 1);
  const Vec inverse = broadcast(from_bits((2 * kBias + kBits - exponent) << 23));
  const Vec q0 = round_even(left * inverse), q1 = round_even(right * inverse);
  if (!std::isfinite(sum(q0) + sum(q1))) return make_nan(to);
  // A float32 just below a power of two is rounded to it.
  const Vec most = broadcast(32767.0f), least = broadcast(-32767.0f);
  const Vec left_q = max(least, min(most, q0)), right_q = max(least, min(most, q1));
  store_words(to.words, left_q);
  store_words(to.words + kLanes, right_q);
  const float first = sum(left_q);
  set_sums(from_bits((exponent - kBits) << 23), first, first + sum(right_q), to);
}

// Runs whose largest activation is less count as zeros: 127 over it would not be finite.
constexpr float kLeast = 1e-36f;

void round_to_int8(Vec left, Vec right, float amax, QuantizedRun& to) {
  const Vec inverse = broadcast(amax < kLeast ? 0.0f : 127.0f / amax);
  const Vec q0 = round_even(left * inverse), q1 = round_even(right * inverse);
  const float first = sum(q0), total = first + sum(q1);
  if (std::isnan(total)) return make_nan(to);  // also of an infinity: it is multiplied by 0
  store_int8(to.bytes, q0);
  store_int8(to.bytes + kLanes, q1);
  set_sums(amax / 127.0f, first, total, to);
}

template <class T>
void quantize_run(const T* from, ActivationDType dtype, QuantizedRun& to) {
  const Vec left = load(from), right = load(from + kLanes);
  const float amax = largest(max(abs(left), abs(right)));
  dtype == ActivationDType::kInt16 ? round_to_int16(left, right, amax, to) : round_to_int8(left, right, amax, to);
}

QuantizedBlock choose(Format format, int rows) {
  switch (format) {
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kIQ4_NL: return choose_four_bits(format, rows);
    case Format::kQ4_K:
    case Format::kQ5_K:
    case Format::kQ6_K: return choose_super_blocks(format, rows);
    default: return choose_more_bits(format, rows);
  }
}

WideBlock choose_wide(Format format) {
  switch (format) {
    case Format::kQ4_K:
    case Format::kQ5_K:
    case Format::kQ6_K: return choose_wide_super_blocks(format);
    default: return choose_wide_simple(format);
  }
}

}  // namespace

template <class T>
void quantize_rows(const T* a, int64_t stride, const QuantizedRows& rows) {
  for (int64_t m = 0; m < rows.count; ++m) {
    for (int64_t run = 0; run < rows.k / kRun; ++run) {
      quantize_run(a + m * stride + run * kRun, rows.dtype, rows.runs[run * rows.count + m]);
    }
  }
}

void multiply_quantized_panel(Format format, const QuantizedRows& a, int64_t first, int count, const uint8_t* panel,
                              Stream stream, float* tile) {
  if (a.dtype == ActivationDType::kInt16) return choose_wide(format)(a, first, count, panel, stream, tile);
  const int blocks = (count + kBlockRows - 1) / kBlockRows;
  for (int block = 0; block < blocks; ++block) {
    const int begin = count * block / blocks, end = count * (block + 1) / blocks;
    const Stream ahead = block == 0 ? stream : Stream{0, Stream::kNone};
    choose(format, end - begin)(a, first + begin, panel, ahead, tile + begin * kPanel);
  }
}

template void quantize_rows(const bf16*, int64_t, const QuantizedRows&);
template void quantize_rows(const float*, int64_t, const QuantizedRows&);

}  // namespace pdserve
