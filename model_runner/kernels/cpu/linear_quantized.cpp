#include "linear_quantized.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "fetch.h"
#include "simd.h"

namespace pdserve {
namespace {

constexpr int kGroups = kRun / 4;                    // groups of four k in a run
constexpr int kScaleBytes = kPanel * 2;              // float16
constexpr int kNibbles = kPanel * kRun / 2;          // bytes of a run of a panel in 4 bits

constexpr bool four_bits(Format format) { return format != Format::kQ8_0; }
constexpr int header_bytes(Format format) { return format == Format::kQ4_1 ? 2 * kScaleBytes : kScaleBytes; }
constexpr int step_bytes(Format format) { return header_bytes(format) + (four_bits(format) ? 1 : 2) * kNibbles; }
// What the stored numbers, which are not negative, exceed the weights' numbers by.
constexpr int offset(Format format) {
  return format == Format::kQ4_0 ? 8 : format == Format::kQ8_0 ? 128 : 0;
}

#if defined(__AVX512VNNI__)

constexpr int kBlockRows = kMaxRows;

inline __m512 half_floats(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// The numbers of 16 columns in a run, four k a vector.
template <Format F>
inline void unpack(const uint8_t* numbers, __m512i* w) {
  if constexpr (four_bits(F)) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int v = 0; v < kGroups / 2; ++v) {
      const __m512i both = _mm512_loadu_si512(numbers + v * 64);
      w[v] = _mm512_and_si512(both, low);
      w[v + kGroups / 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
  } else {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) w[g] = _mm512_loadu_si512(numbers + g * 64);
  }
}

// Half a panel at a time, so that the sums of twelve rows fit in registers beside the numbers of a run. The second half
// finds its bytes in the nearest cache.
template <FetchHint H, Format F, int R>
void half_block(const QuantizedRows& a, int64_t first, const uint8_t* panel, int half, Stream stream, float* tile) {
  constexpr int kHalfNumbers = (step_bytes(F) - header_bytes(F)) / 2;
  const int64_t runs = a.k / kRun;
  const int8_t* q = a.q + first * a.k;
  const float* scale = a.scale + first * runs;
  const int32_t* sum = a.sum + first * runs;
  // Each half fetches the bytes that it will itself use further on, so that memory is never idle; when a half of them is
  // asked for, the first half fetches it all.
  const bool all = stream.part == Stream::kAll, first_half = half == 0;
  const char* next = reinterpret_cast<const char*>(panel) + stream.offset;
  if (all && !first_half) next += header_bytes(F) + kHalfNumbers;
  const int64_t step = all ? step_bytes(F) : stream.part == Stream::kHalf && first_half ? step_bytes(F) / 2 : 0;
  const int64_t fetched = !all ? step : first_half ? header_bytes(F) + kHalfNumbers : kHalfNumbers;
  __m512 out[R];
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) out[m] = _mm512_setzero_ps();
  for (int64_t run = 0; run < runs; ++run, panel += step_bytes(F), q += kRun) {
    for (int64_t at = 0; at < fetched; at += kLine) fetch<H>(next + at);
    next += step;
    __m512i w[kGroups];
    unpack<F>(panel + header_bytes(F) + half * kHalfNumbers, w);
    const __m512 d = half_floats(panel + half * kScaleBytes / 2);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) {
      const int32_t row_sum = sum[m * runs + run];
      __m512i dot = _mm512_set1_epi32(-offset(F) * row_sum);
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        int32_t four;
        std::memcpy(&four, q + m * a.k + g * 4, sizeof four);
        dot = _mm512_dpbusd_epi32(dot, w[g], _mm512_set1_epi32(four));
      }
      const float s = scale[m * runs + run];
      out[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(d, _mm512_set1_ps(s)), out[m]);
      if constexpr (F == Format::kQ4_1) {
        const __m512 minimum = half_floats(panel + kScaleBytes + half * kScaleBytes / 2);
        out[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(s * static_cast<float>(row_sum)), out[m]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) _mm512_storeu_ps(tile + m * kPanel + half * kLanes, out[m]);
}

template <FetchHint H, Format F, int R>
void block(const QuantizedRows& a, int64_t first, const uint8_t* panel, Stream stream, float* tile) {
  half_block<H, F, R>(a, first, panel, 0, stream, tile);
  half_block<H, F, R>(a, first, panel, 1, stream, tile);
}

#else

// Without instructions for products of bytes: one run after another, each product widened. Slow, and the same result
// but for the order of additions.
constexpr int kBlockRows = 1;

template <FetchHint H, Format F, int R>
void block(const QuantizedRows& a, int64_t first, const uint8_t* panel, Stream, float* tile) {
  const int64_t runs = a.k / kRun;
  std::fill_n(tile, kPanel, 0.0f);
  for (int64_t run = 0; run < runs; ++run, panel += step_bytes(F)) {
    const int8_t* q = a.q + first * a.k + run * kRun;
    const float s = a.scale[first * runs + run];
    const int32_t row_sum = a.sum[first * runs + run];
    int32_t dot[kPanel];
    std::fill_n(dot, kPanel, -offset(F) * row_sum);
    const uint8_t* numbers = panel + header_bytes(F);
    for (int half = 0; half < 2; ++half) {
      for (int g = 0; g < kGroups; ++g) {
        const int v = four_bits(F) ? g % (kGroups / 2) : g, shift = v == g ? 0 : 4;
        const uint8_t* four = numbers + half * (step_bytes(F) - header_bytes(F)) / 2 + v * 64;
        for (int c = 0; c < kLanes; ++c) {
          for (int i = 0; i < 4; ++i) {
            const int w = four_bits(F) ? (four[c * 4 + i] >> shift) & 15 : four[c * 4 + i];
            dot[half * kLanes + c] += w * q[g * 4 + i];
          }
        }
      }
    }
    for (int c = 0; c < kPanel; ++c) {
      uint16_t d, m = 0;
      std::memcpy(&d, panel + c * 2, sizeof d);
      if (F == Format::kQ4_1) std::memcpy(&m, panel + kScaleBytes + c * 2, sizeof m);
      tile[c] += static_cast<float>(dot[c]) * (_cvtsh_ss(d) * s) + _cvtsh_ss(m) * (s * static_cast<float>(row_sum));
    }
  }
}

#endif

using Block = void (*)(const QuantizedRows&, int64_t, const uint8_t*, Stream, float*);

template <FetchHint H, Format F, int... R>
Block choose_rows(int count, std::integer_sequence<int, R...>) {
  static constexpr Block blocks[] = {&block<H, F, R + 1>...};
  return blocks[count - 1];
}

template <FetchHint H>
Block choose(Format format, int count) {
  const auto rows = std::make_integer_sequence<int, kBlockRows>();
  switch (format) {
    case Format::kQ4_0: return choose_rows<H, Format::kQ4_0>(count, rows);
    case Format::kQ4_1: return choose_rows<H, Format::kQ4_1>(count, rows);
    default: return choose_rows<H, Format::kQ8_0>(count, rows);
  }
}

}  // namespace

size_t run_bytes(Format format) { return static_cast<size_t>(step_bytes(format)) / kPanel; }

size_t quantized_panel_bytes(Format format, int64_t k) {
  return static_cast<size_t>(k / kRun) * static_cast<size_t>(step_bytes(format));
}

void pack_quantized_panel(Format format, const uint8_t* blocks, int64_t k, const int32_t* rows, uint8_t* panel) {
  const int64_t runs = k / kRun, run_size = static_cast<int64_t>(run_bytes(format));
  const int groups = four_bits(format) ? kGroups / 2 : kGroups, header = header_bytes(format);
  for (int64_t run = 0; run < runs; ++run, panel += step_bytes(format)) {
    std::memset(panel, 0, step_bytes(format));
    for (int c = 0; c < kPanel; ++c) {
      if (rows[c] < 0) continue;
      const uint8_t* source = blocks + (rows[c] * runs + run) * run_size;
      for (int part = 0; part < header; part += kScaleBytes, source += 2) std::memcpy(panel + part + c * 2, source, 2);
      // The low halves of a Q4 run's bytes are its first 16 numbers and the high halves the others, so that four bytes
      // hold group v and group v + 4 as they are.
      for (int v = 0; v < groups; ++v) {
        uint8_t* four = panel + header + ((c / kLanes) * groups + v) * 64 + c % kLanes * 4;
        for (int i = 0; i < 4; ++i) {
          four[i] = four_bits(format) ? source[v * 4 + i] : static_cast<uint8_t>(source[v * 4 + i] ^ 0x80);
        }
      }
    }
  }
}

template <class T>
void quantize_rows(const T* a, int64_t stride, int64_t count, const QuantizedRows& rows) {
  const int64_t runs = rows.k / kRun;
  for (int64_t m = 0; m < count; ++m) {
    for (int64_t run = 0; run < runs; ++run) {
      const T* from = a + m * stride + run * kRun;
      int8_t* to = rows.q + m * rows.k + run * kRun;
      const Vec left = load(from), right = load(from + kLanes);
      const float amax = largest(max(abs(left), abs(right)));
      const Vec inverse = broadcast(amax == 0.0f ? 0.0f : 127.0f / amax);
      const Vec q0 = round_even(left * inverse), q1 = round_even(right * inverse);
      store_int8(to, q0);
      store_int8(to + kLanes, q1);
      rows.scale[m * runs + run] = amax / 127.0f;
      rows.sum[m * runs + run] = static_cast<int32_t>(sum(q0 + q1));
    }
  }
}

void multiply_quantized_panel(Format format, const QuantizedRows& a, int64_t first, int count, const uint8_t* panel,
                              Stream stream, float* tile) {
  const bool non_temporal = fetch_hint() == FetchHint::kNonTemporal;
  const auto choose_block = non_temporal ? choose<FetchHint::kNonTemporal> : choose<FetchHint::kAllCaches>;
  const int parts = (count + kBlockRows - 1) / kBlockRows;
  for (int part = 0; part < parts; ++part) {
    const int begin = count * part / parts, end = count * (part + 1) / parts;
    const Stream ahead = part == 0 ? stream : Stream{0, Stream::kNone};
    choose_block(format, end - begin)(a, first + begin, panel, ahead, tile + begin * kPanel);
  }
}

template void quantize_rows(const bf16*, int64_t, int64_t, const QuantizedRows&);
template void quantize_rows(const float*, int64_t, int64_t, const QuantizedRows&);

}  // namespace pdserve
