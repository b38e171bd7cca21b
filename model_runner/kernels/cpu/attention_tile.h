// The arithmetic of attention on one tile of keys: up to kTile keys of one KV head, against rows of queries.
//
// Rows of queries are (token, query head of the group) pairs, so that one packed tile serves a whole group. Everything
// is made of 32-bit words: a pair of bfloat16 where the processor multiplies such pairs (vdpbf16ps), one float32
// elsewhere. Keys are packed as [words of D][kTile], values as [words of kTile][D]; then both products, q·Kᵀ and p·V,
// are the same loop: broadcast a word of the left side, multiply it with a row of words of the right side, add.
//
// Shapes: D head_dim, R rows of a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace pdserve {

constexpr int kTile = 128;      // keys of a tile
constexpr int kBlockRows = 6;   // rows whose sums stay in registers together
#if defined(__AVX512F__)
constexpr int kBlockVecs = 4;   // 6 x 4 of 32 registers accumulate
#else
constexpr int kBlockVecs = 1;   // a Vec is two of 16 registers
#endif

// Words that the two sides of a product are made of.
#if defined(__AVX512BF16__)
struct PairWords {
  using Element = bf16;
  static constexpr int kGroup = 2;
  static Vec multiply(Vec acc, uint32_t a, const uint32_t* b) {
    const __m512i left = _mm512_set1_epi32(static_cast<int>(a));
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)left, (__m512bh)_mm512_loadu_si512(b))};
  }
};
#endif

struct FloatWords {
  using Element = float;
  static constexpr int kGroup = 1;
  static Vec multiply(Vec acc, uint32_t a, const uint32_t* b) {
    float left;
    std::memcpy(&left, &a, sizeof left);
    return fma(broadcast(left), load(reinterpret_cast<const float*>(b)), acc);
  }
};

// 2^x; 0 far below, NaN of NaN. To about one unit in the last place.
inline Vec exp2(Vec x) {
  // The order of the operands lets a NaN through.
  x = max(broadcast(-200.0f), x);
  const Vec n = round_even(x);
  const Vec f = x - n;
  Vec p = broadcast(1.3264727e-3f);
  p = fma(p, f, broadcast(9.6715126e-3f));
  p = fma(p, f, broadcast(5.5507332e-2f));
  p = fma(p, f, broadcast(2.4022242e-1f));
  p = fma(p, f, broadcast(6.9314698e-1f));
  p = fma(p, f, broadcast(1.0f));
  return scale_by_power(p, n);
}

// Rows [0, R) of c, V vectors wide: c * factor (0 without `factor`) + a · b over `steps` words, in their order.
template <class Words, int R, int V>
void multiply_block(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int steps, float* c,
                    int64_t c_stride, const float* factor) {
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      acc[r][v] = factor ? load(c + r * c_stride + v * kLanes) * broadcast(factor[r]) : zero();
    }
  }
  for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        acc[r][v] = Words::multiply(acc[r][v], a[r * a_stride + s], b + s * b_stride + v * kLanes);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, acc[r][v]);
  }
}

// The same for any number of vectors.
template <class Words, int R>
void multiply_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int steps, float* c,
                   int64_t c_stride, int vecs, const float* factor) {
  int v = 0;
  for (; v + kBlockVecs <= vecs; v += kBlockVecs) {
    multiply_block<Words, R, kBlockVecs>(a, a_stride, b + v * kLanes, b_stride, steps, c + v * kLanes, c_stride,
                                         factor);
  }
  for (; v < vecs; ++v) {
    multiply_block<Words, R, 1>(a, a_stride, b + v * kLanes, b_stride, steps, c + v * kLanes, c_stride, factor);
  }
}

// The running softmax of some rows: largest score so far (times log2 e), sum of weights by lane, weighted values.
struct SoftmaxRows {
  float* largest;   // [rows]
  float* sums;      // [rows][kLanes]
  float* values;    // [rows][D]
};

// Finite, so that a row that has seen no key yet needs no case of its own.
constexpr float kNothing = -1e30f;

inline void reset(const SoftmaxRows& rows, int count, int64_t dim) {
  for (int r = 0; r < count; ++r) rows.largest[r] = kNothing;
  std::memset(rows.sums, 0, sizeof(float) * count * kLanes);
  std::memset(rows.values, 0, sizeof(float) * count * dim);
}

