// Numbers below the smallest normal one count as 0 while this lives, on the thread that made it.
//
// Softmax weights far below the largest are such numbers, and masked keys' weights end there too. Intel's processors
// leave their fast path for each one that an instruction takes or gives: on a Cascade Lake core a prefill of 512 tokens
// took 1.2 times as long for the masked keys alone, and 57 times where most weights were denormal. Products of pairs of
// bfloat16 have always treated them as 0. What they could add to a sum of weights, which is 1 at least, is nothing.
#pragma once

#include <immintrin.h>

namespace pdserve {

class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(before_); }

  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
  const unsigned before_;
};

}  // namespace pdserve
