// The tokens of a pass by the experts that they have chosen, and how threads share out the experts' columns.
//
// Every thread makes them for itself: that is cheaper than to wait until one has made them for all.
#pragma once

#include <cstdint>
#include <vector>

#include "layer_ops.h"
#include "model_weights.h"
#include "sizes.h"

namespace pdserve {

// The experts of each token, and its weights for them: of the shared one last, where there is one.
struct ChosenExperts {
  const int32_t* experts;  // [T, chosen]
  const float* weights;    // [T, chosen + 1]
};

// An expert that some tokens have chosen: rows [begin, begin + count) of all (token, expert) pairs.
struct ExpertGroup {
  int32_t expert;
  int64_t begin, count;
};

// Panels of a group's first product.
struct GroupPanels {
  int64_t group;
  Range panels;
};

class ExpertGroups {
 public:
  // Makes room for passes of `tokens` tokens which choose up to `chosen` of `count` experts.
  void reserve(int64_t count, int64_t chosen, int64_t tokens);

  void sort(const ExpertsOp& op, const ChosenExperts& chosen, int64_t tokens);

  // Thread `tid`'s share of all groups' gate_up, by what they cost; threads beside each other have neighbouring panels, in
  // pairs. In the order of the groups.
  void share_out(const std::vector<ExpertWeights>& experts, int tid, int threads);

  // Those that have tokens, in the order of the experts: whatever else is in the batch, a token's experts come in the same
  // order.
  const std::vector<ExpertGroup>& groups() const { return groups_; }
  const std::vector<GroupPanels>& share() const { return share_; }

  // By row: tokens of a group are in the order of the pass.
  const int32_t* tokens() const { return tokens_.data(); }
  const float* weights() const { return weights_.data(); }

 private:
  std::vector<ExpertGroup> groups_;
  std::vector<GroupPanels> share_;
  std::vector<int64_t> next_;     // by expert
  std::vector<int32_t> tokens_;   // by row
  std::vector<float> weights_;    // by row
};

}  // namespace pdserve
