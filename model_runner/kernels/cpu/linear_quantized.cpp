#include "linear_quantized.h"

#include <algorithm>
#include <cmath>

#include "quantized_block.h"
#include "simd.h"

namespace pdserve {
namespace {

// Runs whose largest activation is less count as zeros: 127 over it would not be finite.
constexpr float kLeast = 1e-36f;

template <class T>
void quantize_run(const T* from, QuantizedRun& to) {
  const Vec left = load(from), right = load(from + kLanes);
  const float amax = largest(max(abs(left), abs(right)));
  const Vec inverse = broadcast(amax < kLeast ? 0.0f : 127.0f / amax);
  const Vec q0 = round_even(left * inverse), q1 = round_even(right * inverse);
  const float first = sum(q0), total = first + sum(q1);
  if (std::isnan(total)) {
    // An infinity or a NaN among them: 0 times infinity is NaN too. Zeros times NaN tell every output.
    to = {};
    to.scale = to.scaled_sum = std::nanf("");
    return;
  }
  store_int8(to.q, q0);
  store_int8(to.q + kLanes, q1);
  to.scale = amax / 127.0f;
  to.scaled_sum = to.scale * total;
  to.minus_sum = -static_cast<int32_t>(total);
  to.minus_half_sum = -static_cast<int32_t>(first);
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

}  // namespace

template <class T>
void quantize_rows(const T* a, int64_t stride, const QuantizedRows& rows) {
  for (int64_t m = 0; m < rows.count; ++m) {
    for (int64_t run = 0; run < rows.k / kRun; ++run) {
      quantize_run(a + m * stride + run * kRun, rows.runs[run * rows.count + m]);
    }
  }
}

void multiply_quantized_panel(Format format, const QuantizedRows& a, int64_t first, int count, const uint8_t* panel,
                              Stream stream, float* tile) {
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
