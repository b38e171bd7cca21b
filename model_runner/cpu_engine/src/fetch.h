// How weights are fetched ahead of the products that use them.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pdserve {

// Part of the interface to Python.
enum class FetchHint : int32_t { kAllCaches = 0, kNonTemporal = 1 };

// The hint that products use: what suits this processor, unless `set_fetch_hint` chose another.
FetchHint fetch_hint();

// For tests and measurements: products give the same bits with either, at other speeds.
void set_fetch_hint(FetchHint hint);

// How far ahead of their use blocks of few rows ask for bytes. What lies in the nearest cache until then takes the place
// of activations, where the hint puts it there: on Cascade Lake 4 kB are 4 % faster than 12 for one row and for eight.
// Non-temporal, 12 kB were best (Zen 5).
inline int64_t bytes_ahead() { return fetch_hint() == FetchHint::kNonTemporal ? 12288 : 4096; }

template <FetchHint H>
inline void fetch(const void* p) {
  if constexpr (H == FetchHint::kNonTemporal) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA);
  } else {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }
}

}  // namespace pdserve
