// Products of 8-bit activations with blocks of 32 numbers of five and eight bits.
#include "quantized_block.h"

namespace pdserve {

QuantizedBlock choose_more_bits(Format format, int rows) {
  switch (format) {
    case Format::kQ5_0: return choose_block<Format::kQ5_0>(rows);
    case Format::kQ5_1: return choose_block<Format::kQ5_1>(rows);
    default: return choose_block<Format::kQ8_0>(rows);
  }
}

}  // namespace pdserve
