// Numbers of weights as files have them, turned into those of the model: on all threads, each number by itself.
//
// All products of a block's scales and numbers but those of Q6_K are exact in float32. So it makes no difference whether
// the compiler fuses a product with the sum that follows.
#pragma once

#include <cstdint>

#include "linear.h"
#include "team.h"

namespace pdserve {

// Part of the interface to Python.
enum class FloatType : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,  // in files alone
};

// Rounds to the nearest, ties to even, where `to` is the narrower one. A NaN stays one.
void convert(FloatType from, const void* in, FloatType to, void* out, int64_t count, Team& team);

// The numbers of `count` blocks that lie one after another.
void dequantise(Format format, const uint8_t* blocks, int64_t count, FloatType to, void* out, Team& team);

}  // namespace pdserve
