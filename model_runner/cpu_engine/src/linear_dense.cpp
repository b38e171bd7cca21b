// Products with dense weights: blocks of rows times one panel, by the microkernels of isa/dense.h.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "isa/dense.h"
#include "linear.h"
#include "simd.h"
#include "sizes.h"

namespace pdserve {
namespace {

// A float32 product adds up its k in parts: the error of a sum grows with its length, and someone who asks for float32
// wants to see the reference's tokens. In bfloat16 the rounding of the factors drowns it.
constexpr int64_t kFloatPart = 96;

template <class T>
constexpr int kGroup = sizeof(T) == 2 ? 2 : 1;

template <class A, class W>
using Block = void (*)(const A*, int64_t, const W*, int64_t, Ahead, float*, bool);

template <class A, class W, FetchHint H, int... R>
Block<A, W> choose(int count, std::integer_sequence<int, R...>) {
  static constexpr Block<A, W> blocks[] = {&block<H, R + 1>...};
  return blocks[count - 1];
}

template <class A, class W>
Block<A, W> choose(FetchHint hint, int count) {
  const auto rows = std::make_integer_sequence<int, kBlockRows>();
  return hint == FetchHint::kNonTemporal ? choose<A, W, FetchHint::kNonTemporal>(count, rows)
                                         : choose<A, W, FetchHint::kAllCaches>(count, rows);
}

// What block `b` of `blocks` asks for while it multiplies the `size` bytes at `part`, which are part of a panel of
// `panel_bytes`.
//
// Rows that are done with a panel at once need its bytes at the rate of their arithmetic: they are asked for a little
// before that, but more than a memory latency's worth, as they are used in bursts. Else there is time until the next
// panel, and every block asks for the same share of it, so that memory works as evenly as arithmetic.
template <class A, class W>
Ahead ahead_of(const W* part, int64_t size, size_t panel_bytes, int64_t b, int64_t blocks, bool at_once) {
  constexpr int64_t kAhead = 12288;
  const char* first = reinterpret_cast<const char*>(part);
  if (at_once) return {first + kAhead, kStepBytes};
  const char* next = first + panel_bytes;
  if (sizeof(A) == sizeof(float)) return {next + b * size / blocks, ceil_div(kStepBytes, blocks)};
  // Where pairs are multiplied, the first two blocks ask for all of it: that is what was measured there.
  return b < 2 ? Ahead{next + b * size / 2, kStepBytes / 2} : Ahead{first, 0};
}

// `A` is the type that the rows have been prepared in. All blocks of rows pass over a part of `part_size` k before any
// goes on to the next.
template <class A, class W>
void multiply(const DenseRows& rows, int count, const W* panel, int64_t k, int64_t part_size, float* tile) {
  const FetchHint hint = fetch_hint();
  const A* a = reinterpret_cast<const A*>(rows.first);
  const int64_t stride = rows.stride / static_cast<int64_t>(sizeof(A)), blocks = ceil_div(count, kBlockRows);
  const bool at_once = blocks == 1 && passes(count) == 1;
  for (int64_t i = 0; i < k; i += part_size) {
    const W* part = panel + i * kPanel;
    const int64_t size = std::min(k - i, part_size), bytes = size * kPanel * static_cast<int64_t>(sizeof(W));
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = count * b / blocks, end = count * (b + 1) / blocks;
      const Ahead ahead = ahead_of<A>(part, bytes, dense_panel_bytes<W>(k), b, blocks, at_once);
      const auto multiply_block = choose<A, W>(hint, static_cast<int>(end - begin));
      multiply_block(a + begin * stride + i, stride, part, size, ahead, tile + begin * kPanel, i != 0);
    }
  }
}

}  // namespace

template <class T>
double dense_effort() {
  return kEffort<Factor<T>>;
}

template <class T>
void pack_dense_panel(const T* source, int64_t k, const int32_t* rows, T* panel) {
  constexpr int group = kGroup<T>;
  for (int64_t i = 0; i < k; i += group) {
    for (int c = 0; c < kPanel; ++c) {
      for (int g = 0; g < group; ++g) *panel++ = rows[c] < 0 ? T{} : source[rows[c] * k + i + g];
    }
  }
}

template <class T>
void unpack_dense_column(const T* panel, int column, int64_t k, float scale, float* out) {
  constexpr int group = kGroup<T>;
  panel += column * group;
  for (int64_t i = 0; i < k; i += group, panel += kPanel * group) {
    for (int g = 0; g < group; ++g) *out++ = scale * to_float(panel[g]);
  }
}

template <class T>
DenseRows prepare_dense(const T* a, int64_t stride, int64_t count, int64_t k, float* scratch) {
  if constexpr (std::is_same_v<Factor<T>, T>) {
    return {reinterpret_cast<const char*>(a), stride * static_cast<int64_t>(sizeof(T))};
  }
  const int64_t wide = dense_scratch_stride(k), whole = k / kLanes * kLanes;
  for (int64_t m = 0; m < count; ++m, a += stride) {
    float* to = scratch + m * wide;
    for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(a + i));
    for (int64_t i = whole; i < k; ++i) to[i] = to_float(a[i]);
  }
  return {reinterpret_cast<const char*>(scratch), wide * static_cast<int64_t>(sizeof(float))};
}

template <class T>
void multiply_dense_panel(const DenseRows& rows, int count, const T* panel, int64_t k, float* tile) {
  multiply<Factor<T>>(rows, count, panel, k, sizeof(T) == 2 ? k : kFloatPart, tile);
}

template double dense_effort<bf16>();
template double dense_effort<float>();
template void pack_dense_panel(const bf16*, int64_t, const int32_t*, bf16*);
template void pack_dense_panel(const float*, int64_t, const int32_t*, float*);
template void unpack_dense_column(const bf16*, int, int64_t, float, float*);
template void unpack_dense_column(const float*, int, int64_t, float, float*);
template DenseRows prepare_dense(const bf16*, int64_t, int64_t, int64_t, float*);
template DenseRows prepare_dense(const float*, int64_t, int64_t, int64_t, float*);
template void multiply_dense_panel(const DenseRows&, int, const bf16*, int64_t, float*);
template void multiply_dense_panel(const DenseRows&, int, const float*, int64_t, float*);

}  // namespace pdserve
