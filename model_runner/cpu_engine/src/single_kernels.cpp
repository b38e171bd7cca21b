// Kernels one by one, on the calling thread, for tests and micro-benchmarks; a pass calls them from engine.cpp.
#include <algorithm>
#include <numeric>
#include <vector>

#include "api.h"
#include "elementwise.h"
#include "linear_quantized.h"
#include "panel_packer.h"

namespace pdserve {
namespace {

template <class T>
void multiply(Format format, ActivationDType activations, const uint8_t* packed, int64_t panels, int64_t k, const T* a, int64_t stride, int64_t rows,
              float* out) {
  const bool dense = format == Format::kDense;
  const size_t panel_bytes = dense ? dense_panel_bytes<T>(k) : quantized_panel_bytes(format, k);
  std::vector<QuantizedRun> runs(dense ? 0 : rows * (k / kRun));
  const QuantizedRows quantized{runs.data(), k, rows, activations};
  if (!dense) quantize_rows(a, stride, quantized);
  std::vector<float> wide(dense ? rows * dense_scratch_stride(k) : 0);
  const DenseRows prepared = dense ? prepare_dense(a, stride, rows, k, wide.data()) : DenseRows{};
  const int64_t most = dense ? kTileRows : kMaxRows, blocks = ceil_div(rows, most);
  alignas(64) float tile[kTileRows * kPanel];
  for (int64_t p = 0; p < panels; ++p) {
    const uint8_t* panel = packed + p * panel_bytes;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = rows * b / blocks, end = rows * (b + 1) / blocks;
      const int count = static_cast<int>(end - begin);
      if (dense) {
        multiply_dense_panel(prepared.from(begin), count, reinterpret_cast<const T*>(panel), k, tile);
      } else {
        multiply_quantized_panel(format, quantized, begin, count, panel, stream_of(panel_bytes, b, blocks), tile);
      }
      for (int i = 0; i < count; ++i) {
        std::copy_n(tile + i * kPanel, kPanel, out + ((begin + i) * panels + p) * kPanel);
      }
    }
  }
}

template <class T>
void pack(Format format, const void* weight, int64_t n, int64_t k, uint8_t* packed) {
  const int64_t panels = (n + kPanel - 1) / kPanel;
  std::vector<int32_t> rows(panels * kPanel, -1);
  std::iota(rows.begin(), rows.begin() + n, 0);
  const std::vector<WeightPart> parts{{weight, n, format}};
  const PanelPacker<T> packer(parts, rows, k);
  PackedLinear layout;
  layout.k = k;
  packer.arrange(layout, [&](size_t) { return packed; });
  for (int64_t p = 0; p < panels; ++p) packer.pack(layout, p);
}

template <class T>
void normalise(const T* x, const float* weight, float eps, int64_t rows, int64_t n, T* out) {
  for (int64_t i = 0; i < rows; ++i) rms_norm(x + i * n, weight, eps, static_cast<int>(n), out + i * n);
}

}  // namespace

// Bytes of a packed weight [n, k]; dtype is that of activations, and of a dense weight.
PDS_API int64_t pds_packed_bytes(int32_t bf16_activations, int32_t format, int64_t n, int64_t k) {
  const auto kind = static_cast<Format>(format);
  const size_t dense = bf16_activations ? dense_panel_bytes<bf16>(k) : dense_panel_bytes<float>(k);
  return (n + kPanel - 1) / kPanel * (kind == Format::kDense ? dense : quantized_panel_bytes(kind, k));
}

PDS_API void pds_pack(int32_t bf16_activations, int32_t format, const void* weight, int64_t n, int64_t k, void* packed) {
  const auto pack_as = bf16_activations ? pack<bf16> : pack<float>;
  pack_as(static_cast<Format>(format), weight, n, k, static_cast<uint8_t*>(packed));
}

// out [rows, n rounded up to kPanel] float32.
PDS_API void pds_multiply(int32_t bf16_activations, int32_t format, int32_t activations, const void* packed, int64_t n, int64_t k,
                          const void* a, int64_t stride, int64_t rows, float* out) {
  const auto kind = static_cast<Format>(format);
  const auto dtype = static_cast<ActivationDType>(activations);
  const auto* bytes = static_cast<const uint8_t*>(packed);
  const int64_t panels = (n + kPanel - 1) / kPanel;
  if (bf16_activations) {
    multiply(kind, dtype, bytes, panels, k, static_cast<const bf16*>(a), stride, rows, out);
  } else {
    multiply(kind, dtype, bytes, panels, k, static_cast<const float*>(a), stride, rows, out);
  }
}

PDS_API void pds_rms_norm(int32_t bf16_activations, const void* x, const float* weight, float eps, int64_t rows,
                          int64_t n, void* out) {
  if (bf16_activations) {
    normalise(static_cast<const bf16*>(x), weight, eps, rows, n, static_cast<bf16*>(out));
  } else {
    normalise(static_cast<const float*>(x), weight, eps, rows, n, static_cast<float*>(out));
  }
}

PDS_API void pds_rope(int32_t bf16_activations, void* heads, const float* cos, const float* sin, int64_t count,
                      int64_t dim) {
  for (int64_t i = 0; i < count; ++i) {
    if (bf16_activations) {
      rope(static_cast<bf16*>(heads) + i * dim, cos, sin, static_cast<int>(dim));
    } else {
      rope(static_cast<float*>(heads) + i * dim, cos, sin, static_cast<int>(dim));
    }
  }
}

// out[i] = f(x[i]), by `kind`: 0 to 2 those of Activation, 3 tanh; n is a multiple of kLanes.
PDS_API void pds_activate(int32_t kind, const float* x, int64_t n, float* out) {
  constexpr Vec (*functions[])(Vec) = {silu, gelu, gelu_tanh, tanh};
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, functions[kind](load(x + i)));
}

}  // namespace pdserve
