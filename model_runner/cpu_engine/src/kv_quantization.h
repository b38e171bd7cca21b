// Rounds heads of keys and values to elements of one byte and a scale, as model_runner/kv/quantization.py has it: the
// same bytes, so that a page may begin in one engine and go on in another.
//
// Plain loops over lanes, which the compiler makes vectors of at every level: divisions and roundings to the nearest, no
// products that it could fuse with a sum.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kv_blocks.h"

namespace pdserve {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr uint32_t kInfinityBits = 0x7f800000u;

// A type of elements: kLargest, and `round`, which takes sixteen numbers of at most that (or a hair above it).
struct Int8 {
  static constexpr float kLargest = 127.0f;

  static void round(Vec x, uint8_t* out) { store_int8(reinterpret_cast<int8_t*>(out), round_even(x)); }
};

// A sign, an exponent, and M bits of mantissa; numbers below 2^kLeast have fewer bits, at the distance of those above it.
template <int M, int kLeast>
struct Fp8 {
  static void round(Vec x, uint8_t* out) {
    // The addition rounds a small number to a whole number of steps: its last bit is one.
    constexpr uint32_t kSteps = static_cast<uint32_t>(127 + kLeast - M + 23) << 23;
    constexpr uint32_t kSmall = static_cast<uint32_t>(127 + kLeast) << 23, kCut = 23 - M;
    alignas(64) float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t bits = bits_of(lanes[i]), size = bits & 0x7fffffffu;
      const uint32_t small = bits_of(float_of(size) + float_of(kSteps)) - kSteps;
      const uint32_t half = (1u << (kCut - 1)) - 1 + ((size >> kCut) & 1);
      const uint32_t large = (size - kSmall + (1u << 23) + half) >> kCut;
      out[i] = static_cast<uint8_t>((bits >> 24 & 0x80u) | (size < kSmall ? small : large));
    }
  }
};

struct Fp8E4M3 : Fp8<3, -6> {
  static constexpr float kLargest = 448.0f;
};

struct Fp8E5M2 : Fp8<2, -14> {
  static constexpr float kLargest = 57344.0f;
};

// NaN where an element is no finite number; 0 where none is large enough to have a quotient.
template <class Codec, class T>
float scale_of(const T* head, int64_t dim) {
  uint32_t most[kLanes] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    alignas(64) float lanes[kLanes];
    store(lanes, load(head + d));
    // As whole numbers: their order is that of magnitudes, with NaN above all.
    for (int i = 0; i < kLanes; ++i) most[i] = std::max(most[i], bits_of(lanes[i]) & 0x7fffffffu);
  }
  const uint32_t largest = *std::max_element(most, most + kLanes);
  if (largest >= kInfinityBits) return std::numeric_limits<float>::quiet_NaN();
  const float scale = float_of(largest) / Codec::kLargest;
  return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
}

// `put(d, bytes)` takes the elements of dimensions [d, d + 16).
template <class Codec, class T, class Put>
float quantize(const T* head, int64_t dim, Put&& put) {
  const float scale = scale_of<Codec>(head, dim);
  alignas(64) uint8_t bytes[kLanes] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    if (scale > 0.0f) Codec::round(load(head + d) / broadcast(scale), bytes);
    put(d, bytes);
  }
  return scale;
}

inline void put_scale(uint8_t* block, int64_t dim, const SlotPlace& place, float scale) {
  std::memcpy(block + place.slots * dim + place.slot * sizeof scale, &scale, sizeof scale);
}

// A slot's key; `block` is the head's.
template <class Codec, class T>
void quantize_key(const T* head, int64_t dim, uint8_t* block, const SlotPlace& place) {
  const float scale = quantize<Codec>(head, dim, [&](int64_t d, const uint8_t* bytes) {
    uint8_t* out = block + (d / 2 * place.slots + place.slot) * 2;
    for (int i = 0; i < kLanes; i += 2) std::memcpy(out + i * place.slots, bytes + i, 2);
  });
  put_scale(block, dim, place, scale);
}

// A slot's value. Its neighbours' elements are left alone, also while other threads write them.
template <class Codec, class T>
void quantize_value(const T* head, int64_t dim, uint8_t* block, const SlotPlace& place) {
  const float scale = quantize<Codec>(head, dim, [&](int64_t d, const uint8_t* bytes) {
    if (place.slots == 1) {
      std::memcpy(block + d, bytes, kLanes);
      return;
    }
    uint8_t* out = block + (place.slot / 2 * dim + d) * 2 + place.slot % 2;
    for (int i = 0; i < kLanes; ++i) out[2 * i] = bytes[i];
  });
  put_scale(block, dim, place, scale);
}

}  // namespace pdserve
