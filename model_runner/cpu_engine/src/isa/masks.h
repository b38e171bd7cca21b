// Masks of sixteen lanes, a bit each, and what sampling does by them:
//   at_least(a, b)         lanes where a >= b
//   not_a_number(a)
//   where(mask, a)         lanes of the mask, 0 elsewhere
//   add_where(mask, a, b)  a + b in lanes of the mask, a elsewhere
#pragma once

#if defined(__AVX512F__)
#include "masks_avx512.h"
#else
#include "masks_avx2.h"
#endif
