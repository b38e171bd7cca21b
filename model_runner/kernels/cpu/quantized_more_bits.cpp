// Products with blocks of 32 numbers of five and eight bits.
#include "quantized_block.h"

namespace pdserve {

QuantizedBlock choose_more_bits(Format format, ActivationDType dtype, int rows) {
  switch (format) {
    case Format::kQ5_0: return choose_block<Format::kQ5_0>(dtype, rows);
    case Format::kQ5_1: return choose_block<Format::kQ5_1>(dtype, rows);
    default: return choose_block<Format::kQ8_0>(dtype, rows);
  }
}

}  // namespace pdserve
