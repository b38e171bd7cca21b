// The arithmetic of attention on one tile of keys: up to kTile keys of one KV head, against rows of queries.
//
// Rows of queries are (token, query head of the group) pairs, so that one tile serves a whole group. The products are in
// attention_products.h; here is the softmax between them.
//
// Shapes: D head_dim, R rows of a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "isa/words.h"
#include "sizes.h"

namespace pdserve {

constexpr int kTile = 128;      // keys of a tile
constexpr int kBlockRows = 6;   // rows whose sums stay in registers together

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

// The running softmax of some rows: largest score so far (times log2 e), sum of weights by lane, weighted values.
struct SoftmaxRows {
  float* largest;   // [rows]
  float* sums;      // [rows][kLanes]
  float* values;    // [rows][D of values]
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
  float* keys;         // [kTile][D]: copies, where keys don't lie as the products read them
  float* values;       // [kTile][D of values]
  float* scores;       // [kBlockRows][kTile]
  float* weights;
  // Of elements of one byte.
  float* key_scales;   // [kTile]
  float* value_scales;
  uint8_t* bytes;      // [2][kTile][D]: keys and values of small pages

  AttentionScratch(float* memory, int64_t rows, int64_t dim, int64_t value_dim) {
    const auto take = [&memory](int64_t size) {
      float* part = memory;
      memory += whole_lines(size);
      return part;
    };
    queries = take(rows * dim);
    for (SoftmaxRows* state : {&total, &chunk}) *state = {take(rows), take(rows * kLanes), take(rows * value_dim)};
    keys = take(kTile * dim);
    values = take(kTile * value_dim);
    scores = take(kBlockRows * kTile);
    weights = take(kBlockRows * kTile);
    key_scales = take(kTile);
    value_scales = take(kTile);
    bytes = reinterpret_cast<uint8_t*>(take(kTile * dim / 2));
  }

  static int64_t size(int64_t rows, int64_t dim, int64_t value_dim) {
    const int64_t softmax = whole_lines(rows) + whole_lines(rows * kLanes) + whole_lines(rows * value_dim);
    return whole_lines(rows * dim) + 2 * softmax + whole_lines(kTile * dim) + whole_lines(kTile * value_dim) +
           2 * kBlockRows * kTile + 2 * kTile + kTile * dim / 2;
  }

 private:
  static int64_t whole_lines(int64_t size) { return round_up(size, kLanes); }
};

// Which keys of a tile a row sees.
struct SeenKeys {
  int begin, end;
};

// What products with a key, and weights of a value, are multiplied with: nothing, or the scales of a tile's elements.
struct NoScales {
  explicit NoScales(const AttentionScratch&) {}
  Vec of_keys(Vec products, int) const { return products; }
  Vec of_values(Vec weights, int) const { return weights; }
};

struct TileScales {
  const float *keys, *values;

  explicit TileScales(const AttentionScratch& scratch) : keys(scratch.key_scales), values(scratch.value_scales) {}
  Vec of_keys(Vec products, int key) const { return products * load(keys + key); }
  Vec of_values(Vec weights, int key) const { return weights * load(values + key); }
};

// One row's scores become weights. Keys that it does not see are masked; the first `vecs` vectors hold every key that any
// row of the block sees. Returns what the row's older sums must be multiplied by. `score` includes log2 e.
template <class Element, class Scales, class Score>
float softmax_row(const float* scores, int vecs, SeenKeys seen, const Scales& scales, const Score& score,
                  float* row_largest, float* row_sums, Element* weights) {
  Vec scaled[kTile / kLanes];
  Vec top = broadcast(kNothing);
  for (int v = 0; v < vecs; ++v) {
    scaled[v] = score(scales.of_keys(load(scores + v * kLanes), v * kLanes));
    if ((v + 1) * kLanes > seen.end) scaled[v] = mask_keys(scaled[v], v * kLanes, seen.end);
    if (v * kLanes < seen.begin) scaled[v] = mask_older_keys(scaled[v], v * kLanes, seen.begin);
    top = max(top, scaled[v]);
  }
  const float next = std::max(*row_largest, largest(top));
  const float factor = first_lane(exp2(broadcast(*row_largest - next)));
  *row_largest = next;
  Vec sums = load(row_sums) * broadcast(factor);
  for (int v = 0; v < vecs; ++v) {
    const Vec weight = exp2(scaled[v] - broadcast(next));
    sums = sums + weight;
    store(weights + v * kLanes, scales.of_values(weight, v * kLanes));
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
