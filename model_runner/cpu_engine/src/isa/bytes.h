// Products of bytes and of words: what the kernels of quantised weights need of an instruction set.
//
// Weights are widened by an instruction each: words of bytes 0 and 2 of a column (even_bytes), and of bytes 1 and 3. 32
// products of 255 * 32767 fit into 31 bits: a run of them needs no other sums.
#pragma once

#if defined(__AVX512BW__)
#include "bytes_avx512.h"
#else
#include "bytes_avx2.h"
#endif

namespace pdserve {

#if defined(PDSERVE_DOT_PRODUCTS)

// sums[m] + the products of `Count` groups of weights, of at most `Bits` bits, with as many times four activations of
// each of `Rows` rows, in whole numbers: exact on every processor. From q[m * stride] on.
//
// A product of one row waits for the one before it. The rows take turns: as many wait as the multipliers have stages,
// where a row after the other would fill the processor's window with products that can't begin.
template <int Bits, int Count, int Rows>
inline void dot(Ints* sums, const Bytes* w, const int8_t* q, int64_t stride) {
#pragma GCC unroll 8
  for (int g = 0; g < Count; ++g) {
#pragma GCC unroll 16
    for (int m = 0; m < Rows; ++m) sums[m] = multiply_add(sums[m], w[g], q + m * stride + g * 4);
  }
}

#else

// sum + the products of one row.
template <int Bits, int Count>
inline Ints dot(Ints sum, const Bytes* w, const int8_t* q) {
  if constexpr (Bits == 8) {
    // 255 * 127 + 255 * 127 is too much for 16 bits: the upper four bits by themselves, and the lower.
    Bytes part[Count];
#pragma GCC unroll 8
    for (int g = 0; g < Count; ++g) part[g] = high_nibbles(w[g]);
    const Ints high = dot<4, Count>(spread(0), part, q);
#pragma GCC unroll 8
    for (int g = 0; g < Count; ++g) part[g] = low_nibbles(w[g]);
    return dot<4, Count>(sum + shift_left<4>(high), part, q);
  } else {
    // As many groups as 16 bits can hold: 8 * 2 * 15 * 127 < 2^15, and so on.
    constexpr int kSafe = Bits == 4 ? 8 : Bits == 5 ? 4 : 2, kStep = kSafe < Count ? kSafe : Count;
#pragma GCC unroll 8
    for (int g = 0; g < Count; g += kStep) {
      Words words = multiply(w[g], four_bytes(q + g * 4));
#pragma GCC unroll 8
      for (int i = g + 1; i < g + kStep; ++i) words = words + multiply(w[i], four_bytes(q + i * 4));
      sum = sum + add_pairs(words);
    }
    return sum;
  }
}

// The same as with products of four, above.
template <int Bits, int Count, int Rows>
inline void dot(Ints* sums, const Bytes* w, const int8_t* q, int64_t stride) {
#pragma GCC unroll 16
  for (int m = 0; m < Rows; ++m) sums[m] = dot<Bits, Count>(sums[m], w, q + m * stride);
}

#endif

}  // namespace pdserve
