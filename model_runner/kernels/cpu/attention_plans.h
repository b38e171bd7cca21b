// The attention plans of a pass: one for each width of window among the layers.
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
      const auto place = std::find(windows_.begin(), windows_.end(), layer.attend.window);
      of_layer_.push_back(place - windows_.begin());
      if (place == windows_.end()) windows_.push_back(layer.attend.window);
    }
    plans_.resize(windows_.size());
  }

  // As AttentionPlan::prepare has it.
  void prepare(const EngineConfig& config, const AttentionEntry* entries, int64_t num_entries,
               const int32_t* req_to_token, int64_t table_stride, int nthreads) {
    for (size_t i = 0; i < plans_.size(); ++i) {
      plans_[i].prepare(config.pool, config.heads, windows_[i], entries, num_entries, req_to_token, table_stride,
                        nthreads);
    }
  }

  AttentionPlan& of_layer(int64_t layer) { return plans_[of_layer_[layer]]; }

 private:
  std::vector<int32_t> windows_;
  std::vector<int64_t> of_layer_;
  std::vector<AttentionPlan> plans_;
};

}  // namespace pdserve
