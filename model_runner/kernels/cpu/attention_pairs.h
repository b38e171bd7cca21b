// The two products of attention over keys and values that lie in pairs (kv_pairs.h), straight from the pool. Sums are
// added up in the order of attention_tile.h, so that both give the same bits.
#pragma once

#include "attention_fetch.h"
#include "attention_tile.h"
#include "kv_pairs.h"

namespace pdserve {

#if defined(__AVX512BF16__)

constexpr int kTileBlocks = kTile / kBlockSlots;

// Scores of R rows of queries against V blocks of keys: c[r][16 v + slot].
template <int R, int V>
void score_blocks(const uint32_t* q, int64_t words, const uint32_t* const* keys, float* c, TileFetch& ahead) {
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = zero();
  }
  for (int64_t s = 0; s < words; ++s) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        acc[r][v] = PairWords::multiply(acc[r][v], q[r * words + s], keys[v] + s * kBlockSlots);
      }
    }
    ahead.fetch(V);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * kTile + v * kLanes, acc[r][v]);
  }
}

// c[r] = c[r] * factor[r] + weights[r] · values over `pairs` pairs of keys, for V vectors of dimensions from `d` on.
template <int R, int V>
void weigh_blocks(const uint32_t* weights, const uint32_t* const* values, int64_t dim, int64_t d, int pairs, float* c,
                  const float* factor, TileFetch& ahead) {
  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = load(c + r * dim + d + v * kLanes) * broadcast(factor[r]);
  }
  for (int s = 0; s < pairs; ++s) {
    const uint32_t* row = values[s / 8] + s % 8 * dim + d;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        acc[r][v] = PairWords::multiply(acc[r][v], weights[r * (kTile / 2) + s], row + v * kLanes);
      }
    }
    ahead.fetch(V);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * dim + d + v * kLanes, acc[r][v]);
  }
}

template <int R>
void score_rows(const uint32_t* q, int64_t words, const uint32_t* const* keys, int blocks, float* c, TileFetch& ahead) {
  switch (blocks) {
    case 1: return score_blocks<R, 1>(q, words, keys, c, ahead);
    case 2: return score_blocks<R, 2>(q, words, keys, c, ahead);
    case 3: return score_blocks<R, 3>(q, words, keys, c, ahead);
    case 4: return score_blocks<R, 4>(q, words, keys, c, ahead);
  }
  // More sums than there are registers.
  score_blocks<R, 4>(q, words, keys, c, ahead);
  score_rows<R>(q, words, keys + 4, blocks - 4, c + 4 * kLanes, ahead);
}

template <int R>
void weigh_rows(const uint32_t* weights, const uint32_t* const* values, int64_t dim, int pairs, float* c,
                const float* factor, TileFetch& ahead) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) weigh_blocks<R, 4>(weights, values, dim, d, pairs, c, factor, ahead);
  for (; d < dim; d += kLanes) weigh_blocks<R, 1>(weights, values, dim, d, pairs, c, factor, ahead);
}

using ScoreRows = void (*)(const uint32_t*, int64_t, const uint32_t* const*, int, float*, TileFetch&);
using WeighRows = void (*)(const uint32_t*, const uint32_t* const*, int64_t, int, float*, const float*, TileFetch&);

// By the number of rows.
constexpr ScoreRows kScoreRows[kBlockRows + 1] = {nullptr,       score_rows<1>, score_rows<2>, score_rows<3>,
                                                  score_rows<4>, score_rows<5>, score_rows<6>};
constexpr WeighRows kWeighRows[kBlockRows + 1] = {nullptr,       weigh_rows<1>, weigh_rows<2>, weigh_rows<3>,
                                                  weigh_rows<4>, weigh_rows<5>, weigh_rows<6>};

#endif

}  // namespace pdserve
