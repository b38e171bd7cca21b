// Runs a plan's work; the arithmetic is in attention_tile.h, the division of work in attention_plan.cpp.
#include "attention.h"

#include <type_traits>
#include <utility>

#include "attention_fetch.h"
#include "attention_pack.h"
#include "attention_pairs.h"
#include "attention_tile.h"

namespace pdserve {
namespace {

// With more rows a tile is computed for so long that the processor's own prefetcher is early enough.
constexpr int kFetchRows = 24;
constexpr float kLog2E = 1.44269504088896341f;

template <class From, class To>
void convert(const From* from, To* to, int64_t size) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, size * sizeof(To));
  } else {
    for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(from + i));
  }
}

template <class To>
void convert_row(const TokenRows& from, int64_t token, int64_t at, To* to, int64_t size) {
  const int64_t index = token * from.stride + at;
  if (from.dtype == DType::kFloat32) {
    convert(static_cast<const float*>(from.data) + index, to, size);
  } else {
    convert(static_cast<const bf16*>(from.data) + index, to, size);
  }
}

template <class Words>
using RowsKernel = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, int, float*, int64_t, int,
                            const float*);

// By the number of rows.
template <class Words>
constexpr RowsKernel<Words> kMultiplyRows[kBlockRows + 1] = {
    nullptr,
    multiply_rows<Words, 1>,
    multiply_rows<Words, 2>,
    multiply_rows<Words, 3>,
    multiply_rows<Words, 4>,
    multiply_rows<Words, 5>,
    multiply_rows<Words, 6>,
};

// Where the keys of a tile lie: bytes from the pool's begin, for layer 0, head 0. A place for each key, or, where keys
// lie in pairs, for each block of 16.
struct TilePlace {
  int count = 0;
  int64_t offsets[kTile];
};

// The products with a tile that was packed: rows of words side by side.
template <class Words>
struct PackedTile {
  const uint32_t* keys;
  const uint32_t* values;
  int64_t dim;

  void score(int rows, const uint32_t* queries, int vecs, float* scores) const {
    const int words = static_cast<int>(dim / Words::kGroup);
    kMultiplyRows<Words>[rows](queries, words, keys, kTile, words, scores, kTile, vecs, nullptr);
  }

  void weigh(int rows, const uint32_t* weights, int64_t keys_seen, float* sums, const float* factors) const {
    const int64_t padded = (keys_seen + kLanes - 1) / kLanes * kLanes;
    kMultiplyRows<Words>[rows](weights, kTile / Words::kGroup, values, dim, static_cast<int>(padded / Words::kGroup),
                               sums, dim, static_cast<int>(dim / kLanes), factors);
  }
};

#if defined(__AVX512BF16__)
// The products with a tile as it lies in the pool.
struct PairsTile {
  const uint32_t* keys[kTileBlocks];
  const uint32_t* values[kTileBlocks];
  int64_t dim;
  TileFetch& ahead;

  void score(int rows, const uint32_t* queries, int vecs, float* scores) const {
    kScoreRows[rows](queries, dim / 2, keys, vecs, scores, ahead);
  }

  void weigh(int rows, const uint32_t* weights, int64_t keys_seen, float* sums, const float* factors) const {
    kWeighRows[rows](weights, values, dim, static_cast<int>((keys_seen + 1) / 2), sums, factors, ahead);
  }
};
#endif

}  // namespace

// One thread in one layer.
class AttentionWorker {
 public:
  AttentionWorker(AttentionPlan& plan, int64_t layer, const TokenRows& q, const TokenRows& out, int tid)
      : plan_(plan), items_(plan.work_[tid]), memory_(plan.scratch_[tid].data()), q_(q), out_(out) {
    const KVPoolView& pool = plan.pool_;
    head_bytes_ = dim_ * size_of(pool.dtype);
    token_bytes_ = pool.kv_heads * head_bytes_;
    values_offset_ = pool.page_size * token_bytes_;
    base_ = static_cast<const char*>(pool.data) + layer * 2 * values_offset_;
    // Heads lie side by side in a token, or in a block of 16.
    run_ = pool.order == KVOrder::kPairs ? kBlockSlots : 1;
  }

