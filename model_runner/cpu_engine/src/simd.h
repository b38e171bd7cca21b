// Sixteen float32 lanes, and the few operations that the kernels need.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "isa/vec.h"

namespace pdserve {

// x = n ln 2 + r; `p`: e^r = 1 + r + r² p.
struct PowerParts {
  Vec n, r, p;
};

inline PowerParts power_parts(Vec x) {
  const Vec n = round_even(x * broadcast(1.44269504088896341f));
  // x - n ln 2, with ln 2 in two parts so that nothing is lost.
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return {n, r, p};
}

// e^x to about one unit in the last place of a float32; 0 below -87 and no overflow before 88.
inline Vec exp(Vec x) {
  x = max(min(x, broadcast(88.3762626647949f)), broadcast(-104.0f));
  const PowerParts e = power_parts(x);
  return scale_by_power(fma(e.p, e.r * e.r, e.r + broadcast(1.0f)), e.n);
}

// Near for small x too: (e^2x - 1) / (e^2x + 1), with e^2x - 1 = 2^n (e^r - 1) + (2^n - 1).
inline Vec tanh(Vec x) {
  const Vec twice = x + x;
  const PowerParts e = power_parts(max(broadcast(-20.0f), min(broadcast(20.0f), twice)));
  const Vec power = scale_by_power(broadcast(1.0f), e.n);
  const Vec less_one = fma(fma(e.p, e.r * e.r, e.r), power, power - broadcast(1.0f));
  return less_one / (less_one + broadcast(2.0f));
}

}  // namespace pdserve
