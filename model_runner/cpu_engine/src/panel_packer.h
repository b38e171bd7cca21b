// Puts the parts of a weight, each in its own format, into the panels of one linear layer.
#pragma once

#include <utility>
#include <vector>

#include "engine.h"
#include "linear_quantized.h"

namespace pdserve {

// Made for one weight, in whose order `rows` names a row for each column of the panels, or -1 for none.
template <class T>
class PanelPacker {
 public:
  PanelPacker(const std::vector<WeightPart>& parts, const std::vector<int32_t>& rows, int64_t k)
      : parts_(parts), rows_(rows), k_(k) {}

  // Fills in panels and segments, with memory from `allocate(bytes)`, in one piece: panels are fetched across the border
  // of segments. False where a panel has columns of two formats, or segments are dense and not.
  template <class Allocate>
  bool arrange(PackedLinear& packed, Allocate&& allocate) const {
    packed.panels = static_cast<int64_t>(rows_.size()) / kPanel;
    packed.used = 0;
    size_t bytes = 0;
    for (int64_t p = 0; p < packed.panels; ++p) {
      const Format format = part_of(rows_[p * kPanel]).first->format;
      for (int c = 0; c < kPanel; ++c) {
        const int32_t row = rows_[p * kPanel + c];
        if (row >= 0 && part_of(row).first->format != format) return false;
      }
      if (packed.used == 0 || packed.segments[packed.used - 1].format != format) {
        if (packed.used == PackedLinear::kSegments) return false;
        packed.segments[packed.used++] = {format, p, panel_bytes(format), nullptr};
      }
      bytes += panel_bytes(format);
    }
    for (int i = 1; i < packed.used; ++i) {
      if ((packed.segments[i].format == Format::kDense) != (packed.segments[0].format == Format::kDense)) return false;
    }
    const uint8_t* next = allocate(bytes);
    for (int i = 0; i < packed.used; ++i) {
      Segment& segment = packed.segments[i];
      segment.data = next;
      next += ((i + 1 < packed.used ? packed.segments[i + 1].begin : packed.panels) - segment.begin) * segment.panel_bytes;
    }
    return true;
  }

  void pack(const PackedLinear& packed, int64_t panel) const {
    const Segment& segment = packed.of(panel);
    uint8_t* out = const_cast<uint8_t*>(segment.panel(panel));
    if (segment.format == Format::kDense) {
      // A dense weight is one part.
      pack_dense_panel(static_cast<const T*>(parts_[0].data), k_, &rows_[panel * kPanel], reinterpret_cast<T*>(out));
      return;
    }
    const BlockShape s = block_shape(segment.format);
    const int64_t file_row = k_ / (s.runs * kRun) * s.file_bytes;
    const uint8_t* columns[kPanel];
    for (int c = 0; c < kPanel; ++c) {
      const int32_t row = rows_[panel * kPanel + c];
      if (row < 0) {
        columns[c] = nullptr;
        continue;
      }
      const auto [part, at] = part_of(row);
      columns[c] = static_cast<const uint8_t*>(part->data) + at * file_row;
    }
    pack_quantized_panel(segment.format, k_, columns, out);
  }

 private:
  // The part that holds a row, and the row's place in it.
  std::pair<const WeightPart*, int64_t> part_of(int64_t row) const {
    const WeightPart* part = parts_.data();
    while (row >= part->rows) row -= part++->rows;
    return {part, row};
  }

  size_t panel_bytes(Format format) const {
    return format == Format::kDense ? dense_panel_bytes<T>(k_) : quantized_panel_bytes(format, k_);
  }

  const std::vector<WeightPart>& parts_;
  const std::vector<int32_t>& rows_;
  const int64_t k_;
};

}  // namespace pdserve