// One thread's memory, cut into its parts. Every part begins on a cache line.
struct AttentionScratch {
  float* queries;      // [rows][D], of any element type
  SoftmaxRows total;   // all chunks so far
  SoftmaxRows chunk;   // one chunk
  float* keys;         // a packed tile
  float* values;
  float* wide_keys;    // [kTile][D], where the pool's elements must be widened first
  float* wide_values;
  float* scores;       // [kBlockRows][kTile]
  float* weights;
  float* zeros;        // [D]: stands for keys that there are not

  AttentionScratch(float* memory, int64_t rows, int64_t dim) {
    const auto take = [&memory](int64_t size) {
      float* part = memory;
      memory += round_up(size);
      return part;
    };
    queries = take(rows * dim);
    for (SoftmaxRows* state : {&total, &chunk}) *state = {take(rows), take(rows * kLanes), take(rows * dim)};
    for (float** tile : {&keys, &values, &wide_keys, &wide_values}) *tile = take(kTile * dim);
    scores = take(kBlockRows * kTile);
    weights = take(kBlockRows * kTile);
    zeros = take(dim);
    std::memset(zeros, 0, dim * sizeof(float));
  }

  static int64_t size(int64_t rows, int64_t dim) {
    return round_up(rows * dim) + 2 * (round_up(rows) + round_up(rows * kLanes) + round_up(rows * dim)) +
           4 * round_up(kTile * dim) + 2 * kBlockRows * kTile + round_up(dim);
  }

 private:
  static int64_t round_up(int64_t size) { return (size + 15) / 16 * 16; }
};

// Lanes whose key is not below `visible` become minus infinity; the first lane's key is `key`.
inline Vec mask_keys(Vec scores, int key, int visible) {
  const int lanes = std::clamp(visible - key, 0, kLanes);
#if defined(__AVX512F__)
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << lanes) - 1), nothing, scores.v)};
#else
  float lane[kLanes];
  store(lane, scores);
  std::fill(lane + lanes, lane + kLanes, -std::numeric_limits<float>::infinity());
  return load(lane);
#endif
}

inline float first_lane(Vec x) {
#if defined(__AVX512F__)
  return _mm512_cvtss_f32(x.v);
#else
  return _mm256_cvtss_f32(x.a);
#endif
}

// One row's scores become weights. Keys from `visible` on are masked; the first `vecs` vectors hold every key that any
// row of the block sees. Returns what the row's older sums must be multiplied by. `scale` includes log2 e.
template <class Element>
float softmax_row(const float* scores, int vecs, int visible, float scale, float* row_largest, float* row_sums,
                  Element* weights) {
  Vec scaled[kTile / kLanes];
  Vec top = broadcast(kNothing);
  for (int v = 0; v < vecs; ++v) {
    scaled[v] = load(scores + v * kLanes) * broadcast(scale);
    if ((v + 1) * kLanes > visible) scaled[v] = mask_keys(scaled[v], v * kLanes, visible);
    top = max(top, scaled[v]);
  }
  const float next = std::max(*row_largest, largest(top));
  const float factor = first_lane(exp2(broadcast(*row_largest - next)));
  *row_largest = next;
  Vec sums = load(row_sums) * broadcast(factor);
  for (int v = 0; v < vecs; ++v) {
    const Vec weight = exp2(scaled[v] - broadcast(next));
    sums = sums + weight;
    store(weights + v * kLanes, weight);
  }
  store(row_sums, sums);
  return factor;
}

// Joins a later chunk's row to the row of the chunks before it.
inline void merge_row(float* largest, float* sums, float* values, float next_largest, const float* next_sums,
                      const float* next_values, int64_t dim) {
  const float top = std::max(*largest, next_largest);
  const Vec factor = exp2(broadcast(*largest - top)), next_factor = exp2(broadcast(next_largest - top));
  *largest = top;
  store(sums, fma(load(next_sums), next_factor, load(sums) * factor));
  for (int64_t d = 0; d < dim; d += kLanes) {
    store(values + d, fma(load(next_values + d), next_factor, load(values + d) * factor));
  }
}

}  // namespace pdserve
