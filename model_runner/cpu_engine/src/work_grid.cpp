#include "work_grid.h"

#include <algorithm>

#include "api.h"
#include "linear.h"

namespace pdserve {
namespace {

// A thread gets 4 bytes from memory in a cycle, about 10 GB/s, until 16 of them have all that a socket gives.
constexpr double kThreadBytes = 4, kThreadsOfMemory = 16;
// Fetching ahead hides most of the shorter of arithmetic and memory behind the longer.
constexpr double kNotHidden = 0.25;
// Below this, a block's rows are too few to keep the processor's multipliers busy: it takes as long with fewer.
constexpr int64_t kLeastRows = 4;
// Elements of activations that a thread takes from another's cache, and widens or rounds for itself, in a cycle.
constexpr double kPrepared = 8;
// Until all threads have met: a few microseconds, and what one of them, disturbed, keeps the others waiting.
constexpr double kMeeting = 10000, kUneven = 1.05;

}  // namespace

Cell cell_of(const Product& product, Grid grid, int64_t tid) {
  if (tid >= grid.rows * grid.columns) return {{0, 0}, {0, 0}};
  return {share(product.rows, tid / grid.columns, grid.rows), share(product.panels, tid % grid.columns, grid.columns)};
}

int64_t weight_traffic(const Product& product, Grid grid) {
  int64_t times = 0;
  for (int64_t g = 0; g < grid.rows; ++g) times += ceil_div(share(product.rows, g, grid.rows).size(), kTileRows);
  return times * product.panels * product.panel_bytes;
}

double estimate(const Product& product, Grid grid, int64_t threads) {
  const int64_t rows = ceil_div(product.rows, grid.rows), panels = ceil_div(product.panels, grid.columns);
  const double multiply = static_cast<double>(std::max(rows, kLeastRows) * panels * product.k) * product.effort;
  const double prepare = static_cast<double>(rows * product.k) / kPrepared;
  const double bytes = kThreadBytes * std::min(static_cast<double>(threads), kThreadsOfMemory);
  const double memory = static_cast<double>(weight_traffic(product, grid)) / bytes, compute = multiply + prepare;
  return std::max(compute, memory) + kNotHidden * std::min(compute, memory);
}

double panel_cost(const Product& product, int64_t threads) {
  const double compute = static_cast<double>(std::max(product.rows, kLeastRows) * product.k) * product.effort;
  const double bytes = static_cast<double>(ceil_div(product.rows, kTileRows) * product.panel_bytes) / kThreadBytes;
  const double memory = bytes * std::max(1.0, static_cast<double>(threads) / kThreadsOfMemory);
  return std::max(compute, memory) + kNotHidden * std::min(compute, memory);
}

Grid choose_grid(const Product& product, int64_t threads) {
  if (product.panels == 0) return {1, 0};
  Grid best{0, 0};
  double least = 0;
  for (int64_t rows = std::min(threads, product.rows); rows >= 1; --rows) {
    const Grid grid{rows, std::min(threads / rows, product.panels)};
    const double time = estimate(product, grid, threads);
    if (best.rows == 0 || time < least) {
      best = grid;
      least = time;
    }
  }
  return best.rows == 0 ? Grid{1, std::min(threads, product.panels)} : best;
}

bool choose_by_rows(const Product (&products)[kLayerProducts], int64_t threads) {
  double by_rows = 0, by_grid = 0;
  for (const Product& product : products) {
    if (product.panels == 0) continue;
    if (product.rows < threads) return false;
    by_rows += estimate(product, {threads, 1}, threads);
    by_grid += kUneven * estimate(product, choose_grid(product, threads), threads) + kMeeting;
  }
  return by_rows <= by_grid;
}

// For tests: the grid of a product into grid[2], and the traffic of its weights.
PDS_API int64_t pds_choose_grid(const Product* product, int64_t threads, int64_t* grid) {
  const Grid chosen = choose_grid(*product, threads);
  grid[0] = chosen.rows;
  grid[1] = chosen.columns;
  return weight_traffic(*product, chosen);
}

PDS_API int32_t pds_choose_by_rows(const Product* products, int64_t threads) {
  const Product layer[kLayerProducts] = {products[0], products[1], products[2], products[3]};
  return choose_by_rows(layer, threads);
}

}  // namespace pdserve
