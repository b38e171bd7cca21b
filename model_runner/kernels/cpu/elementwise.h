// What happens to activations between the matrix products. Arithmetic is float32 whatever the type in memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace pdserve {

// out = x / rms(x) * weight over n elements, any n. The order of the sum depends on n alone.
template <class In, class Out>
void rms_norm(const In* x, const float* weight, float eps, int n, Out* out) {
  Vec squares = zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    squares = fma(v, v, squares);
  }
  float total = sum(squares);
  for (int j = i; j < n; ++j) total += to_float(x[j]) * to_float(x[j]);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (int j = 0; j < i; j += kLanes) store(out + j, load(x + j) * broadcast(scale) * load(weight + j));
  for (int j = i; j < n; ++j) out[j] = from_float<Out>(to_float(x[j]) * scale * weight[j]);
}

// Rotates one head in place: element i pairs with i + dim / 2. `cos` and `sin` hold dim / 2 values.
template <class T>
void rope(T* head, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = to_float(head[i]), b = to_float(head[half + i]);
    head[i] = from_float<T>(a * cos[i] - b * sin[i]);
    head[half + i] = from_float<T>(b * cos[i] + a * sin[i]);
  }
}

inline Vec silu(Vec x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

}  // namespace pdserve
