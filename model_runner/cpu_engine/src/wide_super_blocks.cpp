// Products of 16-bit activations with blocks of 256 numbers.
#include "wide_block.h"

namespace pdserve {

WideBlock choose_wide_super_blocks(Format format) {
  switch (format) {
    case Format::kQ4_K: return &multiply_wide<Format::kQ4_K>;
    case Format::kQ5_K: return &multiply_wide<Format::kQ5_K>;
    default: return &multiply_wide<Format::kQ6_K>;
  }
}

}  // namespace pdserve
