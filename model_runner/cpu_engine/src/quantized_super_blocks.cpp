// Products of 8-bit activations with the K-quants, blocks of 256 numbers.
#include "quantized_block.h"

namespace pdserve {

QuantizedBlock choose_super_blocks(Format format, int rows) {
  switch (format) {
    case Format::kQ4_K: return choose_block<Format::kQ4_K>(rows);
    case Format::kQ5_K: return choose_block<Format::kQ5_K>(rows);
    default: return choose_block<Format::kQ6_K>(rows);
  }
}

}  // namespace pdserve
