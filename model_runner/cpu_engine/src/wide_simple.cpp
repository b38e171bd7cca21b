// Products of 16-bit activations with blocks of 32 numbers.
#include "wide_block.h"

namespace pdserve {

WideBlock choose_wide_simple(Format format) {
  switch (format) {
    case Format::kQ4_0: return &multiply_wide<Format::kQ4_0>;
    case Format::kQ4_1: return &multiply_wide<Format::kQ4_1>;
    case Format::kIQ4_NL: return &multiply_wide<Format::kIQ4_NL>;
    case Format::kQ5_0: return &multiply_wide<Format::kQ5_0>;
    case Format::kQ5_1: return &multiply_wide<Format::kQ5_1>;
    default: return &multiply_wide<Format::kQ8_0>;
  }
}

}  // namespace pdserve