  template <class Words, class Pool, KVOrder order = KVOrder::kTokens>
  void run() {
    if (items_.empty()) return;
    TilePlace places[2];
    int now = 0;
    locate(items_[0], items_[0].key_begin, places[now]);
    for (size_t i = 0; i < items_.size(); ++i) {
      const AttentionItem& item = items_[i];
      const AttentionScratch scratch(memory_, rows_of(item) * heads_of(item), dim_);
      load_queries(item, reinterpret_cast<typename Words::Element*>(scratch.queries));
      for (int32_t key = item.key_begin; key < item.key_end; key += kTile, now ^= 1) {
        // The next tile is fetched while this one is computed.
        TilePlace& next = places[now ^ 1];
        next.count = 0;
        if (key + kTile < item.key_end) {
          locate(item, key + kTile, next);
        } else if (i + 1 < items_.size()) {
          locate(items_[i + 1], items_[i + 1].key_begin, next);
        }
        run_tile<Words, Pool, order>(item, key, places[now], next, scratch);
      }
      if (plan_.splits_[item.entry].num_chunks != 0) {
        leave_part(item, scratch);
      } else {
        write(item, scratch.total);
      }
    }
  }

 private:
  int rows_of(const AttentionItem& item) const { return static_cast<int>((item.q_end - item.q_begin) * group_); }
  static int heads_of(const AttentionItem& item) { return item.head_end - item.head_begin; }

  SoftmaxRows at(const SoftmaxRows& rows, int64_t row) const {
    return {rows.largest + row, rows.sums + row * kLanes, rows.values + row * dim_};
  }

  void merge(const SoftmaxRows& rows, const SoftmaxRows& next, int count) const {
    for (int r = 0; r < count; ++r) {
      const SoftmaxRows a = at(rows, r), b = at(next, r);
      merge_row(a.largest, a.sums, a.values, *b.largest, b.sums, b.values, dim_);
    }
  }

  void locate(const AttentionItem& item, int32_t key, TilePlace& place) const {
    const int64_t size = plan_.pool_.page_size;
    place.count = std::min(kTile, item.key_end - key);
    const int64_t* page = plan_.page_offsets_.data() + plan_.first_page_[item.entry] + key / size;
    int64_t offset = key % size;
    for (int i = 0; i < places_of(place); ++i) {
      place.offsets[i] = *page + offset * token_bytes_;
      offset += run_;
      if (offset == size) {
        offset = 0;
        ++page;
      }
    }
  }

  int places_of(const TilePlace& place) const { return static_cast<int>((place.count + run_ - 1) / run_); }

  template <class Element>
  void load_queries(const AttentionItem& item, Element* queries) const {
    const int64_t width = group_ * dim_;
    for (int32_t head = item.head_begin; head < item.head_end; ++head) {
      for (int32_t token = item.q_begin; token < item.q_end; ++token, queries += width) {
        convert_row(q_, plan_.entries_[item.entry].first_token + token, head * width, queries, width);
      }
    }
  }

  // Rows of one head's keys or values, as words; `wide` takes them where the elements must be widened.
  template <class Words, class Pool>
  void find_rows(const char* base, const TilePlace& place, float* wide, const float* zeros,
                 const uint32_t** rows) const {
    for (int i = 0; i < place.count; ++i) {
      const char* row = base + place.offsets[i];
      if constexpr (!std::is_same_v<typename Words::Element, Pool>) {
        convert(reinterpret_cast<const Pool*>(row), wide + i * dim_, dim_);
        row = reinterpret_cast<const char*>(wide + i * dim_);
      }
      rows[i] = reinterpret_cast<const uint32_t*>(row);
    }
    for (int i = place.count; i % kLanes != 0; ++i) rows[i] = reinterpret_cast<const uint32_t*>(zeros);
  }

