// Pairs of bytes, as keys and values of one byte lie in the pool, made into float32.
//   BytePairs           the first bytes of sixteen pairs, and the second ones
//   WideInt8, WideFp8E4M3, WideFp8E5M2   `widen(pairs)`: exact, up to a factor kUnit that the scales make good
//   store_pairs(out, pairs)   sixteen words of two bfloat16; exact where those are numbers of bfloat16
//   kMultipliesPairs    whether the level has products of such words
//
// An element of e4m3 is a float16 with its exponent and mantissa moved, and one of e5m2 is its upper byte: instructions that
// widen those know small numbers, too, whatever is done with denormal numbers otherwise.
#pragma once

#if defined(__AVX512F__)
#include "byte_pairs_avx512.h"
#else
#include "byte_pairs_avx2.h"
#endif

namespace pdserve {

#if defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

}  // namespace pdserve
