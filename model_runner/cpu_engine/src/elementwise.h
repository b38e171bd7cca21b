// What happens to activations between the matrix products. Arithmetic is float32 whatever the type in memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace pdserve {

// 1 / rms(x) over n elements, any n. The order of the sum depends on n alone.
template <class In>
float inverse_rms(const In* x, float eps, int n) {
  Vec squares = zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i);
    squares = fma(v, v, squares);
  }
  float total = sum(squares);
  for (int j = i; j < n; ++j) total += to_float(x[j]) * to_float(x[j]);
  return 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
}

// out = x / rms(x) * weight.
template <class In, class Out>
void rms_norm(const In* x, const float* weight, float eps, int n, Out* out) {
  const float scale = inverse_rms(x, eps, n);
  const int i = n / kLanes * kLanes;
  for (int j = 0; j < i; j += kLanes) store(out + j, load(x + j) * broadcast(scale) * load(weight + j));
  for (int j = i; j < n; ++j) out[j] = from_float<Out>(to_float(x[j]) * scale * weight[j]);
}

// x += scale * y / rms(y) * weight.
inline void add_rms_norm(const float* y, const float* weight, float eps, float scale, int n, float* x) {
  const float inverse = inverse_rms(y, eps, n);
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    store(x + i, fma(load(y + i) * broadcast(inverse) * load(weight + i), broadcast(scale), load(x + i)));
  }
  for (int i = whole; i < n; ++i) x[i] = std::fma(y[i] * inverse * weight[i], scale, x[i]);
}

template <class In, class Out>
void copy_row(const In* x, int n, Out* out) {
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) store(out + i, load(x + i));
  for (int i = whole; i < n; ++i) out[i] = from_float<Out>(to_float(x[i]));
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

// x sigmoid(slope x).
inline Vec swish(Vec x, float slope) { return x / (broadcast(1.0f) + exp(broadcast(-slope) * x)); }

inline Vec silu(Vec x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

// x / 2 (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), is x over 1 + e^-2u: no difference of near numbers.
inline Vec gelu_tanh(Vec x) {
  const Vec u = x * fma(x * x, broadcast(-2 * 0.7978845608f * 0.044715f), broadcast(-2 * 0.7978845608f));
  return x / (broadcast(1.0f) + exp(u));
}

// x / 2 (1 + erf(x / sqrt 2)) = max(x, 0) - |x| / 2 erfc(|x| / sqrt 2), which is as near for large negative x as for
// others. erfc(z) = e^-z² t P(t) with t = 1 / (1 + 0.33 z), P of degree 7 fitted to 1.2e-7 for z up to 10.5.
inline Vec gelu(Vec x) {
  // Beyond 15 erfc is too small for a float32, and the square of what is far beyond would have no rest.
  const Vec size = min(abs(x), broadcast(15.0f));
  const Vec t = broadcast(1.0f) / fma(size, broadcast(0.33f * 0.7071067812f), broadcast(1.0f));
  Vec p = broadcast(-1.3447237e-1f);
  p = fma(p, t, broadcast(4.5656887e-1f));
  p = fma(p, t, broadcast(-3.4474314e-1f));
  p = fma(p, t, broadcast(4.0248341e-1f));
  p = fma(p, t, broadcast(5.0494405e-2f));
  p = fma(p, t, broadcast(2.0019399e-1f));
  p = fma(p, t, broadcast(1.8312909e-1f));
  p = fma(p, t, broadcast(1.8634582e-1f));
  // z² = x² / 2, with what the square loses of it: e^-z² would multiply that error by z².
  const Vec square = size * size, rest = fma(size, size, zero() - square);
  const Vec power = exp(square * broadcast(-0.5f)) * fma(rest, broadcast(-0.5f), broadcast(1.0f));
  // The order of the operands lets a NaN through.
  return fma(size * broadcast(-0.5f) * t, p * power, max(zero(), x));
}

}  // namespace pdserve