  template <class Words, class Pool, KVOrder order>
  void run_tile(const AttentionItem& item, int32_t key, const TilePlace& place, const TilePlace& next,
                const AttentionScratch& scratch) const {
    const int rows = rows_of(item);
    const bool first_chunk = key - item.key_begin < kChunk;
    const SoftmaxRows& state = first_chunk ? scratch.total : scratch.chunk;
    if (key % kChunk == 0) reset(state, rows * heads_of(item), dim_);
    const auto* queries = reinterpret_cast<const typename Words::Element*>(scratch.queries);
    TileFetch ahead;
    const int64_t run_bytes = run_ * head_bytes_;
    ahead.begin(base_ + item.head_begin * run_bytes, next.offsets, rows <= kFetchRows ? places_of(next) : 0,
                heads_of(item) * run_bytes, values_offset_);
    for (int32_t head = item.head_begin; head < item.head_end; ++head) {
      const int64_t row = static_cast<int64_t>(head - item.head_begin) * rows;
      const auto run_blocks = [&](const auto& tile) {
        for (int r = 0; r < rows; r += kBlockRows) {
          run_block<Words>(item, key, place.count, r, std::min(kBlockRows, rows - r), queries + (row + r) * dim_,
                           at(state, row + r), scratch, tile);
          if constexpr (order == KVOrder::kTokens) ahead.fetch(2 * dim_ / Words::kGroup);
        }
      };
      const char* base = base_ + head * run_bytes;
#if defined(__AVX512BF16__)
      if constexpr (order == KVOrder::kPairs) {
        run_blocks(find_tile(base, place, scratch, ahead));
        continue;
      }
#endif
      run_blocks(pack_tile<Words, Pool>(base, place, scratch, ahead));
    }
    const bool chunk_ends = (key + kTile) % kChunk == 0 || key + kTile >= item.key_end;
    if (chunk_ends && !first_chunk) merge(scratch.total, scratch.chunk, rows * heads_of(item));
  }

  // One head's tile, packed.
  template <class Words, class Pool>
  PackedTile<Words> pack_tile(const char* base, const TilePlace& place, const AttentionScratch& scratch,
                              TileFetch& ahead) const {
    const int packed = (place.count + kLanes - 1) / kLanes * kLanes;
    auto* keys = reinterpret_cast<uint32_t*>(scratch.keys);
    auto* values = reinterpret_cast<uint32_t*>(scratch.values);
    const uint32_t* found[kTile];
    find_rows<Words, Pool>(base, place, scratch.wide_keys, scratch.zeros, found);
    pack_keys(found, packed, dim_ / Words::kGroup, keys, ahead);
    find_rows<Words, Pool>(base + values_offset_, place, scratch.wide_values, scratch.zeros, found);
    pack_values(Words{}, found, packed, dim_, values, ahead);
    return {keys, values, dim_};
  }

#if defined(__AVX512BF16__)
  // One head's tile, where it is.
  PairsTile find_tile(const char* base, const TilePlace& place, const AttentionScratch& scratch,
                      TileFetch& ahead) const {
    PairsTile tile{{}, {}, dim_, ahead};
    for (int i = 0; i < places_of(place); ++i) {
      tile.keys[i] = reinterpret_cast<const uint32_t*>(base + place.offsets[i]);
      tile.values[i] = reinterpret_cast<const uint32_t*>(base + values_offset_ + place.offsets[i]);
    }
    if (place.count % 2 != 0) {
      // The last key's neighbour may be anything, and 0 times anything may be NaN.
      const uint32_t*& last = tile.values[(place.count - 1) / kBlockSlots];
      auto* copy = reinterpret_cast<uint32_t*>(scratch.values);
      const int64_t words = (place.count - 1) % kBlockSlots / 2 * dim_;
      std::memcpy(copy, last, (words + dim_) * sizeof(uint32_t));
      for (int64_t d = words; d < words + dim_; ++d) copy[d] &= 0xffff;
      last = copy;
    }
    return tile;
  }
#endif

