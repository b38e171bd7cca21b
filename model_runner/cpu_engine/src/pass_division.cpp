#include "pass_division.h"

#include <algorithm>

namespace pdserve {

Cell Division::cell_of(const PackedLinear& weight, int64_t tokens, int tid) const {
  // Cells do not depend on what a product costs.
  const Product product{tokens, weight.panels, weight.k, 0, 0};
  return pdserve::cell_of(product, grid[weight.product], tid);
}

Division divide(const std::vector<LayerWeights>& layers, const PackedLinear& head, int64_t tokens, int threads) {
  const auto first = [&](const PackedLinear LayerWeights::*weight) -> const PackedLinear& {
    const auto has = [&](const LayerWeights& layer) { return (layer.*weight).panels != 0; };
    const auto found = std::find_if(layers.begin(), layers.end(), has);
    return (found == layers.end() ? layers.front() : *found).*weight;
  };
  const auto product = [&](const PackedLinear& weight) {
    // Segments differ little: the mean is near enough to divide work by.
    const int64_t panel_bytes = weight.bytes(0, weight.panels) / std::max<int64_t>(1, weight.panels);
    return Product{tokens, weight.panels, weight.k, panel_bytes, weight.effort};
  };
  const Product products[] = {product(first(&LayerWeights::qkv)), product(first(&LayerWeights::o)),
                              product(first(&LayerWeights::gate_up)), product(first(&LayerWeights::down))};
  Division result{choose_by_rows(products, threads), {}};
  for (int i = 0; i < kLayerProducts; ++i) result.grid[i] = choose_grid(products[i], threads);
  result.grid[static_cast<int>(LinearKind::kQB)] = choose_grid(product(first(&LayerWeights::q_b)), threads);
  result.grid[static_cast<int>(LinearKind::kHead)] = choose_grid(product(head), threads);
  result.grid[static_cast<int>(LinearKind::kRouter)] = choose_grid(product(first(&LayerWeights::router)), threads);
  return result;
}

}  // namespace pdserve
