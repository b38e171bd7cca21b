#include "expert_groups.h"

#include <algorithm>

#include "work_grid.h"

namespace pdserve {
namespace {

// Panels that stay together: 32 columns of what the activation leaves, which quantised products round together.
constexpr int64_t kTogether = 2;

}  // namespace

void ExpertGroups::reserve(int64_t count, int64_t chosen, int64_t tokens) {
  // With the shared one.
  const size_t experts = static_cast<size_t>(count) + 1, rows = static_cast<size_t>(tokens * (chosen + 1));
  groups_.reserve(experts);
  share_.reserve(experts);
  next_.reserve(experts);
  // Each by its own size: memory may have run out between the two.
  if (tokens_.size() < rows) tokens_.resize(rows);
  if (weights_.size() < rows) weights_.resize(rows);
}

void ExpertGroups::sort(const ExpertsOp& op, const ChosenExperts& chosen, int64_t tokens) {
  const int64_t pairs = tokens * op.chosen, per_token = op.chosen + 1;
  next_.assign(op.count, 0);
  for (int64_t i = 0; i < pairs; ++i) ++next_[chosen.experts[i]];
  groups_.clear();
  int64_t begin = 0;
  for (int32_t e = 0; e < op.count; ++e) {
    const int64_t count = next_[e];
    next_[e] = begin;
    if (count != 0) groups_.push_back({e, begin, count});
    begin += count;
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int32_t c = 0; c < op.chosen; ++c) {
      const int64_t row = next_[chosen.experts[t * op.chosen + c]]++;
      tokens_[row] = static_cast<int32_t>(t);
      weights_[row] = chosen.weights[t * per_token + c];
    }
  }
  if (op.shared_inner == 0 || tokens == 0) return;
  groups_.push_back({op.count, begin, tokens});
  for (int64_t t = 0; t < tokens; ++t) {
    tokens_[begin + t] = static_cast<int32_t>(t);
    weights_[begin + t] = chosen.weights[t * per_token + op.chosen];
  }
}

void ExpertGroups::share_out(const std::vector<ExpertWeights>& experts, int tid, int threads) {
  const auto cost = [&](const ExpertGroup& group) {
    const PackedLinear& weight = experts[group.expert].gate_up;
    const int64_t panel_bytes = weight.bytes(0, weight.panels) / weight.panels;
    return panel_cost({group.count, weight.panels, weight.k, panel_bytes, weight.effort}, threads);
  };
  double total = 0;
  for (const ExpertGroup& group : groups_) total += cost(group) * static_cast<double>(experts[group.expert].gate_up.panels);
  const double first = total * tid / threads, last = total * (tid + 1) / threads;
  share_.clear();
  double before = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int64_t panels = experts[groups_[g].expert].gate_up.panels;
    const double one = cost(groups_[g]), all = one * static_cast<double>(panels);
    // Where a share begins or ends, as each thread that asks finds it.
    const auto border = [&](double at, bool ends) {
      if (ends || at >= before + all) return panels;
      if (at <= before) return int64_t{0};
      const auto together = static_cast<int64_t>((at - before) / (one * kTogether) + 0.5) * kTogether;
      return std::min(panels, together);
    };
    const Range own{border(first, false), border(last, tid + 1 == threads)};
    if (own.size() > 0) share_.push_back({static_cast<int64_t>(g), own});
    before += all;
  }
}

}  // namespace pdserve