  // Rows [r, r + count) of the item's head over one tile.
  template <class Words, class Tile>
  void run_block(const AttentionItem& item, int32_t key, int tile_keys, int r, int count,
                 const typename Words::Element* queries, const SoftmaxRows& state,
                 const AttentionScratch& scratch, const Tile& tile) const {
    using Element = typename Words::Element;
    // Row r sees the keys of the tile below `visible(r)`.
    const int64_t first = plan_.entries_[item.entry].start + item.q_begin + 1 - key;
    const auto visible = [&](int row) { return std::min<int64_t>(tile_keys, first + row / group_); };
    const int64_t most = visible(r + count - 1);
    if (most <= 0) return;
    const int vecs = static_cast<int>((most + kLanes - 1) / kLanes);
    tile.score(count, reinterpret_cast<const uint32_t*>(queries), vecs, scratch.scores);
    auto* weights = reinterpret_cast<Element*>(scratch.weights);
    float factors[kBlockRows];
    for (int i = 0; i < count; ++i) {
      const int seen = static_cast<int>(std::max<int64_t>(0, visible(r + i)));
      factors[i] = softmax_row(scratch.scores + i * kTile, vecs, seen, plan_.scale_ * kLog2E, state.largest + i,
                               state.sums + i * kLanes, weights + i * kTile);
    }
    tile.weigh(count, reinterpret_cast<const uint32_t*>(weights), most, state.values, factors);
  }

  // Rows of all heads of the item, divided by their sums.
  void write(const AttentionItem& item, const SoftmaxRows& rows) const {
    int64_t row = 0;
    for (int32_t head = item.head_begin; head < item.head_end; ++head) {
      for (int32_t token = item.q_begin; token < item.q_end; ++token) {
        for (int64_t g = 0; g < group_; ++g, ++row) {
          const int64_t index = (plan_.entries_[item.entry].first_token + token) * out_.stride +
                                (head * group_ + g) * dim_;
          const Vec scale = broadcast(1.0f / sum(load(rows.sums + row * kLanes)));
          const float* values = rows.values + row * dim_;
          if (out_.dtype == DType::kFloat32) {
            scale_row(values, scale, static_cast<float*>(out_.data) + index);
          } else {
            scale_row(values, scale, static_cast<bf16*>(out_.data) + index);
          }
        }
      }
    }
  }

  template <class Out>
  void scale_row(const float* values, Vec scale, Out* out) const {
    for (int64_t d = 0; d < dim_; d += kLanes) store(out + d, load(values + d) * scale);
  }

