// Transposed blocks of sixteen keys, for values that lie as keys do (latent_values.h).
//   transpose_words(from, to, stride)   to[s * stride + i] = from[16 i + s], for 16 times 16 words
//   transpose_pairs(from, to, stride)   of 8 times 16 words of two halves: word i of row j, `stride` words apart, gets the
//                       lower halves of from[16 (i / 2) + 2 j] and the word after it, or where i is odd the upper ones
#pragma once

#if defined(__AVX512F__)
#include "transpose_avx512.h"
#else
#include "transpose_avx2.h"
#endif
