// How a pass of some tokens is divided among the threads.
#pragma once

#include "linear.h"
#include "model_weights.h"
#include "work_grid.h"

namespace pdserve {

struct Division {
  bool by_rows;           // each thread takes its own tokens through all products
  Grid grid[kProducts];   // else, by PackedLinear::product

  // A thread's part of a product by columns.
  Cell cell_of(const PackedLinear& weight, int64_t tokens, int tid) const;
};

// All layers are divided as the first one suits, and networks and routers as the first of each does.
Division divide(const std::vector<LayerWeights>& layers, const PackedLinear& head, int64_t tokens, int threads);

}  // namespace pdserve
