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
constexpr int64_t kFloatChunk = 96;

// Where bfloat16 is widened, two blocks of rows do so in registers, each for itself. For more, a part of the panel is
// widened once, into the nearest cache: of this many k, so that half of that cache is left to the rows.
constexpr int64_t kWideChunk = 128;
constexpr int64_t kNarrowBlocks = 2;

template <class T>
constexpr int kGroup = sizeof(T) == 2 ? 2 : 1;

template <class A, class W>
using Block = void (*)(const A*, int64_t, const W*, int64_t, Ahead, float*, Sum);

template <class A, class W, FetchHint H, int... R>
Block<A, W> choose(int count, std::integer_sequence<int, R...>) {
  static constexpr Block<A, W> blocks[] = {&block<H, R + 1>...};
  return blocks[count - 1];
}

template <class A, class W>
Block<A, W> choose(FetchHint hint, int count) {
  const auto rows = std::make_integer_sequence<int, kBlockRows<A>>();
  return hint == FetchHint::kNonTemporal ? choose<A, W, FetchHint::kNonTemporal>(count, rows)
                                         : choose<A, W, FetchHint::kAllCaches>(count, rows);
}

inline Ahead ahead_of(Stream stream, const void* panel) {
  const int64_t step = stream.part == Stream::kAll ? 2 * kLine : stream.part == Stream::kHalf ? kLine : 0;
  return {static_cast<const char*>(panel) + stream.offset, step};
}

// One part of a panel times all rows, in blocks of about equal size: k from `from` on, `size` of them, which lie at
// `weights`. All blocks together ask for the same part of the next panel, so that memory works as evenly as arithmetic;
// but where pairs are multiplied, as stream_of says: that is what was measured there.
template <class A, class W>
struct Part {
  FetchHint hint;
  const A* a;
  int64_t stride;
  int count;
  float* tile;
  const char* next;     // where the part lies in the next panel
  int64_t bytes_of_k;   // in the panel, which may be narrower than W

  void run(const W* weights, int64_t from, int64_t size, Sum sum) const {
    const int64_t blocks = ceil_div(count, kBlockRows<A>), steps = size / kGroup<W>;
    const int64_t step = ceil_div(kGroup<W> * bytes_of_k, blocks);
    for (int64_t b = 0; b < blocks; ++b) {
      const int begin = static_cast<int>(count * b / blocks), end = static_cast<int>(count * (b + 1) / blocks);
      Ahead ahead{next + from * bytes_of_k + b * step * steps, step};
      if constexpr (sizeof(A) == 2) ahead = ahead_of(stream_of(size * bytes_of_k, b, blocks), weights);
      choose<A, W>(hint, end - begin)(a + begin * stride + from, stride, weights, size, ahead, tile + begin * kPanel, sum);
    }
  }
};

// Where the rows are done with a panel at once, its bytes are needed at the rate of the arithmetic: they are asked for a
// little before that, but more than a memory latency's worth, as they are used in bursts. Else there is a panel's time.
template <class A, class W>
Part<A, W> make_part(const DenseRows& rows, int count, const void* panel, size_t panel_bytes, int64_t k, float* tile) {
  constexpr int64_t kAhead = 12288;
  const bool at_once = count <= kBlockRows<A> && passes<A>(count) == 1;
  const int64_t size = static_cast<int64_t>(panel_bytes);
  return {fetch_hint(), reinterpret_cast<const A*>(rows.first), rows.stride / static_cast<int64_t>(sizeof(A)), count, tile,
          static_cast<const char*>(panel) + (at_once ? kAhead : size), size / k};
}

// float32.
void multiply(const DenseRows& rows, int count, const float* panel, int64_t k, float* tile) {
  const auto part = make_part<float, float>(rows, count, panel, dense_panel_bytes<float>(k), k, tile);
  for (int64_t i = 0; i < k; i += kFloatChunk) {
    part.run(panel + i * kPanel, i, std::min(k - i, kFloatChunk), i == 0 ? Sum::kFirst : Sum::kAddPart);
  }
}

// bfloat16, for which `A` is the processor's factor.
template <class A>
void multiply(const DenseRows& rows, int count, const bf16* panel, int64_t k, float* tile) {
  const size_t bytes = dense_panel_bytes<bf16>(k);
  if constexpr (std::is_same_v<A, bf16>) {
    make_part<bf16, bf16>(rows, count, panel, bytes, k, tile).run(panel, 0, k, Sum::kFirst);
  } else {
    if (count <= kNarrowBlocks * kBlockRows<float>) {
      make_part<float, bf16>(rows, count, panel, bytes, k, tile).run(panel, 0, k, Sum::kFirst);
      return;
    }
    const auto part = make_part<float, float>(rows, count, panel, bytes, k, tile);
    alignas(64) float wide[kWideChunk * kPanel];
    for (int64_t i = 0; i < k; i += kWideChunk) {
      const int64_t size = std::min(k - i, kWideChunk);
      widen(panel + i * kPanel, size, wide);
      part.run(wide, i, size, i == 0 ? Sum::kFirst : Sum::kGoOn);
    }
  }
}

}  // namespace

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
  if constexpr (sizeof(T) == 2) {
    multiply<Factor<bf16>>(rows, count, panel, k, tile);
  } else {
    multiply(rows, count, panel, k, tile);
  }
}

template void pack_dense_panel(const bf16*, int64_t, const int32_t*, bf16*);
template void pack_dense_panel(const float*, int64_t, const int32_t*, float*);
template DenseRows prepare_dense(const bf16*, int64_t, int64_t, int64_t, float*);
template DenseRows prepare_dense(const float*, int64_t, int64_t, int64_t, float*);
template void multiply_dense_panel(const DenseRows&, int, const bf16*, int64_t, float*);
template void multiply_dense_panel(const DenseRows&, int, const float*, int64_t, float*);

}  // namespace pdserve
