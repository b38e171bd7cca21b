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

LinearShape linear_shape(const EngineConfig& c, const LinearPlace& place, bool fused) {
  Order order;
  switch (place.kind) {
    case LinearKind::kQKV: c.is_latent() ? order_latent(c, order) : order_qkv(c, fused, order); break;
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
bool pack_linear(const LinearShape& shape, const std::vector<WeightPart>& parts, const float* bias, Arena& arena,
                 Team& team, PackedLinear& packed) {
  const std::vector<int32_t>& rows = shape.rows;
  packed.k = shape.k;
  packed.effort = parts[0].format == Format::kDense ? dense_effort<T>() : quantized_effort(packed.activations);
  const PanelPacker<T> packer(parts, rows, packed.k);
  if (!packer.arrange(packed, [&](size_t bytes) { return arena.allocate<uint8_t>(bytes); })) return false;
  team.run([&](int tid, int size) {
    const Range own = share(packed.panels, tid, size);
    for (int64_t p = own.begin; p < own.end; ++p) packer.pack(packed, p);
  });
  if (bias == nullptr) return true;
  float* packed_bias = arena.allocate<float>(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) packed_bias[i] = rows[i] < 0 ? 0.0f : bias[rows[i]];
  packed.bias = packed_bias;
  return true;
}

template bool pack_linear<bf16>(const LinearShape&, const std::vector<WeightPart>&, const float*, Arena&, Team&,
                                PackedLinear&);
template bool pack_linear<float>(const LinearShape&, const std::vector<WeightPart>&, const float*, Arena&, Team&,
                                 PackedLinear&);

}  // namespace pdserve
