// Arithmetic on sizes that several kernels share.
#pragma once

#include <cstdint>

namespace pdserve {

constexpr int64_t kLine = 64;  // bytes of a line of the caches

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace pdserve
