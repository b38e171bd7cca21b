// The folder isa/ holds all that depends on the instruction set: a part NAME is one file for each way to write it,
// NAME_LEVEL.h, all with the same functions, and NAME.h, which includes the one for the level that is being compiled.
//
// This part: moves of 32-bit words and lanes that attention and the KV pool need.
//   kBlockVecs<R>       how many vectors of sums a block of R rows keeps in registers
//   low_halves(words), high_halves(words)   the lower or upper bfloat16 of sixteen words, as float32
//   store_every_second(out, x)   sixteen lanes, rounded, to every second place from `out` on; what lies between is left
//                       alone, also while another thread writes it
//   mask_keys(scores, key, visible)   lanes whose key is not below `visible` become minus infinity; the first lane's is `key`
//   mask_older_keys(scores, key, first)   the same of lanes whose key is below `first`
//   first_lane(x)
#pragma once

#if defined(__AVX512F__)
#include "words_avx512.h"
#else
#include "words_avx2.h"
#endif
