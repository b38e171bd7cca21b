#include "packing.h"

#include <algorithm>
#include <utility>

#include "panel_packer.h"
#include "simd.h"
#include "sizes.h"

namespace pdserve {
namespace {

// Of the network, or of the expert.
int64_t inner_size(const EngineConfig& c, const LinearPlace& place) {
  const LayerOps& ops = c.ops[place.layer];
  const bool shared = ops.experts.count != 0 && place.expert == ops.experts.count;
  return shared ? ops.experts.shared_inner : ops.gate_up.inner;
}

int64_t input_size(const EngineConfig& c, const LinearPlace& place) {
  switch (place.kind) {
    case LinearKind::kO: return c.attended();
    case LinearKind::kQB: return c.latent.q_rank;
    case LinearKind::kKB: return c.latent.nope_dim;
    case LinearKind::kVB: return c.latent.kv_rank;
    case LinearKind::kDown: return inner_size(c, place);
    default: return c.hidden;
  }
}

class Order {
 public:
  void run(int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) rows_.push_back(static_cast<int32_t>(first + i));
  }

  void pad(int64_t multiple) { rows_.resize(round_up(static_cast<int64_t>(rows_.size()), multiple), -1); }

  std::vector<int32_t> take() { return std::move(rows_); }

 private:
  std::vector<int32_t> rows_;
};

void order_qkv(const EngineConfig& c, bool fused, Order& order) {
  const int64_t rotated = fused ? c.heads + c.kv_heads : 0, half = c.head_dim / 2;
  for (int64_t h = 0; h < rotated; ++h) {
    for (int64_t i = 0; i < half; i += kLanes) {
      order.run(h * c.head_dim + i, kLanes);
      order.run(h * c.head_dim + half + i, kLanes);
    }
  }
  order.run(rotated * c.head_dim, (c.heads + 2 * c.kv_heads - rotated) * c.head_dim);
}

// The row begins at a panel's border, so that its format may be another.
void order_latent(const EngineConfig& c, Order& order) {
  const int64_t queries = c.latent.q_rank != 0 ? c.latent.q_rank : c.heads * c.latent.qk_dim();
  order.run(0, queries);
  order.pad(kPanel);
  order.run(queries, c.head_dim);
}

// A gate and its product lie in one panel, so that its finish can multiply them.
void order_gate_up(int64_t inner, Order& order) {
  for (int64_t i = 0; i < inner; i += kLanes) {
    for (int64_t first : {int64_t{0}, inner}) {
      order.run(first + i, std::min<int64_t>(kLanes, inner - i));
      order.pad(kLanes);
    }
  }
}

}  // namespace

bool is_fused(const EngineConfig& c, DType dtype, int64_t layer) {
  const bool whole_panels = c.head_dim % kPanel == 0 && c.pool.dtype == dtype;
  return !c.is_latent() && whole_panels && c.ops[layer].qkv.qk_norm == QKNorm::kNone;
}

LinearShape linear_shape(const EngineConfig& c, DType dtype, const LinearPlace& place) {
  Order order;
  switch (place.kind) {
    case LinearKind::kQKV:
      c.is_latent() ? order_latent(c, order) : order_qkv(c, is_fused(c, dtype, place.layer), order);
      break;
    case LinearKind::kQB: order.run(0, c.heads * c.latent.qk_dim()); break;
    case LinearKind::kKB: order.run(0, c.latent.kv_rank); break;
    case LinearKind::kVB: order.run(0, c.latent.value_dim); break;
    case LinearKind::kGateUp: order_gate_up(inner_size(c, place), order); break;
    case LinearKind::kHead: order.run(0, c.head_rows); break;
    case LinearKind::kRouter: order.run(0, c.ops[place.layer].experts.rows()); break;
    default: order.run(0, c.hidden); break;
  }
  order.pad(kPanel);
  return {input_size(c, place), order.take()};
}

template <class T>
bool arrange_linear(const LinearShape& shape, const std::vector<WeightPart>& parts, const uint8_t* panels,
                    PackedLinear& packed) {
  packed.k = shape.k;
  packed.effort = parts[0].format == Format::kDense ? dense_effort<T>() : quantized_effort(packed.activations);
  return PanelPacker<T>(parts, shape.rows, packed.k).arrange(packed, [&](size_t) { return panels; });
}

template bool arrange_linear<bf16>(const LinearShape&, const std::vector<WeightPart>&, const uint8_t*, PackedLinear&);
template bool arrange_linear<float>(const LinearShape&, const std::vector<WeightPart>&, const uint8_t*, PackedLinear&);

namespace {

template <class T>
void pack_panels(const LinearShape& shape, const std::vector<WeightPart>& parts, uint8_t* panels, Team& team) {
  PackedLinear packed;
  arrange_linear<T>(shape, parts, panels, packed);
  const PanelPacker<T> packer(parts, shape.rows, packed.k);
  team.run([&](int tid, int size) {
    const Range own = share(packed.panels, tid, size);
    for (int64_t p = own.begin; p < own.end; ++p) packer.pack(packed, p);
  });
}

}  // namespace

bool WeightPacker::is_bf16(const LinearPlace& place) const {
  return dtype_ == DType::kBFloat16 && place.kind != LinearKind::kRouter;
}

bool WeightPacker::size(const LinearPlace& place, const std::vector<WeightPart>& parts, Size& size) const {
  const LinearShape shape = linear_shape(config_, dtype_, place);
  PackedLinear packed;
  const bool fits = is_bf16(place) ? arrange_linear<bf16>(shape, parts, nullptr, packed)
                                   : arrange_linear<float>(shape, parts, nullptr, packed);
  size = {packed.bytes(0, packed.panels), static_cast<int64_t>(shape.rows.size())};
  return fits;
}

void WeightPacker::pack(const LinearPlace& place, const std::vector<WeightPart>& parts, const float* bias,
                        uint8_t* panels, float* packed_bias) const {
  const LinearShape shape = linear_shape(config_, dtype_, place);
  const auto pack_as = is_bf16(place) ? pack_panels<bf16> : pack_panels<float>;
  pack_as(shape, parts, panels, team_);
  if (bias == nullptr) return;
  for (int32_t row : shape.rows) *packed_bias++ = row < 0 ? 0.0f : bias[row];
}

}  // namespace pdserve
