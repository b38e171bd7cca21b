#include "rotations.h"

#include <cmath>

#include "sizes.h"

namespace pdserve {
namespace {

struct Turn {
  double cosine, sine;
};

// a - k pi / 2 lies within pi / 4 of 0. Its sine and cosine are Taylor's polynomials, whose rest is below 2^-53 there.
inline Turn turn(double a) {
  const double k = std::rint(a * 0.63661977236758134308);
  // pi / 2 in two parts. The first product is exact within the fused operation.
  double r = std::fma(k, -1.5707963267948965580, a);
  r = std::fma(k, -6.1232339957367658861e-17, r);
  const double s = r * r;
  double sine = 1.0 / 355687428096000.0;
  sine = std::fma(sine, s, -1.0 / 1307674368000.0);
  sine = std::fma(sine, s, 1.0 / 6227020800.0);
  sine = std::fma(sine, s, -1.0 / 39916800.0);
  sine = std::fma(sine, s, 1.0 / 362880.0);
  sine = std::fma(sine, s, -1.0 / 5040.0);
  sine = std::fma(sine, s, 1.0 / 120.0);
  sine = std::fma(sine, s, -1.0 / 6.0);
  sine = std::fma(r * s, sine, r);
  double cosine = 1.0 / 20922789888000.0;
  cosine = std::fma(cosine, s, -1.0 / 87178291200.0);
  cosine = std::fma(cosine, s, 1.0 / 479001600.0);
  cosine = std::fma(cosine, s, -1.0 / 3628800.0);
  cosine = std::fma(cosine, s, 1.0 / 40320.0);
  cosine = std::fma(cosine, s, -1.0 / 720.0);
  cosine = std::fma(cosine, s, 1.0 / 24.0);
  cosine = std::fma(cosine, s, -0.5);
  cosine = std::fma(cosine, s, 1.0);
  // Each quarter of a turn swaps the two, and negates what was the sine.
  const int32_t quarter = static_cast<int32_t>(k);
  const double x = quarter & 1 ? -sine : cosine, y = quarter & 1 ? cosine : sine;
  return quarter & 2 ? Turn{-x, -y} : Turn{x, y};
}

}  // namespace

void fill_rotations(const float* frequencies, const float* scales, int64_t pairs, int64_t positions, float* cosines,
                    float* sines, Team& team) {
  team.run([&](int tid, int size) {
    const Range own = share(positions, tid, size);
    for (int64_t p = own.begin; p < own.end; ++p) {
      const float position = static_cast<float>(p);
      float *cosine = cosines + p * pairs, *sine = sines + p * pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const float angle = position * frequencies[i];
        const Turn turned = turn(angle);
        cosine[i] = static_cast<float>(turned.cosine) * scales[i];
        sine[i] = static_cast<float>(turned.sine) * scales[i];
      }
    }
  });
}

}  // namespace pdserve
