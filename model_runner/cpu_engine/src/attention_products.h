// The two products of attention over a tile of keys and values in blocks (kv_blocks.h): queries times keys, softmax
// weights times values. Both are the same loop: broadcast a word of the left side, multiply it with a row of words of the
// right side, add. A sum is added up in the order of its words, whatever else is computed beside it.
#pragma once

#include "attention_fetch.h"
#include "attention_tile.h"
#include "kv_blocks.h"
#include "word_products.h"

namespace pdserve {

constexpr int kTileBlocks = kTile / kBlockSlots;

// Scores of R rows of queries, `stride` words apart, against V blocks of keys of `words` rows: c[r][16 v + slot].
template <class Words, int R, int V>
void score_blocks(const uint32_t* q, int64_t stride, int64_t words, const uint32_t* const* keys, float* c,
                  TileFetch& ahead) {
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = zero();
  }
  for (int64_t s = 0; s < words; ++s) {
    Words::step(acc, q + s * Words::kLeft, stride, [&](int v) { return keys[v] + s * (kBlockSlots / Words::kNarrow); });
    ahead.fetch((V + Words::kNarrow - 1) / Words::kNarrow);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * kTile + v * kLanes, acc[r][v]);
  }
}

// c[r] = c[r] * factor[r] + weights[r] · values over `groups` rows of words, for V vectors of dimensions from `d` on.
template <class Words, int R, int V>
void weigh_blocks(const uint32_t* weights, const uint32_t* const* values, int64_t dim, int64_t d, int groups, float* c,
                  const float* factor, TileFetch& ahead) {
  constexpr int kRows = kBlockSlots / Words::kGroup;
  constexpr int64_t kStride = kTile / Words::kGroup * Words::kLeft;
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = load(c + r * dim + d + v * kLanes) * broadcast(factor[r]);
  }
  for (int s = 0; s < groups; ++s) {
    const uint32_t* row = values[s / kRows] + (s % kRows * dim + d) / Words::kNarrow;
    Words::step(acc, weights + s * Words::kLeft, kStride, [&](int v) { return row + v * (kLanes / Words::kNarrow); });
    ahead.fetch((V + Words::kNarrow - 1) / Words::kNarrow);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * dim + d + v * kLanes, acc[r][v]);
  }
}

template <class Words, int R, int V>
void score_rest(const uint32_t* q, int64_t stride, int64_t words, const uint32_t* const* keys, int blocks, float* c,
                TileFetch& ahead) {
  if constexpr (V > 0) {
    if (blocks == V) {
      score_blocks<Words, R, V>(q, stride, words, keys, c, ahead);
    } else {
      score_rest<Words, R, V - 1>(q, stride, words, keys, blocks, c, ahead);
    }
  }
}

template <class Words, int R>
void score_rows(const uint32_t* q, int64_t dim, const uint32_t* const* keys, int blocks, float* c, TileFetch& ahead) {
  constexpr int kMost = kBlockVecs<R>;
  const int64_t words = dim / Words::kGroup, stride = words * Words::kLeft;
  for (; blocks > kMost; blocks -= kMost, keys += kMost, c += kMost * kLanes) {
    score_blocks<Words, R, kMost>(q, stride, words, keys, c, ahead);
  }
  score_rest<Words, R, kMost>(q, stride, words, keys, blocks, c, ahead);
}

template <class Words, int R>
void weigh_rows(const uint32_t* weights, const uint32_t* const* values, int64_t dim, int groups, float* c,
                const float* factor, TileFetch& ahead) {
  constexpr int kMost = kBlockVecs<R>;
  int64_t d = 0;
  for (; d + kMost * kLanes <= dim; d += kMost * kLanes) {
    weigh_blocks<Words, R, kMost>(weights, values, dim, d, groups, c, factor, ahead);
  }
  for (; d < dim; d += kLanes) weigh_blocks<Words, R, 1>(weights, values, dim, d, groups, c, factor, ahead);
}

using ScoreRows = void (*)(const uint32_t*, int64_t, const uint32_t* const*, int, float*, TileFetch&);
using WeighRows = void (*)(const uint32_t*, const uint32_t* const*, int64_t, int, float*, const float*, TileFetch&);

// By the number of rows.
template <class Words>
constexpr ScoreRows kScoreRows[kBlockRows + 1] = {
    nullptr,
    score_rows<Words, 1>,
    score_rows<Words, 2>,
    score_rows<Words, 3>,
    score_rows<Words, 4>,
    score_rows<Words, 5>,
    score_rows<Words, 6>,
};
template <class Words>
constexpr WeighRows kWeighRows[kBlockRows + 1] = {
    nullptr,
    weigh_rows<Words, 1>,
    weigh_rows<Words, 2>,
    weigh_rows<Words, 3>,
    weigh_rows<Words, 4>,
    weigh_rows<Words, 5>,
    weigh_rows<Words, 6>,
};

// A tile's keys and values of one head, by blocks of 16: where they lie in the pool, or copies of them.
template <class Words>
struct BlockTile {
  const uint32_t* keys[kTileBlocks];
  const uint32_t* values[kTileBlocks];
  int64_t dim, value_dim;
  TileFetch& ahead;

  void score(int rows, const uint32_t* queries, int vecs, float* scores) const {
    kScoreRows<Words>[rows](queries, dim, keys, vecs, scores, ahead);
  }

  void weigh(int rows, const uint32_t* weights, int64_t keys_seen, float* sums, const float* factors) const {
    const auto groups = static_cast<int>((keys_seen + Words::kGroup - 1) / Words::kGroup);
    kWeighRows<Words>[rows](weights, values, value_dim, groups, sums, factors, ahead);
  }
};

}  // namespace pdserve