  // Leaves one chunk's rows for whoever finishes the context's last chunk, which joins them in order.
  void leave_part(const AttentionItem& item, const AttentionScratch& scratch) const {
    const AttentionPlan::Split& split = plan_.splits_[item.entry];
    const int64_t rows = rows_of(item), part_size = rows * (1 + kLanes + dim_);
    const int64_t kv_heads = plan_.pool_.kv_heads;
    const auto part = [&](int64_t chunk, int64_t head) {
      float* memory = plan_.partials_.data() + split.first_partial + (chunk * kv_heads + head) * part_size;
      return SoftmaxRows{memory, memory + rows, memory + rows * (1 + kLanes)};
    };
    const auto copy = [&](const SoftmaxRows& to, const SoftmaxRows& from) {
      std::memcpy(to.largest, from.largest, rows * sizeof(float));
      std::memcpy(to.sums, from.sums, rows * kLanes * sizeof(float));
      std::memcpy(to.values, from.values, rows * dim_ * sizeof(float));
    };
    for (int32_t head = item.head_begin; head < item.head_end; ++head) {
      const int64_t row = (head - item.head_begin) * rows;
      copy(part(item.key_begin / kChunk, head), at(scratch.total, row));
      std::atomic<int32_t>& done = plan_.counters_[split.first_counter + head];
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < split.num_chunks) continue;
      // The next layer counts anew; a barrier lies between.
      done.store(0, std::memory_order_relaxed);
      copy(scratch.total, part(0, head));
      for (int32_t chunk = 1; chunk < split.num_chunks; ++chunk) {
        merge(scratch.total, part(chunk, head), static_cast<int>(rows));
      }
      AttentionItem whole = item;
      whole.head_begin = head;
      whole.head_end = head + 1;
      write(whole, scratch.total);
    }
  }

  AttentionPlan& plan_;
  const std::vector<AttentionItem>& items_;
  float* memory_;
  const TokenRows& q_;
  const TokenRows& out_;
  const int64_t dim_ = plan_.pool_.head_dim;
  const int64_t group_ = plan_.group();
  int64_t head_bytes_, token_bytes_, values_offset_, run_;
  const char* base_;
};

void attention_run(AttentionPlan& plan, int64_t layer, const TokenRows& q, const TokenRows& out, int tid) {
  AttentionWorker worker(plan, layer, q, out, tid);
  if (plan.pool_dtype() == DType::kFloat32) {
    worker.run<FloatWords, float>();
  } else {
#if defined(__AVX512BF16__)
    if (plan.order() == KVOrder::kPairs) {
      worker.run<PairWords, bf16, KVOrder::kPairs>();
    } else {
      worker.run<PairWords, bf16>();
    }
#else
    worker.run<FloatWords, bf16>();
#endif
  }
}

#if defined(__AVX512BF16__)
namespace {

void store_pairs(const KVPoolView& pool, int64_t layer, const int64_t* slots, const TokenRows& k, const TokenRows& v,
                 int64_t begin, int64_t end) {
  const int64_t width = pool.kv_heads * pool.head_dim, values = pool.page_size * width;
  std::vector<float> row(width);
  for (int64_t token = begin; token < end; ++token) {
    const PairsPlace place = find_pairs(pool, layer, slots[token]);
    for (const auto& [rows, offset] : {std::pair{&k, int64_t{0}}, std::pair{&v, values}}) {
      convert_row(*rows, token, 0, row.data(), width);
      for (int64_t at = 0; at < width; at += kLanes) {
        bf16* block = static_cast<bf16*>(pool.data) + place.block + offset + at / pool.head_dim * pool.head_dim * kBlockSlots;
        const int64_t d = at % pool.head_dim;
        if (offset == 0) {
          store_key_pairs(block, place.slot, d, load(row.data() + at));
        } else {
          store_value_pairs(block, place.slot, pool.head_dim, d, load(row.data() + at));
        }
      }
    }
  }
}

}  // namespace
#endif

void store_kv(const KVPoolView& pool, int64_t layer, const int64_t* slots, const TokenRows& k, const TokenRows& v,
              int64_t begin, int64_t end) {
#if defined(__AVX512BF16__)
  if (pool.order == KVOrder::kPairs) return store_pairs(pool, layer, slots, k, v, begin, end);
#endif
  const int64_t size = pool.page_size, width = pool.kv_heads * pool.head_dim;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t page = slots[token] / size, offset = slots[token] % size;
    const int64_t index = ((page * pool.num_layers + layer) * 2 * size + offset) * width;
    if (pool.dtype == DType::kFloat32) {
      float* row = static_cast<float*>(pool.data) + index;
      convert_row(k, token, 0, row, width);
      convert_row(v, token, 0, row + size * width, width);
    } else {
      bf16* row = static_cast<bf16*>(pool.data) + index;
      convert_row(k, token, 0, row, width);
      convert_row(v, token, 0, row + size * width, width);
    }
  }
}

}  // namespace pdserve
