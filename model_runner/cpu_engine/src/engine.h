// A whole forward pass of a model in one call, on a team of threads.
//
// Life: constructed -> every weight set -> any number of forward passes, one at a time.
//
// A pass of few tokens (decode) is bound by memory: the threads divide each product among themselves (work_grid.h), so
// that weights are read once or little more, and meet at a barrier after each:
//   norm + qkv + rope + KV store | attention | o_proj + residual | norm + gate_up + activation | down + residual
// (layer_ops.h says what varies). Where a norm comes between a product and the residual they meet twice: it needs the
// whole row. So it is with norms of q and k, which keep the rotation out of the product's finish.
// A pass of many tokens for each thread (prefill) is bound by arithmetic: each thread takes its own tokens through the
// products in blocks whose activations stay in its cache, and only attention needs the others: two barriers a layer.
// Both compute every element in the same order, so that they agree to the last bit.
// A layer with experts is divided by what its tokens have chosen, in passes of either kind: experts_pass.h.
//
// Shapes: T tokens, N hidden size, H query heads, K KV heads, D head_dim, V vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "layer_ops.h"
#include "linear.h"
#include "rank_group.h"
#include "team.h"

namespace pdserve {

// The rotation of each position: element i of a head turns with i + D / 2.
struct RopeTable {
  const float* cos;  // [positions, D / 2]
  const float* sin;
};

struct ForwardArgs {
  int64_t tokens, entries, wanted;
  int64_t scored;                 // of the wanted tokens, so many of the first become logits
  const int64_t* input_ids;       // [T], below V
  const int64_t* positions;       // [T]
  const int64_t* out_cache_loc;   // [T]
  const int64_t* wanted_tokens;   // [wanted], below T
  const AttentionEntry* entry;    // [B]
  const int32_t* req_to_token;    // [R, table_stride]
  int64_t table_stride;
  const int32_t* window_pages;    // page -> page of the window pool that holds the same tokens; null without group 1
  const RopeTable* ropes;         // those that layers name (ProjectQKV::rope)
  float* logits;                  // [scored, V]
  float* states;                  // or null: [wanted, N], the hidden states after the final norm
  int64_t* layers_done;           // or null: set to the number of layers whose keys and values are in the pool
};

enum class LinearKind : int32_t { kQKV = 0, kO = 1, kGateUp = 2, kDown = 3, kHead = 4, kRouter = 5, kQB = 6, kKB = 7, kVB = 8 };

// Of latent attention kQKV is all that the hidden state is multiplied with: q_a, or q where there is none, and kv_a; kQB is
// q_b, kKB [R, Q] and kVB [V, R] are k_b, transposed, and v_b of each head, whose number is in the place of an expert's.
// A weight's place. Of a layer with experts, kGateUp and kDown are those of each `expert`; of the shared one, whose number
// is behind the others'.
struct LinearPlace {
  LinearKind kind;
  int64_t layer;
  int64_t expert;
};

// Some of a weight's rows [rows, k], in the engine's own type or in blocks of `format`.
struct WeightPart {
  const void* data;
  int64_t rows;
  Format format;
};

enum class NormKind : int32_t {
  kBeforeAttention = 0,
  kAfterAttention = 1,
  kBeforeMlp = 2,
  kAfterMlp = 3,
  kQ = 4,
  kK = 5,
  kFinal = 6,
};
constexpr int kLayerNorms = 6;  // those before the final one

// Of a layer: logits of attention sinks, one a query head; what is added to scores where experts are chosen.
enum class VectorKind : int32_t { kSinks = 0, kChoiceBias = 1 };
constexpr int kLayerVectors = 2;

class EngineBase {
 public:
  virtual ~EngineBase() = default;
  // Takes a weight that WeightPacker has packed; all weights are kept by reference. Of `parts`, only rows and formats are
  // read; `bias` is packed as well, or null. False where they can't lie side by side.
  virtual bool set_linear(const LinearPlace& place, const std::vector<WeightPart>& parts, const uint8_t* panels,
                          const float* bias) = 0;
  // Float32, of the size of what it normalises; whatever a family adds to it is added already.
  virtual void set_norm(NormKind kind, int64_t layer, const float* weight) = 0;
  virtual void set_vector(VectorKind kind, int64_t layer, const float* values) = 0;
  // [V, N] in the engine's own type; null: the head is the same, has all rows and is dense.
  virtual void set_embedding(const void* table) = 0;
  virtual void forward(const ForwardArgs& args) = 0;
  // Returns when all ranks of this host have come; at once where there is one.
  virtual void meet() = 0;
  virtual const EngineConfig& config() const = 0;
  // Bytes of weights that all threads read in the last pass, for each kind of linear layer: bytes[kProducts].
  virtual void weight_bytes(int64_t* bytes) const = 0;
};

// `ranks`: whom it computes the model with, as `config` says what of it; null: alone. Then a pass of more tokens than
// RankGroup has room for must not be asked for.
std::unique_ptr<EngineBase> make_engine(const EngineConfig& config, DType dtype, Team& team, RankGroup* ranks);

}  // namespace pdserve
