// Paged attention over the page-first KV pool, for any mix of decode tokens and prefill chunks.
//
// Once a pass, on one thread: AttentionPlan::prepare. Then once a layer, on every thread of the team, between barriers:
//   keys and values to the pool (kv_writer.h) | barrier | attention_run | barrier
// attention_run needs no barrier of its own: the last thread to finish a part of a long context joins the parts.
//
// A token's result depends on its query and on the keys and values it sees, and on nothing else, to the last bit: not
// on the other entries, the number of threads, the page size, or whether it was computed as a decode step or in
// the middle of a prefill chunk. Keys are taken in tiles of kTile and chunks of kChunk positions counted from position 0,
// each chunk has its own online softmax (Milakov, Gimelshein 2018), and chunks are joined in order (as in
// flash-decoding), whoever computed them.
//
// Shapes: T tokens of the pass, H query heads, K KV heads, G = H / K, D head_dim, L layers, P pages.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "types.h"

namespace pdserve {

// Element types of rows and pool, chosen at run time; the values are part of the interface to Python.
// Those of one byte are the pool's alone.
enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kFp8E4M3 = 3, kFp8E5M2 = 4 };

template <class T>
constexpr DType dtype_of() {
  return sizeof(T) == 2 ? DType::kBFloat16 : DType::kFloat32;
}

inline int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : type == DType::kBFloat16 ? 2 : 1; }

// Elements of one byte are multiplied with a float32, one for each head of a slot.
inline bool has_scales(DType type) { return size_of(type) == 1; }

// The pool [P, L, 2, ...]: keys then values, each K * page_size * D elements and their scales, as kv_blocks.h has it. D is
// a multiple of 16, page_size a power of two below 16 or a multiple of 16.
// Of latent attention it is [P, L, ...]: rows of D elements that lie like the keys of one head. Their first `value_dim`
// elements, a multiple of 16, are the values. The "KV heads" are then groups of query heads, that all read these rows.
struct KVPoolView {
  void* data;
  DType dtype;
  int64_t num_layers;
  int64_t page_size;
  int64_t kv_heads;
  int64_t head_dim;
  // Heads of the pool, of which these are some, one after another: those of a tensor-parallel rank. `data` points to
  // the first of these in page 0.
  int64_t pool_heads;
  int64_t value_dim;  // 0: keys and values lie apart

  bool is_latent() const { return value_dim != 0; }
  int64_t dim_of_values() const { return is_latent() ? value_dim : head_dim; }
  // What a head of a slot takes, its scale included, in elements.
  int64_t slot_elements() const { return head_dim + (has_scales(dtype) ? static_cast<int64_t>(sizeof(float)) : 0); }
  int64_t slot_bytes() const { return slot_elements() * size_of(dtype); }
  // Elements of all heads' keys of a layer and page, and of all that a layer keeps in a page.
  int64_t keys_size() const { return pool_heads * page_size * slot_elements(); }
  int64_t layer_size() const { return is_latent() ? keys_size() : 2 * keys_size(); }
  int64_t page_bytes() const { return num_layers * layer_size() * size_of(dtype); }
};

// Entry of a pass: tokens [first_token, first_token + q_len) of T are positions [start, start + q_len) of the row.
struct AttentionEntry {
  int32_t row;
  int32_t start;
  int32_t q_len;
  int32_t first_token;
};

// Where the pages of rows stand: [R, stride] int32 slots; and, for a pool whose pages go back behind a window, the page
// there of each page of a slot (else null).
struct PageTable {
  const int32_t* req_to_token;
  int64_t stride;
  const int32_t* window_pages;
};

// Rows of T tokens, `stride` elements apart; a token's heads lie one after another. Elements of `dtype`.
struct TokenRows {
  void* data;
  DType dtype;
  int64_t stride;
};

// Floats on a cache line of their own; grows, and forgets its content when it does.
class AlignedFloats {
 public:
  void reserve(int64_t size);
  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const;
  };
  std::unique_ptr<float[], Free> data_;
  int64_t size_ = 0;
};

// A unit of work: queries [q_begin, q_end) of the entry under KV heads [head_begin, head_end), over keys
// [key_begin, key_end). A part of a split context is one chunk of it.
struct AttentionItem {
  int32_t entry;
  int32_t q_begin, q_end;
  int32_t head_begin, head_end;
  int32_t key_begin, key_end;
  int64_t cost;
};

constexpr int kChunk = 256;  // keys of a chunk, a multiple of kTile

// Which part of the work each thread does, and where the keys lie. Lives for as many passes as its owner likes; each
// prepare forgets the pass before.
class AttentionPlan {
 public:
  // Reads the entries' rows of the table, which must map this pass's tokens already, and keeps none of the pointers. H
  // is a multiple of K. A token sees itself and the `window` - 1 before it; 0: all.
  void prepare(const KVPoolView& pool, int64_t num_heads, int64_t window, const AttentionEntry* entries,
               int64_t num_entries, const PageTable& table, int nthreads);

  DType pool_dtype() const { return pool_.dtype; }

 private:
  friend class AttentionWorker;

  // Where the parts of a split context leave their results.
  struct Split {
    int32_t num_chunks = 0;     // 0: not split
    int32_t first_chunk = 0;    // that any of its queries sees
    int64_t first_partial = 0;  // in floats, among the partial results
    int64_t first_counter = 0;  // one a KV head and block of queries: chunks that are done
  };

  void find_pages(const PageTable& table);
  void make_items(int nthreads);
  void share_out(int nthreads);
  void reserve(int nthreads);
  int64_t keys_of(const AttentionEntry& entry) const { return entry.start + entry.q_len; }
  // Of the first tile that query `q` of the entry sees.
  int32_t first_key(const AttentionEntry& entry, int32_t q) const;
  int64_t group() const { return num_heads_ / pool_.kv_heads; }
  // Tokens of an entry that one item takes at most; a part of a context is that of such a block of queries.
  int32_t query_step() const;

  KVPoolView pool_{};
  int64_t num_heads_ = 0;
  int64_t window_ = 0;
  std::vector<AttentionEntry> entries_;
  std::vector<int64_t> first_page_;    // [B]: where the entry's pages begin in page_offsets_
  std::vector<int64_t> page_offsets_;  // bytes from the pool's begin to each page
  std::vector<Split> splits_;          // [B]
  std::vector<AttentionItem> items_;
  std::vector<std::vector<AttentionItem>> work_;  // by thread
  std::vector<AlignedFloats> scratch_;            // by thread
  AlignedFloats partials_;
  std::unique_ptr<std::atomic<int32_t>[]> counters_;
  int64_t counters_size_ = 0;
};

// What becomes of a product of query and key: cap(scale · q·k), cap(s) = softcap · tanh(s / softcap); softcap 0: s.
struct Scoring {
  float scale;
  float softcap;
  const float* sinks;  // [H], or null: scores of a key that every query of the head sees, whose value is 0 (attention sinks)
};

// out[t] = softmax(cap(scale · q[t] Kᵀ)) V over the keys up to t's own position, and in the plan's window: this thread's
// share of it. Sinks are in the softmax.
void attention_run(AttentionPlan& plan, int64_t layer, const Scoring& scoring, const TokenRows& q, const TokenRows& out,
                   int tid);

}  // namespace pdserve
