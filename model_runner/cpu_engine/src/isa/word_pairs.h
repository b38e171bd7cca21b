// PairWords, as word_products.h has it: products with words that are pairs of bfloat16.
#pragma once

#if defined(__AVX512BF16__)
#include "word_pairs_avx512bf16.h"
#else
#include "word_pairs_wide.h"
#endif
