// How the threads of a team divide the linear layers of a pass among themselves.
//
// A product's rows (tokens) are cut into groups and so are its columns (panels of weights); each thread computes one
// cell of that grid. Every group of rows reads all of the weights, so more of them cost traffic: on 16 threads, 64 tokens
// in groups of 4 would read the weights 16 times. More groups of columns make the threads read the same activations, and
// leave some of them idle where there are few panels.
//
// Where every thread has a group of rows of its own, it can take them through a whole layer without meeting the others:
// a pass by rows.
//
// Pure functions of their arguments: nothing here knows the machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sizes.h"

namespace pdserve {

struct Product {
  int64_t rows, panels, k;
  int64_t panel_bytes;
  double effort;  // cycles of a thread for a row times a panel, for each k
};

struct Grid {
  int64_t rows, columns;  // groups of each; rows * columns threads work
};

struct Cell {
  Range rows, panels;  // both empty for a thread that has no part
};

Cell cell_of(const Product& product, Grid grid, int64_t tid);

// Bytes of weights that all threads together read: every group of rows all of them, once for each kTileRows rows.
int64_t weight_traffic(const Product& product, Grid grid);

// The time that a product takes, in cycles or so: of its slowest thread, or of memory.
double estimate(const Product& product, Grid grid, int64_t threads);

// What one panel costs a thread, beside so many others.
double panel_cost(const Product& product, int64_t threads);

// The grid of the least estimate; of equal ones, that with more groups of rows.
Grid choose_grid(const Product& product, int64_t threads);

constexpr int kLayerProducts = 4;

// Whether a pass whose layers are made of these products is better done by rows: without a meeting after each of them.
// Products without panels are none.
bool choose_by_rows(const Product (&products)[kLayerProducts], int64_t threads);

}  // namespace pdserve
