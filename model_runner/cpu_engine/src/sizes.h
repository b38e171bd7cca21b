// Sizes, and ranges of things that threads share out.
#pragma once

#include <cstdint>

namespace pdserve {

constexpr int64_t kLine = 64;  // bytes of a line of the caches

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part `index` of `parts` of about equal size.
inline Range share(int64_t total, int64_t index, int64_t parts) {
  return {total * index / parts, total * (index + 1) / parts};
}

}  // namespace pdserve
