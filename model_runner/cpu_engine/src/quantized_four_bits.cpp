// Products of 8-bit activations with blocks of 32 numbers of four bits.
#include "quantized_block.h"

namespace pdserve {

QuantizedBlock choose_four_bits(Format format, int rows) {
  switch (format) {
    case Format::kQ4_0: return choose_block<Format::kQ4_0>(rows);
    case Format::kQ4_1: return choose_block<Format::kQ4_1>(rows);
    default: return choose_block<Format::kIQ4_NL>(rows);
  }
}

}  // namespace pdserve
