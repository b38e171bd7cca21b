#include "expert_choice.h"

#include <algorithm>
#include <limits>

#include "api.h"

namespace pdserve {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
// So that scores that are all zero have weights of zero.
constexpr float kLeastTotal = 1e-20f;

// Of the first `count` elements, whatever lies behind them in the last vector.
float largest_of(const float* x, int64_t count) {
  Vec top = broadcast(kNever);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) top = max(top, load(x + i));
  float result = largest(top);
  for (; i < count; ++i) result = std::max(result, x[i]);
  return result;
}

// The first of the largest. Where there is none that is larger than kNever, the first that is no number; else `count`.
int64_t find_largest(const float* x, int64_t count) {
  const float top = largest_of(x, count);
  if (top > kNever) {
    for (int64_t i = 0; i < count; ++i) {
      if (x[i] == top) return i;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    if (x[i] != x[i]) return i;
  }
  return count;
}

void score(const ExpertsOp& op, const float* logits, float* scores) {
  const int64_t padded = round_up(op.count, kLanes);
  if (op.scoring == ExpertScoring::kSigmoid) {
    for (int64_t i = 0; i < padded; i += kLanes) {
      store(scores + i, broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - load(logits + i))));
    }
    return;
  }
  const Vec top = broadcast(largest_of(logits, op.count));
  for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, exp(load(logits + i) - top));
  std::fill(scores + op.count, scores + padded, 0.0f);
  Vec sums = zero();
  for (int64_t i = 0; i < padded; i += kLanes) sums = sums + load(scores + i);
  const Vec total = broadcast(sum(sums));
  for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, load(scores + i) / total);
}

float score_of_group(const ExpertsOp& op, const float* ranking, int64_t size) {
  float first = kNever, second = kNever;
  for (int64_t i = 0; i < size; ++i) {
    second = std::max(second, std::min(first, ranking[i]));
    first = std::max(first, ranking[i]);
  }
  return op.group_score == GroupScore::kLargest || size < 2 ? first : first + second;
}

// Experts that are in none of the best groups are never chosen. `room`: two floats a group.
void drop_groups(const ExpertsOp& op, float* ranking, float* room) {
  const int64_t size = op.count / op.groups;
  float *groups = room, *kept = room + op.groups;
  for (int32_t g = 0; g < op.groups; ++g) groups[g] = score_of_group(op, ranking + g * size, size);
  std::fill_n(kept, op.groups, 0.0f);
  for (int32_t i = 0; i < op.groups_chosen; ++i) {
    const int64_t best = find_largest(groups, op.groups) % op.groups;
    groups[best] = kNever;
    kept[best] = 1.0f;
  }
  for (int32_t g = 0; g < op.groups; ++g) {
    if (kept[g] == 0.0f) std::fill_n(ranking + g * size, size, kNever);
  }
}

}  // namespace

void choose_experts(const ExpertsOp& op, const float* logits, const float* bias, float* room, int32_t* chosen,
                    float* weights) {
  const int64_t padded = round_up(op.count, kLanes);
  float *scores = room, *ranking = room + padded;
  score(op, logits, scores);
  for (int64_t i = 0; i < op.count; ++i) ranking[i] = bias == nullptr ? scores[i] : scores[i] + bias[i];
  if (op.groups_chosen < op.groups) drop_groups(op, ranking, ranking + padded);
  float total = 0.0f;
  for (int32_t c = 0; c < op.chosen; ++c) {
    // Where no score is a number that counts, the first one may be chosen more than once.
    const int64_t best = find_largest(ranking, op.count) % op.count;
    ranking[best] = kNever;
    chosen[c] = static_cast<int32_t>(best);
    weights[c] = scores[best];
    total += scores[best];
  }
  float scale = op.normalised ? op.weight_scale / (total + kLeastTotal) : op.weight_scale;
  // exp makes numbers of those that are none.
  for (int64_t i = 0; i < op.count; ++i) {
    if (logits[i] != logits[i]) scale = logits[i];
  }
  for (int32_t c = 0; c < op.chosen; ++c) weights[c] *= scale;
}

// For tests: of `rows` tokens, whose logits are `stride` floats apart.
PDS_API void pds_choose_experts(const ExpertsOp* op, const float* logits, int64_t stride, int64_t rows,
                                const float* bias, float* room, int32_t* chosen, float* weights) {
  for (int64_t i = 0; i < rows; ++i) {
    choose_experts(*op, logits + i * stride, bias, room, chosen + i * op->chosen, weights + i * op->chosen);
  }
}

}  // namespace pdserve
