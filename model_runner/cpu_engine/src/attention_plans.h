// The attention plans of a pass: one for each width of window, and group of pages, among the layers.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "layer_ops.h"

namespace pdserve {

class AttentionPlans {
 public:
  explicit AttentionPlans(const EngineConfig& config) {
    for (const LayerOps& layer : config.ops) {
      const auto alike = [&](const Attend& other) {
        return other.window == layer.attend.window && other.group == layer.attend.group;
      };
      const auto place = std::find_if(kinds_.begin(), kinds_.end(), alike);
      of_layer_.push_back(place - kinds_.begin());
      if (place == kinds_.end()) kinds_.push_back(layer.attend);
    }
    plans_.resize(kinds_.size());
  }

  // As AttentionPlan::prepare has it.
  void prepare(const EngineConfig& config, const AttentionEntry* entries, int64_t num_entries, PageTable table,
               int nthreads) {
    for (size_t i = 0; i < plans_.size(); ++i) {
      const PageTable own{table.req_to_token, table.stride, kinds_[i].group == 0 ? nullptr : table.window_pages};
      plans_[i].prepare(config.pool_of(kinds_[i]), config.heads, kinds_[i].window, entries, num_entries, own, nthreads);
    }
  }

  AttentionPlan& of_layer(int64_t layer) { return plans_[of_layer_[layer]]; }

 private:
  std::vector<Attend> kinds_;
  std::vector<int64_t> of_layer_;
  std::vector<AttentionPlan> plans_;
};

}  // namespace pdserve
