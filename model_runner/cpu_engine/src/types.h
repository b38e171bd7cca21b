// bfloat16 beside float, for kernels that are templates over the type of the activations.
#pragma once

#include <cstdint>
#include <cstring>

namespace pdserve {

// The upper half of a float32.
struct bf16 {
  uint16_t bits;
};

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline float to_float(float value) { return value; }

// Rounds to the nearest, ties to even; a NaN stays one.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  bits += 0x7fffu + ((bits >> 16) & 1);
  return {static_cast<uint16_t>(bits >> 16)};
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline bf16 from_float<bf16>(float value) {
  return to_bf16(value);
}

// Whole numbers that activations are rounded to where weights are quantised; part of the interface to Python.
enum class ActivationDType : int32_t {
  kInt16 = 0,
  kInt8 = 1,
};

}  // namespace pdserve
