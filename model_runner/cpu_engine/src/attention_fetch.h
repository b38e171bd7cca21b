// Asks for the next tile's keys and values while the current one is computed.
//
// A page's tokens lie one after another, but pages lie anywhere, so the processor's own prefetcher starts anew at every
// page. Prefetch instructions bridge that, if they come a few at a time and in order of addresses: they are
// dropped when the core's queue of misses is full, and ordered ones make the prefetcher of the second-level cache help.
// A Zen 5 core read 21 GB/s of scattered pages of 6 KiB this way in a decode step, 12 in one burst a tile, 9 without.
#pragma once

#include <cstdint>

#include "attention_tile.h"
#include "sizes.h"

namespace pdserve {

class TileFetch {
 public:
  // Blocks of `bytes` of `heads` heads, a `head_stride` apart, from each of `count` places, in the order of the tile's
  // keys, and the same `second` bytes further on, where that is not 0.
  void begin(const char* base, const int64_t* offsets, int count, int64_t bytes, int heads, int64_t head_stride,
             int64_t second) {
    size_ = at_ = 0;
    for (int i = 0; i < count;) {
      const char* first = base + offsets[i];
      const char* end = first;
      for (; i < count && base + offsets[i] == end; ++i) end += bytes;
      if (end - first == head_stride) {
        add(first, heads * head_stride, second);  // a whole page: its heads are one piece
      } else {
        for (int head = 0; head < heads; ++head) add(first + head * head_stride, end - first, second);
      }
    }
  }

  // The next `lines` cache lines; always inlined, as it stands in inner loops.
  __attribute__((always_inline)) void fetch(int64_t lines) {
    while (lines > 0 && at_ < size_) {
      const char* next = runs_[at_].next;
      const char* end = runs_[at_].end;
      const char* stop = next + lines * kLine < end ? next + lines * kLine : end;
      lines -= ceil_div(stop - next, kLine);
      // The built-in has no effect that the compiler knows of: it drops calls of functions that do nothing else.
      for (; next < stop; next += kLine) asm volatile("prefetcht0 %0" ::"m"(*next));
      runs_[at_].next = next;
      at_ += next >= end;
    }
  }

 private:
  struct Run {
    const char* next;
    const char* end;
  };
  void add(const char* first, int64_t bytes, int64_t second) {
    if (size_ + 2 > kRuns) return;  // many heads of large pages: what is not asked for comes a little later
    runs_[size_++] = {first, first + bytes};
    if (second != 0) runs_[size_++] = {first + second, first + second + bytes};
  }

  static constexpr int kRuns = 2 * kTile;

  Run runs_[kRuns];
  int size_ = 0;
  int at_ = 0;
};

}  // namespace pdserve
