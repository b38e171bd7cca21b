// Brings blocks as they lie in a GGUF file into panels.
#include <cstring>

#include "linear_quantized.h"
#include "quantized_file.h"

namespace pdserve {
namespace {

// A run's numbers into column c of its half of the panel.
void write_numbers(const BlockShape& s, const uint8_t* number, int c, uint8_t* numbers) {
  for (int i = 0; i < kRun; ++i) {
    const int g = i / 4, v = g % 4, q = number[i];
    uint8_t* byte = numbers + c * 4 + i % 4;
    if (s.bits == 8 && !s.looked_up) {
      byte[g * kGroupBytes] = static_cast<uint8_t>(q);
      continue;
    }
    byte[v * kGroupBytes] |= static_cast<uint8_t>((q & 15) << (g / 4 * 4));
    if (s.bits == 5) byte[4 * kGroupBytes] |= static_cast<uint8_t>((q >> 4) << g);
    if (s.bits == 6) byte[(4 + g / 4) * kGroupBytes] |= static_cast<uint8_t>((q >> 4) << (v * 2));
  }
}

}  // namespace

size_t quantized_panel_bytes(Format format, int64_t k) {
  const BlockShape s = block_shape(format);
  return static_cast<size_t>(k / (s.runs * kRun)) * static_cast<size_t>(step_bytes(s));
}

void pack_quantized_panel(Format format, int64_t k, const uint8_t* const* columns, uint8_t* panel) {
  const BlockShape s = block_shape(format);
  std::memset(panel, 0, quantized_panel_bytes(format, k));
  const int64_t steps = k / (s.runs * kRun);
  for (int64_t step = 0; step < steps; ++step, panel += step_bytes(s)) {
    for (int c = 0; c < kPanel; ++c) {
      if (columns[c] == nullptr) continue;
      const uint8_t* block = columns[c] + step * s.file_bytes;
      for (int i = 0; i < s.halves; ++i) std::memcpy(panel + (i * kPanel + c) * 2, halves_of(format, block) + i * 2, 2);
      for (int run = 0; run < s.runs; ++run) {
        uint8_t* to = panel + header_bytes(s) + run * packed_run_bytes(s);
        const FileRun from = read_run(format, block, run);
        for (int i = 0; i < s.run_bytes; ++i) to[i * kPanel + c] = from.header[i];
        write_numbers(s, from.number, c % kHalf, to + s.run_bytes * kPanel + c / kHalf * half_numbers(s));
      }
    }
  }
}

}  // namespace pdserve
